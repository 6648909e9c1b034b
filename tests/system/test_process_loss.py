"""Any process behind nginx may die; its clients hardly notice."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.system.events import events, text_of
from tests.system.stack import MODEL, Stack, started, until

PROMPT = "The harbour master wrote in his diary every evening. On Monday he wrote:"
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 77}
# Without its end tokens an answer lasts as long as it is asked to.
ENDLESS: dict[str, Any] = GREEDY | {"logit_bias": {"0": -100, "2": -100}}
# The same is asked again and again: longer drafts from the answers given before would make an
# answer whole before anything could be done to it.
PACED: dict[str, Any] = {"speculation": {"max_tokens": 2}}


@pytest.fixture(scope="module")
def mortal() -> Iterator[Stack]:
    """A stack of which every process may be killed."""
    with started([]) as running:
        yield running


def body(sampling: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens} | sampling | PACED


def undisturbed(http: httpx.Client, sampling: dict[str, Any], max_tokens: int) -> str:
    answer = http.post("/v1/completions", json=body(sampling, max_tokens))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def disturbed(
    http: httpx.Client, sampling: dict[str, Any], max_tokens: int, harm: Callable[[], None]
) -> str:
    """The text of a stream during which, after a few chunks, `harm` was done."""
    wanted = body(sampling, max_tokens) | {"stream": True}
    with http.stream("POST", "/v1/completions", json=wanted) as response:
        assert response.status_code == 200
        chunks = []
        for chunk in events(response):
            chunks.append(chunk)
            if len(chunks) == 5:
                harm()
    assert len(text_of(chunks[:5])) < len(text_of(chunks)) / 2, "harmed too late to matter"
    return text_of(chunks)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_stream_survives_its_worker_unchanged(mortal: Stack, sampling: dict[str, Any]) -> None:
    with mortal.http() as http:
        expected = undisturbed(http, sampling, 96)
        restarts = mortal.total("mirror_pool_worker_restarts_total")
        resumes = mortal.total("mirror_gateway_resumes_total")
        [worker] = mortal.pids("worker")
        assert disturbed(http, sampling, 96, lambda: kill(worker)) == expected
    assert mortal.pids("worker") != [worker]
    assert mortal.total("mirror_pool_worker_restarts_total") == restarts + 1
    assert mortal.total("mirror_gateway_resumes_total") > resumes
    until(mortal.idle, 5, "idle again")


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_stream_survives_the_broker_unchanged(mortal: Stack, sampling: dict[str, Any]) -> None:
    with mortal.http() as http:
        expected = undisturbed(http, sampling, 96)
        [broker] = mortal.pids("broker")
        assert disturbed(http, sampling, 96, lambda: kill(broker)) == expected
    until(lambda: mortal.pids("broker") not in ([], [broker]), 10, "another broker")
    until(mortal.idle, 5, "idle again")


def test_requests_sent_while_the_worker_is_away_wait_for_the_next(mortal: Stack) -> None:
    with mortal.http() as http:
        expected = undisturbed(http, GREEDY, 8)
        [worker] = mortal.pids("worker")
        kill(worker)
        assert undisturbed(http, GREEDY, 8) == expected


def kill_gateway(stack: Stack, pid: int) -> None:
    """gunicorn's arbiter and its worker die together, as when the machine runs out of memory."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in family:
        process.kill()


def holding_gateway(stack: Stack) -> tuple[int, int] | None:
    """A gateway that the edge waits for: its process, and for how many answers; None if there is
    none. It may be one that the edge avoided a moment ago, so nobody can know which."""
    held = {
        labels["gateway"]: int(value)
        for name, labels, value in stack.samples()
        if name == "mirror_edge_in_flight" and value > 0
    }
    for pid in stack.pids("gateway") if held else []:
        command = " ".join(psutil.Process(pid).cmdline())
        for gateway, count in held.items():
            if f"gateway-{gateway}.sock" in command:
                return pid, count
    return None


def test_a_gateway_that_dies_before_it_answered_is_replaced_by_the_other(mortal: Stack) -> None:
    answers: list[str] = []

    def ask() -> None:
        with mortal.http() as http:
            answers.append(undisturbed(http, ENDLESS, 2000))

    with mortal.http() as http:
        expected = undisturbed(http, ENDLESS, 2000)
    retries = mortal.total("mirror_edge_retries_total")
    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: holding_gateway(mortal) is not None, 10, "a gateway has the request")
    holder = holding_gateway(mortal)
    assert holder is not None
    kill_gateway(mortal, holder[0])
    thread.join()
    assert answers == [expected]
    assert mortal.total("mirror_edge_retries_total") >= retries + 1
    until(lambda: len(mortal.pids("gateway")) == 2, 10, "the gateway is back")
    until(mortal.idle, 5, "idle again")


def test_a_stream_whose_gateway_dies_ends_with_an_error_event(mortal: Stack) -> None:
    first_begun = threading.Event()
    both_begun = threading.Barrier(3, timeout=60)
    outcomes: list[str] = []

    def read() -> None:
        with mortal.client() as client:
            stream = client.completions.create(
                model=MODEL,
                prompt=PROMPT,
                max_tokens=600,
                stream=True,
                extra_body=PACED,
                **ENDLESS,
            )
            try:
                for number, _ in enumerate(stream):
                    if number == 0:
                        first_begun.set()
                    if number == 2:
                        both_begun.wait()
                outcomes.append("complete")
            except openai.APIError as error:
                outcomes.append(f"{error.code}: {error.message}")

    threads = [threading.Thread(target=read) for _ in range(2)]
    threads[0].start()
    assert first_begun.wait(60), "the first stream is in flight before the second is placed"
    threads[1].start()
    both_begun.wait()
    holder = holding_gateway(mortal)
    assert holder is not None
    victim, streams = holder
    kill_gateway(mortal, victim)
    for thread in threads:
        thread.join()
    errors = [outcome for outcome in outcomes if outcome != "complete"]
    assert len(errors) == streams
    assert not any("None" in error for error in errors)
    assert outcomes.count("complete") == 2 - streams
    assert mortal.total("mirror_edge_stream_errors_total") >= 1
    until(mortal.idle, 5, "the dead gateway's sequence is freed")


def test_after_every_loss_the_stack_is_healthy(mortal: Stack) -> None:
    with mortal.http() as http:
        until(lambda: http.get("/health").status_code == 200, 10, "healthy")
        assert undisturbed(http, GREEDY, 4)
    roles = sorted(item["role"] for item in mortal.status()["processes"])
    assert roles.count("worker") == roles.count("broker") == 1
    assert roles.count("gateway") == 2
