"""Real nginx: gateways that are dead or die, streams that break, clients that leave."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.openresty.stack import (
    CHAT,
    Edge,
    chat,
    error_of,
    post_head,
    wait_until,
)

pytestmark = pytest.mark.system


def test_a_dead_gateway_is_passed_over(edge: Edge) -> None:
    edge.gateways[0].stop()
    for _ in range(10):
        assert chat(edge, {}).status_code == 200
    wait_until(lambda: edge.in_flight() == [0, 0])


def test_a_post_moves_on_when_its_gateway_dies_before_a_byte(edge: Edge) -> None:
    retries = edge.metric("mirror_edge_retries_total")
    first, second = edge.gateways
    first.send_signal(signal.SIGSTOP)
    second.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        held = [pool.submit(chat, edge, {"n": n}) for n in range(4)]
        time.sleep(0.3)
        first.stop()
        second.send_signal(signal.SIGCONT)
        answers = [future.result() for future in held]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert {answer.json()["pid"] for answer in answers} == {second.pid}
    assert edge.metric("mirror_edge_retries_total") >= retries + 1
    wait_until(lambda: edge.in_flight() == [0, 0])


def test_a_request_that_no_gateway_survives_is_tried_three_times_at_most(edge: Edge) -> None:
    for _ in range(8):
        chat(edge, {})
    before = sum(gateway.seen()["requests"] for gateway in edge.gateways)
    answer = chat(edge, {"act": "drop"})
    assert answer.status_code == 502
    assert error_of(answer.content)["code"] == "bad_gateway"
    tries = sum(gateway.seen()["requests"] for gateway in edge.gateways) - before
    assert 2 <= tries <= 3
    wait_until(lambda: edge.in_flight() == [0, 0])


def test_with_all_gateways_gone_the_answer_is_a_503(edge: Edge) -> None:
    for gateway in edge.gateways:
        gateway.stop()
    for answer in (chat(edge, {}), httpx.get(edge.url + "/health")):
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert error_of(answer.content)["code"] == "no_gateway"
    metrics = httpx.get(edge.url + "/metrics")
    assert metrics.status_code == 200
    assert "mirror_edge_gateway_scrape_ok 0" in metrics.text
    edge.gateways[0].start()
    assert chat(edge, {}).status_code == 200


def events(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        if line:
            assert line.startswith("data: "), line
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def test_each_event_arrives_before_the_next_is_sent(edge: Edge) -> None:
    request = {"act": "stream", "events": 3, "interval_s": 0.4}
    with httpx.stream("POST", edge.url + CHAT, json=request) as answer:
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["x-request-id"]
        sent = []
        for event in events(answer.iter_lines()):
            sent.append(max(gateway.seen()["events_sent"] for gateway in edge.gateways))
            if event == "[DONE]":
                break
            assert event["text"] == "你好"
    first = sent[0]
    assert sent[:3] == [first, first + 1, first + 2]


def test_a_client_that_accepts_gzip_gets_a_plain_stream(edge: Edge) -> None:
    answer = chat(edge, {"act": "stream"}, headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in answer.headers
    assert answer.text.endswith("data: [DONE]\n\n")


def test_a_gateway_killed_in_mid_stream_ends_it_with_an_error_event(edge: Edge) -> None:
    cut = edge.metric("mirror_edge_stream_errors_total")
    before = [gateway.seen()["requests"] for gateway in edge.gateways]
    with httpx.stream("POST", edge.url + CHAT, json={"act": "die_streaming"}) as answer:
        assert answer.status_code == 200
        *whole, last = events(answer.iter_lines())
    assert whole == [{"index": 0}, {"index": 1}]
    error = error_of(json.dumps(last))
    assert error["type"] == "server_error"
    assert error["code"] == "stream_interrupted"
    assert answer.headers["x-request-id"] in error["message"]
    # Its connection is closed a moment before the process is gone.
    wait_until(lambda: sum(gateway.is_alive for gateway in edge.gateways) == 1)
    [survivor] = [i for i, gateway in enumerate(edge.gateways) if gateway.is_alive]
    assert edge.gateways[survivor].seen()["requests"] == before[survivor]
    assert edge.metric("mirror_edge_stream_errors_total") == cut + 1
    wait_until(lambda: edge.in_flight() == [0, 0])


def test_headers_alone_followed_by_death_end_with_an_error_event(edge: Edge) -> None:
    answer = chat(edge, {"act": "die_after_headers"})
    [last] = events(iter(answer.text.splitlines()))
    assert error_of(json.dumps(last))["code"] == "stream_interrupted"


@pytest.mark.parametrize(
    "request_body", [{"act": "stream", "events": 1000, "interval_s": 0.05}, {"act": "hang"}]
)
def test_a_client_that_leaves_is_noticed_by_the_gateway_within_a_second(
    edge: Edge, request_body: dict[str, Any]
) -> None:
    def left() -> int:
        return sum(len(gateway.seen()["left_at"]) for gateway in edge.gateways)

    before = left()
    incomplete = edge.metric("mirror_edge_incomplete_answers_total")
    with socket.create_connection(("127.0.0.1", edge.port)) as link:
        body = json.dumps(request_body).encode()
        link.sendall(post_head(CHAT, len(body)) + body)
        wait_until(lambda: sum(edge.in_flight()) == 1)
    wait_until(lambda: left() == before + 1, 1.0)
    wait_until(lambda: edge.in_flight() == [0, 0])
    assert edge.metric("mirror_edge_incomplete_answers_total") == incomplete + 1
