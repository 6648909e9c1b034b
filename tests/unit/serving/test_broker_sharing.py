"""Displacement and merging with real processes: broker, gateways' clients, scripted workers."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from mirror_sd.messages import MergeProfile, Submit
from mirror_sd.serving.broker_client import BrokerClient
from tests.unit.serving.broker_stack import (
    BrokerStack,
    broker_stack,
    collect,
    expected,
    generate,
    make_submit,
    wait_for_stats,
)

PROFILE = MergeProfile(exact=b"e", partition=b"p", scope=b"s", signature=bytes(range(256)))


def twin(name: str, tokens: int = 150) -> Submit:
    return make_submit(name, tokens=tokens, merge=PROFILE)


async def begun(client: BrokerClient, name: str) -> asyncio.Task[list[int]]:
    """A request that has some tokens already."""
    is_running = asyncio.Event()
    task = asyncio.create_task(
        collect(client, twin(name), lambda count: is_running.set() if count > 5 else None)
    )
    await asyncio.wait_for(is_running.wait(), 10)
    return task


def test_a_vip_displaces_a_standard_stream_that_notices_only_a_pause() -> None:
    async def scenario(stack: BrokerStack) -> None:
        stack.start_worker("w0", slots=2)
        async with stack.client() as client:
            submits = [make_submit(f"s{i}", tokens=100 + 60 * i, prompt=(i, 5)) for i in range(2)]
            running = [asyncio.create_task(collect(client, submit)) for submit in submits]
            await wait_for_stats(client, lambda s: s.running == 2)
            vip = make_submit("v", tokens=20, tier="vip")
            assert await asyncio.wait_for(collect(client, vip), 1.0) == expected(vip)
            assert await asyncio.gather(*running) == [expected(submit) for submit in submits]
        assert stack.log.read_text().count("displaced by a VIP") == 1

    with broker_stack() as stack:
        asyncio.run(scenario(stack))


def test_many_vips_among_many_standard_requests_lose_nothing() -> None:
    async def scenario(stack: BrokerStack) -> None:
        stack.start_worker("w0", slots=3, step_ms=2)
        async with stack.client("g0") as one, stack.client("g1") as two:
            submits = [
                make_submit(
                    f"r{i}",
                    tokens=10 + i % 40,
                    prompt=(i + 100, i + 20),
                    tenant=f"t{i % 3}",
                    tier="vip" if i % 5 == 0 else "standard",
                )
                for i in range(80)
            ]
            answers = await asyncio.gather(
                *(collect((one, two)[i % 2], submit) for i, submit in enumerate(submits))
            )
            assert answers == [expected(submit) for submit in submits]
            stats = await one.stats()
            assert (stats.running, stats.waiting) == (0, 0)

    with broker_stack() as stack:
        asyncio.run(scenario(stack))


def test_identical_requests_of_two_gateways_are_one_sequence_on_the_worker() -> None:
    async def scenario(stack: BrokerStack) -> None:
        stack.start_worker("w0", slots=1)
        async with stack.client("g0") as one, stack.client("g1") as two:
            first = await begun(one, "a")
            late = [asyncio.create_task(collect(two, twin(f"late{i}"))) for i in range(3)]
            stats = await wait_for_stats(two, lambda s: s.running == 1)
            assert stats.waiting == 0
            assert await asyncio.gather(first, *late) == [expected(twin("x"))] * 4

    with broker_stack() as stack:
        asyncio.run(scenario(stack))


def test_a_shared_stream_goes_on_when_the_first_client_leaves() -> None:
    async def scenario(stack: BrokerStack) -> None:
        stack.start_worker("w0", slots=1)
        async with stack.client("g0") as one, stack.client("g1") as two:
            events = generate(one, twin("a"))
            await anext(events)
            second = asyncio.create_task(collect(two, twin("b")))
            await asyncio.sleep(0.05)
            await events.aclose()
            assert await second == expected(twin("b"))
            await wait_for_stats(two, lambda s: s.running == 0 and not s.workers[0].kv_blocks_used)

    with broker_stack() as stack:
        asyncio.run(scenario(stack))


@pytest.mark.parametrize("victim", ["worker", "broker", "gateway"])
def test_a_shared_stream_survives_the_death_of(victim: str) -> None:
    async def scenario(stack: BrokerStack) -> None:
        worker = stack.start_worker("w0", slots=2)
        async with contextlib.AsyncExitStack() as clients:
            one, two = [await clients.enter_async_context(stack.client(f"g{i}")) for i in range(2)]
            first = await begun(one, "a")
            others = [asyncio.create_task(collect(two, twin(f"b{i}"))) for i in range(2)]
            await asyncio.sleep(0.1)
            if victim == "worker":
                worker.kill()
                stack.start_worker("w1", slots=2)
            elif victim == "broker":
                stack.broker.kill()
                stack.broker.wait()
                stack.start_broker()
            else:
                first.cancel()
                await one.close()
                others.append(asyncio.create_task(collect(two, twin("c"))))
            tasks = others if victim == "gateway" else [first, *others]
            answers = await asyncio.wait_for(asyncio.gather(*tasks), 20)
            assert answers == [expected(twin("x"))] * len(tasks)

    with broker_stack() as stack:
        asyncio.run(scenario(stack))
