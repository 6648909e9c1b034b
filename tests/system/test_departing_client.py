"""A client that leaves gives its place back at once, whether it waited or streamed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import pytest

from tests.system.stack import MODEL, Stack, started, until

# Without its end tokens the answer cannot be over before the client leaves.
STREAM = {
    "model": MODEL,
    "temperature": 0,
    "max_tokens": 6000,
    "logit_bias": {"0": -100, "2": -100},
    "stream": True,
}


@pytest.fixture(scope="module")
def narrow() -> Iterator[Stack]:
    """Two sequences at once, so that a third request waits."""
    with started(["scheduler.max_batch_size.CPU=2"]) as running:
        yield running


@contextlib.contextmanager
def streaming(http: httpx.Client, number: int) -> Iterator[None]:
    body = STREAM | {"prompt": f"{number}: the sea, the sea, the sea, the sea,"}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield


def test_a_client_that_leaves_while_streaming_frees_its_slot_and_blocks(narrow: Stack) -> None:
    with narrow.http() as http:
        with streaming(http, 1), streaming(http, 2):
            # Broker and worker write their gauges a few times a second.
            until(lambda: narrow.total("mirror_broker_in_flight") == 2, 2.0, "both in flight")
            until(lambda: narrow.total("mirror_worker_kv_blocks_used") > 0, 2.0, "blocks in use")
        until(narrow.idle, 1.0, "slots and blocks free")
    assert narrow.total("mirror_gateway_disconnects_total") >= 2


def test_a_client_that_leaves_the_queue_is_forgotten(narrow: Stack) -> None:
    with narrow.http() as http, streaming(http, 1), streaming(http, 2):
        body = STREAM | {"prompt": "third", "stream": False}
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=body, timeout=1.0)
        until(lambda: narrow.total("mirror_broker_queue_depth") == 0, 1.0, "the queue is empty")
        assert narrow.total("mirror_broker_in_flight") == 2
    until(narrow.idle, 1.0, "slots and blocks free")


def test_a_waiting_request_takes_the_freed_slot(narrow: Stack) -> None:
    with narrow.http() as http, streaming(http, 1):
        with narrow.http() as other, streaming(other, 2), contextlib.suppress(httpx.ReadTimeout):
            http.post("/v1/completions", json=STREAM | {"prompt": "x"}, timeout=0.5)
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 2}
        assert http.post("/v1/completions", json=body).status_code == 200
    until(narrow.idle, 1.0, "slots and blocks free")


def test_a_client_without_streaming_that_leaves_frees_its_slot(narrow: Stack) -> None:
    with narrow.http() as http:
        body = STREAM | {"prompt": "the sea, the sea,", "stream": False}
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=body, timeout=1.0)
    until(narrow.idle, 1.0, "slots and blocks free")
