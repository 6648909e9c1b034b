"""The gateway as gunicorn runs it, through the real broker to a scripted worker."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.unit.serving.gateway_process import GatewayProcess, completion_text, gateway_process

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    with gateway_process() as running:
        yield running


def completion(prompt: str = "hello", tokens: int = 10, **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "prompt": prompt, "max_tokens": tokens, **fields}


def texts(response: httpx.Response) -> Iterator[str]:
    """The texts of a streamed completion as they come; fails on an error event."""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            body = json.loads(line.removeprefix("data: "))
            assert "error" not in body, body
            yield from (choice["text"] for choice in body["choices"])


def wait_until_idle(client: httpx.Client, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while (state := client.get("/admin/state").json()) and (state["running"] or state["waiting"]):
        assert time.monotonic() < deadline, state
        time.sleep(0.02)


def test_answers_come_through_whole_and_streamed(gateway: GatewayProcess) -> None:
    with gateway.http() as client:
        whole = client.post(COMPLETIONS, json=completion(tokens=30)).json()
        assert whole["choices"][0]["text"] == completion_text("hello", 30)
        assert whole["choices"][0]["finish_reason"] == "length"
        with client.stream("POST", COMPLETIONS, json=completion(tokens=30, stream=True)) as answer:
            pieces = list(texts(answer))
        assert "".join(pieces) == completion_text("hello", 30) and len(pieces) > 10


def test_many_clients_get_their_own_answers(gateway: GatewayProcess) -> None:
    def ask(number: int) -> tuple[str, str]:
        prompt, tokens = f"question {number}", 5 + number % 20
        with gateway.http() as client:
            body = completion(prompt, tokens, stream=bool(number % 2))
            if number % 2:
                with client.stream("POST", COMPLETIONS, json=body) as answer:
                    text = "".join(texts(answer))
            else:
                text = client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
        return text, completion_text(prompt, tokens)

    with ThreadPoolExecutor(16) as pool:
        wrong = [(given, right) for given, right in pool.map(ask, range(64)) if given != right]
    assert wrong == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot_within_a_second(
    gateway: GatewayProcess, stream: bool
) -> None:
    body = json.dumps(completion(tokens=4000, n=6, stream=stream)).encode()
    with gateway.http() as client, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(gateway.socket))
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        while client.get("/admin/state").json()["running"] < 4:
            time.sleep(0.01)
        # Two of the six choices still wait for a slot.
        assert client.get("/admin/state").json()["waiting"] == 2
        connection.close()
        wait_until_idle(client, 1.0)


@pytest.mark.parametrize(
    "request_head",
    [
        b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"model":',
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le",
        b"\x00\xff" * 50_000,
    ],
)
def test_half_a_request_harms_nobody(gateway: GatewayProcess, request_head: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(gateway.socket))
        with contextlib.suppress(BrokenPipeError):  # refused before it was all sent
            connection.sendall(request_head)
    with gateway.http() as client:
        assert client.post(COMPLETIONS, json=completion()).status_code == 200


def test_a_refused_request_leaves_its_connection_usable(gateway: GatewayProcess) -> None:
    with gateway.http() as client:
        for _ in range(2):
            assert client.post(COMPLETIONS, json=completion(tokens=0)).status_code == 400
            assert client.post(COMPLETIONS, json=completion()).status_code == 200


def test_metrics_tell_of_the_requests(gateway: GatewayProcess) -> None:
    with gateway.http() as client:
        client.post(COMPLETIONS, json=completion())
        text = client.get("/metrics").text
    for name in (
        'mirror_gateway_requests_total{class="cpu",status="200",tier="standard"}',
        "mirror_gateway_time_to_first_token_seconds_bucket",
        "mirror_gateway_inter_token_latency_seconds_count",
        'mirror_gateway_completion_tokens_total{class="cpu"}',
        "mirror_gateway_disconnects_total",
    ):
        assert name in text, name


def test_a_killed_broker_does_not_show_in_the_stream() -> None:
    with gateway_process() as gateway, gateway.http() as client:
        request = client.stream("POST", COMPLETIONS, json=completion(tokens=80, stream=True))
        with request as answer:
            seen = ""
            for piece in texts(answer):
                seen += piece
                if seen.count(" ") == 20:
                    gateway.stack.broker.kill()
                    gateway.stack.broker.wait()
                    gateway.stack.start_broker()
        assert seen == completion_text("hello", 80)


def test_a_stopping_gateway_finishes_its_streams() -> None:
    with gateway_process() as gateway, gateway.http() as client:
        request = client.stream("POST", COMPLETIONS, json=completion(tokens=200, stream=True))
        with request as answer:
            pieces = texts(answer)
            seen = next(pieces) + next(pieces)
            gateway.process.send_signal(signal.SIGTERM)
            seen += "".join(pieces)
        assert seen == completion_text("hello", 200)
        client.close()
        assert gateway.process.wait(10) == 0
        assert not gateway.socket.exists()


def test_health_fails_without_a_worker_and_recovers() -> None:
    with gateway_process() as gateway, gateway.http() as client:
        gateway.stack.processes[1].kill()
        deadline = time.monotonic() + 5
        while client.get("/health").status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "no worker" in client.get("/health").json()["reason"]
        gateway.stack.start_worker("w1")
        gateway.wait_until_healthy()
