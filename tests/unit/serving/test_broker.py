"""The broker and its client, in real processes, with a scripted worker."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from mirror_sd import messages
from mirror_sd.config import Config
from mirror_sd.errors import ContextLengthExceeded, DeadlineExceeded, NoWorker, QueueFull
from mirror_sd.run_dir import RunDir
from tests.unit.serving.broker_stack import (
    ROOT,
    BrokerStack,
    broker_stack,
    collect,
    expected,
    generate,
    make_submit,
    wait_for_stats,
)
from tests.unit.serving.scripted_worker import EXIT, HANG, REFUSE, SKIP
from tests.unit.serving.test_broker_frames import FRAMES


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


def test_leaving_a_running_stream_frees_its_slot(stack: BrokerStack) -> None:
    async def scenario() -> None:
        stack.start_worker("w0", slots=1)
        async with stack.client() as client:
            events = generate(client, make_submit("a", tokens=10_000))
            await anext(events)
            await events.aclose()
            stats = await wait_for_stats(client, lambda s: s.running == 0, within_s=2.0)
            await wait_for_stats(client, lambda s: s.workers[0].kv_blocks_used == 0, within_s=2.0)
            assert stats.waiting == 0

    asyncio.run(scenario())


def test_cancelling_the_waiting_task_empties_the_queue(stack: BrokerStack) -> None:
    async def scenario() -> None:
        stack.start_worker("w0", slots=1)
        async with stack.client() as client:
            tasks = [
                asyncio.create_task(collect(client, make_submit(f"r{i}", tokens=10_000)))
                for i in range(3)
            ]
            await wait_for_stats(client, lambda s: (s.running, s.waiting) == (1, 2))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await wait_for_stats(client, lambda s: (s.running, s.waiting) == (0, 0), within_s=2.0)

    asyncio.run(scenario())


def test_two_gateways_get_each_their_own(stack: BrokerStack) -> None:
    async def scenario() -> None:
        stack.start_worker("w0", slots=8)
        async with stack.client("g0") as one, stack.client("g1") as two:
            submits = [make_submit(f"r{i}", prompt=(i,), tokens=20) for i in range(20, 40)]
            clients = [one, two] * 10
            answers = await asyncio.gather(
                *(collect(c, s) for c, s in zip(clients, submits, strict=True))
            )
            assert answers == [expected(submit) for submit in submits]
            stats = await one.stats()
            assert len(stats.gateways) == 2

    asyncio.run(scenario())


def test_two_hundred_requests_at_once_are_neither_lost_nor_crossed(stack: BrokerStack) -> None:
    async def scenario() -> None:
        for name in ("w0", "w1"):
            stack.start_worker(name, slots=16, step_ms=1)
        async with stack.client("g0") as one, stack.client("g1") as two:
            submits = [
                make_submit(f"r{i}", prompt=(i + 100, i), tokens=1 + i % 30) for i in range(200)
            ]
            submits = [s for s in submits if not {HANG, SKIP, REFUSE, EXIT} & set(s.prompt)]
            answers = await asyncio.gather(
                *(collect((one, two)[i % 2], submit) for i, submit in enumerate(submits))
            )
            assert answers == [expected(submit) for submit in submits]
            stats = await one.stats()
            assert (stats.running, stats.waiting) == (0, 0)

    asyncio.run(scenario())


def test_a_failure_of_the_engine_is_raised_as_its_own_class(stack: BrokerStack) -> None:
    async def scenario() -> None:
        stack.start_worker("w0")
        async with stack.client() as client:
            with pytest.raises(ContextLengthExceeded) as failure:
                await collect(client, make_submit("a", prompt=(REFUSE,)))
            assert failure.value.param == "messages"

    asyncio.run(scenario())


def test_a_deadline_ends_a_waiting_and_a_running_request() -> None:
    async def scenario(stack: BrokerStack) -> None:
        stack.start_worker("w0", slots=1)
        async with stack.client() as client:
            begin = time.monotonic()
            ends = await asyncio.gather(
                *(
                    collect(client, make_submit(f"r{i}", tokens=10_000, timeout_s=0.8))
                    for i in range(2)
                ),
                return_exceptions=True,
            )
            assert [type(end) for end in ends] == [DeadlineExceeded] * 2
            assert time.monotonic() - begin < 1.5
            await wait_for_stats(client, lambda s: s.workers[0].kv_blocks_used == 0, within_s=2.0)

    with broker_stack() as stack:
        asyncio.run(scenario(stack))


def test_a_full_queue_refuses_with_retry_after_and_the_rest_is_served() -> None:
    async def scenario(stack: BrokerStack) -> None:
        stack.start_worker("w0", slots=1)
        async with stack.client() as client:
            await wait_for_stats(client, lambda s: len(s.workers) == 1)
            ends = await asyncio.gather(
                *(collect(client, make_submit(f"r{i}")) for i in range(6)),
                return_exceptions=True,
            )
            refused = [end for end in ends if isinstance(end, QueueFull)]
            assert len(refused) == 3 and ends.count(expected(make_submit("x"))) == 3
            assert all(end.retry_after_s and end.retry_after_s >= 1 for end in refused)

    with broker_stack(scheduler={"max_queue": 2}) as stack:
        asyncio.run(scenario(stack))


def test_no_worker_at_all_is_a_clear_refusal() -> None:
    async def scenario(stack: BrokerStack) -> None:
        async with stack.client() as client:
            with pytest.raises(NoWorker, match="no worker for cpu"):
                await collect(client, make_submit("a"))

    with broker_stack(broker={"worker_wait_s": 0.3}) as stack:
        asyncio.run(scenario(stack))


def test_sigterm_lets_running_answers_finish_and_leaves_no_socket() -> None:
    async def scenario(stack: BrokerStack) -> None:
        stack.start_worker("w0", slots=1)
        async with stack.client() as client:
            running = asyncio.create_task(collect(client, make_submit("a", tokens=100)))
            waiting = asyncio.create_task(collect(client, make_submit("b")))
            await wait_for_stats(client, lambda s: (s.running, s.waiting) == (1, 1))
            stack.broker.terminate()
            with pytest.raises(NoWorker, match="shutting down"):
                await waiting
            assert await running == expected(make_submit("a", tokens=100))
            assert await asyncio.to_thread(stack.broker.wait, 2) == 0
            assert not list(stack.run_dir.path.glob("*.sock"))

    with broker_stack() as stack:
        asyncio.run(scenario(stack))


def test_the_drain_ends_after_its_time() -> None:
    async def scenario(stack: BrokerStack) -> None:
        stack.start_worker("w0")
        async with stack.client() as client:
            running = asyncio.create_task(collect(client, make_submit("a", tokens=10_000)))
            await wait_for_stats(client, lambda s: s.running == 1)
            stack.broker.terminate()
            with pytest.raises(NoWorker, match="shutting down"):
                await running
            assert await asyncio.to_thread(stack.broker.wait, 2) == 0

    with broker_stack(server={"drain_s": 0.3}) as stack:
        asyncio.run(scenario(stack))


def test_garbage_on_both_sockets_does_no_harm(stack: BrokerStack) -> None:
    async def scenario() -> None:
        stack.start_worker("w0")
        async with stack.client() as client:
            submit = make_submit("before", tokens=60)
            running = asyncio.create_task(collect(client, submit))
            await wait_for_stats(client, lambda s: s.running == 1)
            sent = await asyncio.to_thread(pour_garbage, stack, 400)
            assert await running == expected(submit)
            submit = make_submit("after")
            assert await collect(client, submit) == expected(submit)
            assert stack.broker.poll() is None
        dropped = stack.log.read_text().count("dropped:")
        assert dropped > sent / 2

    asyncio.run(scenario())


def pour_garbage(stack: BrokerStack, frames: int) -> int:
    """Random, damaged, oversize, stray and many-part frames to both ROUTERs."""
    rng = random.Random(7)
    context = zmq.Context()
    sent = 0
    for address in (stack.run_dir.gateway_endpoint, stack.run_dir.worker_endpoint):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(address)
        for _ in range(frames):
            socket.send(damaged_frame(rng))
        for frame in FRAMES:
            socket.send(frame)
        socket.send_multipart([b"one", b"two", b""])
        socket.send(b"")
        sent += frames + len(FRAMES) + 2
        socket.close()
        oversize = context.socket(zmq.DEALER)
        oversize.setsockopt(zmq.LINGER, 200)
        oversize.connect(address)
        oversize.send(bytes(messages.MAX_FRAME_BYTES + 1))
        oversize.close()
    context.term()
    return sent


def damaged_frame(rng: random.Random) -> bytes:
    frame = bytearray(rng.choice(FRAMES))
    match rng.randrange(4):
        case 0:
            return rng.randbytes(rng.randrange(1, 300))
        case 1:
            return bytes(frame[: rng.randrange(len(frame))])
        case 2:
            frame[0] = rng.choice([0, 2, 255])
        case _:
            frame[rng.randrange(1, len(frame))] = rng.randrange(256)
    return bytes(frame)


def test_a_broker_that_cannot_listen_says_why_in_one_sentence(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / ("x" * 110))
    run_dir.path.mkdir()
    run_dir.config_json.write_text(Config().model_dump_json(), encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-m", "mirror_sd.serving.broker"],
        cwd=ROOT,
        env={**os.environ, "MIRROR_SD_CONFIG_JSON": str(run_dir.config_json)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.returncode == 78
    [line] = ended.stderr.splitlines()
    assert "the broker cannot start: cannot listen on ipc://" in line


def test_the_broker_starts_in_under_a_second_without_heavy_imports() -> None:
    begin = time.monotonic()
    with broker_stack() as stack:
        while not Path(stack.run_dir.worker_endpoint.removeprefix("ipc://")).exists():
            assert time.monotonic() - begin < 5
            time.sleep(0.01)
        assert time.monotonic() - begin < 2, "twice the allowance, for a busy machine"
        mapped = Path(f"/proc/{stack.broker.pid}/maps").read_text()
        assert "torch" not in mapped and "transformers" not in mapped
