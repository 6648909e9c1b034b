"""The broker and its client, in real processes, with a scripted worker."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import pytest

from mirror_sd.errors import ContextLengthExceeded, DeadlineExceeded, NoWorker, QueueFull
from tests.unit.serving.broker_stack import (
    BrokerStack,
    broker_stack,
    collect,
    expected,
    make_submit,
    wait_for_stats,
)
from tests.unit.serving.scripted_worker import EXIT, HANG, REFUSE, SKIP


@pytest.fixture
def stack() -> Iterator[BrokerStack]:
    with broker_stack() as stack:
        yield stack


def test_tokens_arrive_in_order_and_the_stream_ends_once(stack: BrokerStack) -> None:
    async def scenario() -> None:
        stack.start_worker("w0")
        async with stack.client() as client:
            submit = make_submit("a", tokens=30)
            assert await collect(client, submit) == expected(submit)
            stats = await client.stats()
            assert (stats.running, stats.waiting, client.alive) == (0, 0, True)
            assert [worker.worker_id for worker in stats.workers] == ["w0"]

    asyncio.run(scenario())


def test_a_killed_worker_changes_no_token(stack: BrokerStack) -> None:
    async def scenario() -> None:
        worker = stack.start_worker("w0")

        def kill_and_replace(count: int) -> None:
            if count == 20:
                worker.kill()
                stack.start_worker("w1")

        async with stack.client() as client:
            submit = make_submit("a", tokens=60)
            assert await collect(client, submit, kill_and_replace) == expected(submit)

    asyncio.run(scenario())


def test_a_killed_broker_changes_no_token(stack: BrokerStack) -> None:
    async def scenario() -> None:
        stack.start_worker("w0")

        def kill_and_restart(count: int) -> None:
            if count == 20:
                stack.broker.kill()
                stack.broker.wait()
                stack.start_broker()

        async with stack.client() as client:
            submits = [make_submit(f"r{i}", tokens=60, prompt=(i + 100,)) for i in range(6)]
            first, *rest = submits
            answers = await asyncio.gather(
                collect(client, first, kill_and_restart), *(collect(client, s) for s in rest)
            )
            assert answers == [expected(submit) for submit in submits]

    asyncio.run(scenario())
