"""The client against a broker whose every frame the test writes."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
import zmq
import zmq.asyncio

from mirror_sd import messages, telemetry
from mirror_sd.config import BrokerConfig
from mirror_sd.errors import (
    InternalError,
    InvalidRequest,
    NoWorker,
    PayloadTooLarge,
    QueueFull,
)
from mirror_sd.messages import (
    AnyMessage,
    Cancel,
    Chunk,
    Failed,
    Finished,
    Outputs,
    Ping,
    Pong,
    SequenceUsage,
    Submit,
)
from mirror_sd.serving import broker_client
from mirror_sd.serving.broker_client import BrokerClient
from tests.unit.serving.broker_stack import collect, generate, make_submit

CONFIG = BrokerConfig(heartbeat_ms=50, missed_heartbeats=3)


class ScriptedBroker:
    """Answers pings with `instance`, keeps every other frame for the test."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.instance = "one"
        self.received: asyncio.Queue[AnyMessage] = asyncio.Queue()
        self.open()

    def open(self) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(self.endpoint)
        self.peer = b""
        self.task = asyncio.create_task(self.serve())

    async def serve(self) -> None:
        while True:
            self.peer, frame = await self.socket.recv_multipart()
            match messages.decode(frame):
                case Ping():
                    await self.send(Pong(instance=self.instance))
                case message:
                    self.received.put_nowait(message)

    async def send(self, message: AnyMessage) -> None:
        await self.send_bytes(messages.encode(message))

    async def send_bytes(self, frame: bytes) -> None:
        await self.socket.send_multipart([self.peer, frame])

    async def next(self, within_s: float = 10.0) -> AnyMessage:
        return await asyncio.wait_for(self.received.get(), within_s)

    async def hears_nothing(self, for_s: float = 0.2) -> bool:
        await asyncio.sleep(for_s)
        return self.received.empty()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.socket.close()


def with_client(
    scenario: Callable[[ScriptedBroker, BrokerClient], Awaitable[None]], **options: int
) -> None:
    async def run(endpoint: str) -> None:
        broker = ScriptedBroker(endpoint)
        client = BrokerClient(endpoint, "g", CONFIG, **options)
        await client.start()
        try:
            await asyncio.wait_for(scenario(broker, client), 20)
        finally:
            await client.close()
            await broker.close()

    with tempfile.TemporaryDirectory(prefix="mirror-sd-", dir="/tmp") as directory:
        asyncio.run(run(f"ipc://{directory}/b.sock"))


@contextlib.asynccontextmanager
async def started(
    broker: ScriptedBroker, client: BrokerClient, submit: Submit
) -> AsyncIterator[asyncio.Task[list[int]]]:
    """A task that collects the answer to `submit`, which the broker has received."""
    task = asyncio.create_task(collect(client, submit))
    assert await broker.next() == submit
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def chunk(index: int, *tokens: int, request_id: str = "a") -> Chunk:
    return Chunk(request_id=request_id, index=index, tokens=tokens)


def finished(tokens: int, request_id: str = "a") -> Finished:
    usage = SequenceUsage(completion_tokens=tokens)
    return Finished(request_id=request_id, reason="stop", usage=usage)


def lost(request_id: str = "a") -> Failed:
    return Failed(request_id=request_id, code="no_worker", message="lost", retryable=True)


@pytest.mark.parametrize("how", ["aclose", "cancel", "close of the client"])
def test_leaving_early_sends_cancel_exactly_once(how: str) -> None:
    async def scenario(broker: ScriptedBroker, client: BrokerClient) -> None:
        events = generate(client, make_submit("a"))
        first = asyncio.create_task(anext(events))
        await broker.next()
        if how == "aclose":
            await broker.send(chunk(0, 7))
            assert (await first).tokens == (7,)
            await events.aclose()
        elif how == "cancel":
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        else:
            await client.close()
            with pytest.raises(NoWorker, match="shutting down"):
                await first
        assert await broker.next() == Cancel(request_id="a")
        if how != "close of the client":
            await broker.send(chunk(1, 8))
        assert await broker.hears_nothing()
        if how == "close of the client":
            await client.start()

    with_client(scenario)


def test_a_stream_that_ended_is_not_cancelled() -> None:
    async def scenario(broker: ScriptedBroker, client: BrokerClient) -> None:
        async with started(broker, client, make_submit("a")) as answer:
            await broker.send(chunk(0, 7))
            await broker.send(finished(1))
            assert await answer == [7]
        async with started(broker, client, make_submit("b")) as answer:
            await broker.send(Failed(request_id="b", code="invalid_value", message="no", param="p"))
            with pytest.raises(InvalidRequest, match="no"):
                await answer
        assert await broker.hears_nothing()

    with_client(scenario)


def test_outputs_of_several_requests_in_one_frame_reach_each_its_own() -> None:
    async def scenario(broker: ScriptedBroker, client: BrokerClient) -> None:
        one, two = make_submit("a"), make_submit("b")
        async with started(broker, client, one) as first, started(broker, client, two) as second:
            await broker.send(Outputs(items=(chunk(0, 7), chunk(0, 8, request_id="b"))))
            # What was delivered before, and what nobody asked for, counts no more than alone.
            stray = chunk(0, 1, request_id="unknown")
            await broker.send(Outputs(items=(stray, chunk(0, 7, 9), finished(2), lost("b"))))
            assert await first == [7, 9]
            again = await broker.next()
            assert isinstance(again, Submit) and again.delivered == (8,)
            await broker.send(finished(1, "b"))
            assert await second == [8]

    with_client(scenario)


def test_another_instance_gets_every_live_request_with_what_was_delivered() -> None:
    async def scenario(broker: ScriptedBroker, client: BrokerClient) -> None:
        resumes = telemetry.RESUMES._value.get()
        one, two = make_submit("a"), make_submit("b")
        async with started(broker, client, one) as first, started(broker, client, two) as second:
            await broker.send(chunk(0, 7, 8))
            await asyncio.sleep(0.05)
            broker.instance = "two"
            again = [await broker.next(), await broker.next()]
            assert {(s.request_id, s.delivered) for s in again} == {("a", (7, 8)), ("b", ())}
            assert telemetry.RESUMES._value.get() == resumes + 2
            await broker.send(chunk(1, 8, 9))
            await broker.send(finished(3))
            await broker.send(finished(0, "b"))
            assert (await first, await second) == ([7, 8, 9], [])
        assert await broker.hears_nothing()

    with_client(scenario)


def test_a_connection_that_breaks_and_comes_back_gets_every_live_request_again() -> None:
    async def scenario(broker: ScriptedBroker, client: BrokerClient) -> None:
        async with started(broker, client, make_submit("a")) as answer:
            await broker.send(chunk(0, 7))
            await asyncio.sleep(0.1)
            await broker.close()
            await asyncio.sleep(0.1)
            assert not client.alive
            broker.open()
            again = await broker.next()
            assert isinstance(again, Submit)
            assert (again.request_id, again.delivered) == ("a", (7,))
            await broker.send(finished(1))
            assert await answer == [7]

    with_client(scenario)


def test_leaving_while_the_connection_is_broken_sends_the_cancel_later() -> None:
    async def scenario(broker: ScriptedBroker, client: BrokerClient) -> None:
        async with started(broker, client, make_submit("a")):
            await broker.close()
            await asyncio.sleep(0.1)
        broker.open()
        assert await broker.next() == Cancel(request_id="a")
        assert await broker.hears_nothing()

    with_client(scenario)


def test_a_lost_worker_is_answered_by_a_submit_of_the_rest() -> None:
    async def scenario(broker: ScriptedBroker, client: BrokerClient) -> None:
        async with started(broker, client, make_submit("a")) as answer:
            for count in range(1, 8):
                await broker.send(chunk(count - 1, count))
                await broker.send(lost())
                again = await broker.next()
                assert isinstance(again, Submit)
                assert again.delivered == tuple(range(1, count + 1))
            await broker.send(finished(7))
            assert await answer == [1, 2, 3, 4, 5, 6, 7], "each loss made progress, so it goes on"

    with_client(scenario)


def test_a_displaced_sequence_goes_on_at_once_and_is_no_failure() -> None:
    before, resumed = telemetry.DISPLACEMENTS._value.get(), telemetry.RESUMES._value.get()
    rounds = broker_client.MAX_ATTEMPTS + 3

    async def scenario(broker: ScriptedBroker, client: BrokerClient) -> None:
        given = make_submit("a")
        async with started(broker, client, given) as answer:
            await broker.send(chunk(0, 7))
            for _ in range(rounds):
                await broker.send(msgspec.structs.replace(lost(), displaced=True))
                again = await broker.next(within_s=1.0)
                assert isinstance(again, Submit)
                assert again.delivered == (7,) and again.received_at == given.received_at
            await broker.send(finished(1))
            assert await answer == [7]

    with_client(scenario)
    assert telemetry.DISPLACEMENTS._value.get() == before + rounds
    assert telemetry.RESUMES._value.get() == resumed


def test_attempts_without_progress_come_slower_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_client, "_LONGEST_PAUSE_S", 0.2)

    async def scenario(broker: ScriptedBroker, client: BrokerClient) -> None:
        async with started(broker, client, make_submit("a")) as answer:
            for _ in range(broker_client.MAX_ATTEMPTS - 1):
                await broker.send(lost())
                assert isinstance(await broker.next(), Submit)
            await broker.send(lost())
            with pytest.raises(NoWorker, match="lost"):
                await answer
        assert await broker.hears_nothing()

    with_client(scenario)


@pytest.mark.parametrize("what", ["gap", "short finish"])
def test_missing_tokens_end_the_attempt_and_begin_another(what: str) -> None:
    async def scenario(broker: ScriptedBroker, client: BrokerClient) -> None:
        async with started(broker, client, make_submit("a")) as answer:
            await broker.send(chunk(0, 7))
            await broker.send(chunk(2, 9) if what == "gap" else finished(2))
            assert await broker.next() == Cancel(request_id="a")
            again = await broker.next()
            assert isinstance(again, Submit)
            assert (again.request_id, again.delivered) == ("a~2", (7,))
            # Late frames of the first attempt count no more.
            await broker.send(chunk(3, 10))
            await broker.send(finished(4))
            await broker.send(chunk(1, 8, request_id="a~2"))
            await broker.send(finished(2, "a~2"))
            assert await answer == [7, 8]
        assert await broker.hears_nothing()

    with_client(scenario)


def test_unreadable_and_stray_frames_are_dropped() -> None:
    async def scenario(broker: ScriptedBroker, client: BrokerClient) -> None:
        async with started(broker, client, make_submit("a")) as answer:
            for frame in (b"", b"\xff" * 50, b"\x01\x80", messages.encode(messages.Reset())):
                await broker.send_bytes(frame)
            await broker.send(chunk(0, 1, request_id="unknown"))
            await broker.send(finished(0, "unknown"))
            await broker.send(chunk(0, 7))
            await broker.send(finished(1))
            assert await answer == [7]

    with_client(scenario)


def test_a_code_that_is_not_known_is_an_internal_error() -> None:
    async def scenario(broker: ScriptedBroker, client: BrokerClient) -> None:
        async with started(broker, client, make_submit("a")) as answer:
            await broker.send(Failed(request_id="a", code="from the future", message="?"))
            with pytest.raises(InternalError):
                await answer

    with_client(scenario)


def test_retry_after_crosses_the_wire() -> None:
    async def scenario(broker: ScriptedBroker, client: BrokerClient) -> None:
        async with started(broker, client, make_submit("a")) as answer:
            await broker.send(
                Failed(request_id="a", code="queue_full", message="full", retry_after_s=17.0)
            )
            with pytest.raises(QueueFull) as failure:
                await answer
            assert failure.value.retry_after_s == 17.0

    with_client(scenario)


def test_requests_beyond_the_bound_are_refused() -> None:
    async def scenario(broker: ScriptedBroker, client: BrokerClient) -> None:
        async with (
            started(broker, client, make_submit("a")),
            started(broker, client, make_submit("b")),
        ):
            with pytest.raises(QueueFull):
                await collect(client, make_submit("c"))
        assert {await broker.next(), await broker.next()} == {
            Cancel(request_id="a"),
            Cancel(request_id="b"),
        }
        async with started(broker, client, make_submit("d")):
            pass

    with_client(scenario, max_outstanding=2)


def test_a_request_too_large_for_a_frame_never_leaves() -> None:
    async def scenario(broker: ScriptedBroker, client: BrokerClient) -> None:
        prompt = (2**31,) * (messages.MAX_FRAME_BYTES // 8)
        with pytest.raises(PayloadTooLarge):
            await collect(client, make_submit("a", prompt=prompt))
        assert await broker.hears_nothing(0.1)

    with_client(scenario)


def test_a_silent_broker_is_not_alive() -> None:
    async def scenario(broker: ScriptedBroker, client: BrokerClient) -> None:
        async with started(broker, client, make_submit("a")) as answer:
            broker.task.cancel()
            await asyncio.sleep(0.3)
            assert not client.alive and not answer.done()
            with pytest.raises(NoWorker, match="does not answer"):
                await client.stats()

    with_client(scenario)
