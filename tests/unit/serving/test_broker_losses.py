"""Workers, brokers and gateways die, stop and hang; the answers are those of an undisturbed run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from mirror_sd.errors import DeadlineExceeded, NoWorker
from mirror_sd.messages import Chunk
from tests.unit.serving.broker_stack import (
    BEAT_MS,
    BrokerStack,
    broker_stack,
    collect,
    expected,
    generate,
    make_submit,
    wait_for_stats,
)
from tests.unit.serving.scripted_worker import EXIT, HANG, SKIP


@pytest.fixture
def stack() -> Iterator[BrokerStack]:
    with broker_stack() as stack:
        yield stack


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


def test_a_stopped_worker_is_given_up_and_starts_afresh_when_it_wakes(stack: BrokerStack) -> None:
    async def scenario() -> None:
        first = stack.start_worker("w0")

        def stop_and_replace(count: int) -> None:
            if count == 20:
                first.send_signal(signal.SIGSTOP)
                stack.start_worker("w1")

        async with stack.client() as client:
            submit = make_submit("a", tokens=60)
            assert await collect(client, submit, stop_and_replace) == expected(submit)
            first.send_signal(signal.SIGCONT)
            stats = await wait_for_stats(client, lambda s: len(s.workers) == 2)
            assert {worker.worker_id for worker in stats.workers} == {"w0", "w1"}
            more = [make_submit(f"b{i}", tokens=10) for i in range(8)]
            answers = await asyncio.gather(*(collect(client, s) for s in more))
            assert answers == [expected(s) for s in more]

    asyncio.run(scenario())


def test_a_stopped_broker_delays_but_loses_nothing(stack: BrokerStack) -> None:
    async def scenario() -> None:
        stack.start_worker("w0")
        async with stack.client() as client:
            submit = make_submit("a", tokens=100)
            running = asyncio.create_task(collect(client, submit))
            await wait_for_stats(client, lambda s: s.running == 1)
            stack.broker.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.6)
            assert not client.alive and not running.done()
            with pytest.raises(NoWorker):
                await client.stats()
            stack.broker.send_signal(signal.SIGCONT)
            assert await running == expected(submit)
            assert client.alive

    asyncio.run(scenario())


def test_requests_made_while_there_is_no_broker_are_served_when_it_comes(
    stack: BrokerStack,
) -> None:
    async def scenario() -> None:
        stack.broker.kill()
        stack.broker.wait()
        async with stack.client() as client:
            submit = make_submit("a")
            running = asyncio.create_task(collect(client, submit))
            await asyncio.sleep(0.2)
            assert not client.alive
            stack.start_broker()
            stack.start_worker("w0")
            assert await running == expected(submit)

    asyncio.run(scenario())


def test_the_requests_of_a_killed_gateway_are_cancelled_at_once(stack: BrokerStack) -> None:
    async def scenario() -> None:
        stack.start_worker("w0", slots=1)
        gateway = stack.start_gateway(requests=3)
        async with stack.client() as client:
            await wait_for_stats(client, lambda s: (s.running, s.waiting) == (1, 2))
            gateway.kill()
            stats = await wait_for_stats(
                client, lambda s: (s.running, s.waiting) == (0, 0), within_s=2.0
            )
            assert len(stats.gateways) == 1

    asyncio.run(scenario())


def test_a_killed_gateway_leaves_the_queue_though_nothing_is_sent_to_it(
    stack: BrokerStack,
) -> None:
    async def scenario() -> None:
        gateway = stack.start_gateway(requests=3)
        async with stack.client() as client:
            await wait_for_stats(client, lambda s: s.waiting == 3)
            await asyncio.sleep(BEAT_MS / 1000)
            gateway.kill()
            await wait_for_stats(client, lambda s: s.waiting == 0, within_s=2.0)

    asyncio.run(scenario())


def test_worker_and_broker_die_under_load_and_every_answer_is_whole(stack: BrokerStack) -> None:
    async def scenario() -> None:
        workers = [stack.start_worker(f"w{i}", slots=8) for i in range(2)]
        async with stack.client() as client:
            submits = [make_submit(f"r{i}", prompt=(i + 100,), tokens=40) for i in range(40)]
            running = [asyncio.create_task(collect(client, submit)) for submit in submits]
            await asyncio.sleep(0.4)
            workers[0].kill()
            stack.start_worker("w2", slots=8)
            await asyncio.sleep(0.2)
            stack.broker.kill()
            stack.broker.wait()
            workers[1].kill()
            stack.start_broker()
            stack.start_worker("w3", slots=8)
            assert await asyncio.gather(*running) == [expected(submit) for submit in submits]

    asyncio.run(scenario())


def test_a_gap_in_the_tokens_is_mended(stack: BrokerStack) -> None:
    async def scenario() -> None:
        stack.start_worker("w0")
        async with stack.client() as client:
            submit = make_submit("a", prompt=(SKIP, 9), tokens=12)
            assert await collect(client, submit) == expected(submit)
            await wait_for_stats(client, lambda s: s.workers[0].kv_blocks_used == 0)

    asyncio.run(scenario())


def test_a_worker_that_hangs_is_replaced_by_one_that_does_not(stack: BrokerStack) -> None:
    async def scenario() -> None:
        hanging = stack.start_worker("w0")
        async with stack.client() as client:
            submit = make_submit("a", prompt=(HANG,), tokens=5, timeout_s=2.5)
            running = asyncio.create_task(collect(client, submit))
            stats = await wait_for_stats(
                client, lambda s: any(w.stalled_s > 0.5 for w in s.workers)
            )
            assert stats.workers[0].silent_s < 0.5
            # Every worker hangs on this one, so its deadline ends it; others are served.
            with pytest.raises(DeadlineExceeded):
                await running
            hanging.kill()
            stack.start_worker("w1")
            other = make_submit("b")
            assert await collect(client, other) == expected(other)

    asyncio.run(scenario())


def test_a_request_that_kills_every_worker_is_given_up(stack: BrokerStack) -> None:
    async def scenario() -> None:
        async def keep_workers_coming() -> None:
            number = 0
            while True:
                worker = stack.start_worker(f"w{number}")
                await asyncio.to_thread(worker.wait)
                number += 1

        respawn = asyncio.create_task(keep_workers_coming())
        async with stack.client() as client:
            with pytest.raises(NoWorker):
                await collect(client, make_submit("poison", prompt=(EXIT,)))
            innocent = make_submit("b")
            assert await collect(client, innocent) == expected(innocent)
        respawn.cancel()
        stack.close()

    asyncio.run(scenario())


def test_logprobs_come_once_for_each_token_across_a_resume(stack: BrokerStack) -> None:
    async def scenario() -> None:
        worker = stack.start_worker("w0")
        async with stack.client() as client:
            params = {"logprobs": 0, "prompt_logprobs": True}
            submit = make_submit("a", tokens=40, params=params)
            scored: list[int] = []
            prompts = []
            async for event in generate(client, submit):
                if isinstance(event, Chunk):
                    scored += [entry.token_id for entry in event.logprobs or ()]
                    prompts += [event.prompt_logprobs] if event.prompt_logprobs else []
                    if len(scored) == 15:
                        worker.kill()
                        stack.start_worker("w1")
            assert scored == expected(submit)
            assert [len(entry) for entry in prompts] == [len(submit.prompt)]

    asyncio.run(scenario())
