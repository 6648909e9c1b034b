"""Sixty-four clients at once: nothing fails, nothing is lost or crossed, nothing leaks."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.system.events import stream, text_of
from tests.system.stack import MODEL, Stack, started, until

CLIENTS = 64


@pytest.fixture(scope="module")
def busy() -> Iterator[Stack]:
    """A KV cache so small that all of it is soon in use: untouched pages of a large one would look
    like growth."""
    # The load is the point: on a machine that others use too, it must not be shed for its latency.
    with started(["engine.kv_cache_mb=64", "probe.inter_token_p99_ms=60000"]) as running:
        yield running


def prompts(count: int) -> list[dict[str, Any]]:
    """Bodies of mixed lengths, each with an answer of its own: the model carries its own number
    on, or samples under its own seed."""
    bodies: list[dict[str, Any]] = []
    for number in range(count):
        code = f"{number * 7919 % 10_000:04d}"
        pattern = f"code {code} ok, " * (2 + number % 5 * (1 + number % 3))
        sampling = {"temperature": 0} if number % 4 else {"temperature": 1.0, "seed": number}
        bodies.append(
            {"model": MODEL, "prompt": pattern + "code", "max_tokens": 4 + number % 7} | sampling
        )
    return bodies


def ask(http: httpx.Client, body: dict[str, Any], streamed: bool) -> str:
    if streamed:
        return text_of(stream(http, "/v1/completions", body))
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def worker_rss_mb(stack: Stack) -> float:
    [worker] = stack.pids("worker")
    return float(psutil.Process(worker).memory_info().rss) / 2**20


def run_load(stack: Stack, requests: int, kinds: int) -> None:
    """`requests` of `kinds` different ones, 64 at a time, each held against its answer alone."""
    bodies = prompts(kinds)
    with stack.http() as http:
        alone = [ask(http, body, streamed=False) for body in bodies]
    # Crossed answers could not be seen among equal ones.
    assert len(set(alone)) > kinds * 0.9
    order = [number % kinds for number in range(requests)]
    random.Random(3).shuffle(order)
    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)
    with (
        httpx.Client(base_url=stack.url, timeout=300, limits=limits) as http,
        ThreadPoolExecutor(CLIENTS) as threads,
    ):
        # Until then buffers grow to the largest batch and the allocator finds its size.
        warm = requests * 2 // 5
        found = list(threads.map(lambda k: ask(http, bodies[k], k % 2 == 0), order[:warm]))
        rss_mb = worker_rss_mb(stack)
        found += threads.map(lambda k: ask(http, bodies[k], k % 2 == 0), order[warm:])
    wrong = Counter(kind for kind, text in zip(order, found, strict=True) if text != alone[kind])
    assert wrong == Counter()
    until(stack.idle, 2.0, "no block is held at idle")
    grown_mb = worker_rss_mb(stack) - rss_mb
    assert grown_mb < 64, f"the worker grew by {grown_mb:.0f} MB"


@pytest.mark.timeout(600)
def test_five_hundred_requests_of_sixty_four_clients_are_all_answered_right(busy: Stack) -> None:
    answered = busy.total("mirror_gateway_requests_total", status="200")
    run_load(busy, requests=500, kinds=50)
    assert busy.total("mirror_gateway_requests_total", status="200") == answered + 550


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_stays_flat_over_ten_minutes_of_load(busy: Stack) -> None:
    begun = time.monotonic()
    while time.monotonic() - begun < 600:
        run_load(busy, requests=1000, kinds=100)
