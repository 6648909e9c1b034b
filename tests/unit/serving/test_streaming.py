"""Events are put together from kept pieces; they must be what building each one anew gives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror_sd.api.choice import Delta
from mirror_sd.api.responses import event
from mirror_sd.config import MergeConfig
from mirror_sd.messages import Chunk, Finished, SequenceUsage, Stats, Submit
from mirror_sd.serving.generation import Event, Generation
from mirror_sd.serving.intake import Caller, Intake, Plan
from mirror_sd.serving.streaming import ChunkWriter, EventStream
from mirror_sd.serving.text_thread import TextThread
from tests.unit.api.small_model import small_tokenizer

INTAKE = Intake(small_tokenizer(), 'a "quoted" \\ model é', 256, 10.0, MergeConfig())
CALLER = Caller("id-1", "cpu", "standard", "default")


def plan_of(kind: str, **fields: Any) -> Plan:
    body: dict[str, Any] = {"model": INTAKE.model, "stream": True, **fields}
    if kind == "chat":
        body["messages"] = [{"role": "user", "content": "hello"}]
        return INTAKE.chat(json.dumps(body).encode(), CALLER)
    return INTAKE.completion(json.dumps(body | {"prompt": "hello"}).encode(), CALLER)


def built_anew(plan: Plan, delta: Delta) -> bytes:
    extra = {"usage": None} if plan.decoding.include_usage else {}
    wrapped = [plan.envelope.wrap([c], is_chunk=True) | extra for c in plan.form.chunks(delta)]
    return b"".join(map(event, wrapped))


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("options", [{}, {"include_usage": True}], ids=["", "usage"])
@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_an_event_of_text_is_the_same_from_its_kept_frame(
    kind: str, options: dict[str, bool], text: str
) -> None:
    plan = plan_of(kind, n=2, stream_options=options)
    writer = ChunkWriter(plan)
    openings = [writer.render(Delta(index, "first")) for index in (1, 0)]
    assert all(opening.count(b"data: ") == 2 for opening in openings)
    for index in (0, 1):
        delta = Delta(index, text)
        assert writer.render(delta) == built_anew(plan, delta)
        last = Delta(index, text, finish_reason="stop")
        assert writer.render(last) == built_anew(plan, last)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_an_event_with_logprobs_is_always_built_anew(kind: str) -> None:
    plan = plan_of(kind, logprobs=True if kind == "chat" else 1)
    writer = ChunkWriter(plan)
    writer.render(Delta(0, "first"))
    delta = Delta(0, "text")
    assert writer.render(delta) == built_anew(plan, delta)


# Blocks that go past falcon.


class Source:
    """A broker that gives what the test says, when it says so."""

    alive = True

    def __init__(self) -> None:
        self.events: dict[str, Callable[[Event], None]] = {}
        self.left: list[str] = []

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def stats(self) -> Stats:
        raise AssertionError("nobody asks")

    def open(self, submit: Submit, on_event: Callable[[Event], None]) -> Callable[[], None]:
        self.events[submit.request_id] = on_event
        return lambda: self.left.append(submit.request_id)

    def give(self, index: int, tokens: Sequence[int]) -> None:
        [(name, on_event)] = self.events.items()
        on_event(Chunk(request_id=name, index=index, tokens=tuple(tokens)))

    def finish(self, count: int) -> None:
        [(name, on_event)] = self.events.items()
        usage = SequenceUsage(completion_tokens=count)
        on_event(Finished(request_id=name, reason="length", usage=usage))


class Server:
    """The ASGI server's side: `gate` is closed while the client reads nothing."""

    def __init__(self) -> None:
        self.sent = b""
        self.sends_now = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def send(self, message: dict[str, Any]) -> None:
        assert self.sends_now == 0, "one send at a time"
        self.sends_now += 1
        try:
            self.sent += message["body"]
            while not self.gate.is_set():
                await self.gate.wait()
        finally:
            self.sends_now -= 1


class Stream:
    """An event stream that a task reads and sends on, as falcon does."""

    def __init__(self, **fields: Any) -> None:
        self.plan = plan_of("chat", **fields)
        self.source, self.server = Source(), Server()
        self.statuses: list[int] = []
        self.falcon_blocks = 0
        self.generation = Generation(self.source, TextThread(), self.plan, 0.0)
        self.generation.start()

    async def run(self) -> None:
        first = await self.generation.next_deltas()
        stream = EventStream(
            self.plan,
            self.generation,
            first,
            self.server.send,
            on_end=self.statuses.append,
            on_close=self.generation.close,
        )
        try:
            async for block in stream:
                self.falcon_blocks += 1
                await self.server.send({"body": block})
        finally:
            await stream.close()

    def text(self) -> str:
        events = self.server.sent.decode().split("\n\n")
        assert events[-3] == "data: [DONE]" and events[-1] == ""
        assert events[-2].startswith(": mirror-usage ")
        bodies = [json.loads(event.removeprefix("data: ")) for event in events[:-3]]
        return "".join(body["choices"][0]["delta"].get("content", "") for body in bodies)


ALPHABET = "abcdefghijklmnopqrstuvwxyz"
LETTERS = [token for letter in ALPHABET for token in small_tokenizer().encode_prompt(letter)]
assert len(LETTERS) == len(ALPHABET)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_blocks_are_sent_at_once_and_falcon_sends_the_first_and_the_last() -> None:
    async def scenario() -> None:
        stream = Stream()
        task = asyncio.create_task(stream.run())
        await turns()
        stream.source.give(0, LETTERS[:1])
        await turns()
        for index in range(1, 26):
            before = len(stream.server.sent)
            stream.source.give(index, LETTERS[index : index + 1])
            assert len(stream.server.sent) > before, "within the call that brought the token"
        stream.source.finish(26)
        await asyncio.wait_for(task, 2)
        assert (stream.text(), stream.falcon_blocks, stream.statuses) == (ALPHABET, 2, [200])
        assert stream.source.left == list(stream.source.events)

    asyncio.run(scenario())


@pytest.mark.parametrize("closed_at", [1, 5, 25])
@pytest.mark.parametrize("open_for", [0, 3])
def test_a_client_that_reads_slowly_gets_everything_in_order(closed_at: int, open_for: int) -> None:
    async def scenario() -> None:
        stream = Stream()
        task = asyncio.create_task(stream.run())
        await turns()
        for index in range(26):
            if index == closed_at:
                stream.server.gate.clear()
            stream.source.give(index, LETTERS[index : index + 1])
            if index % 4 == 0:
                await turns()
            if index > closed_at and open_for and index % open_for == 0:
                stream.server.gate.set()
                await turns(index % 3)
                stream.server.gate.clear()
        stream.source.finish(26)
        await turns()
        assert not task.done()
        stream.server.gate.set()
        await asyncio.wait_for(task, 2)
        assert (stream.text(), stream.statuses) == (ALPHABET, [200])

    asyncio.run(scenario())


def test_a_fault_while_sending_past_falcon_ends_the_stream_with_an_error_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stumble(chunk: Chunk) -> None:
        raise RuntimeError("a fault of ours")

    async def scenario() -> None:
        stream = Stream()
        task = asyncio.create_task(stream.run())
        await turns()
        stream.source.give(0, LETTERS[:2])
        await turns()
        monkeypatch.setattr(stream.plan.sequences[0].choice, "feed", stumble)
        stream.source.give(2, LETTERS[2:3])
        await asyncio.wait_for(task, 2)
        *_, last, rest = stream.server.sent.split(b"\n\n")
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] and rest == b""
        assert stream.statuses == [200] and stream.source.left

    asyncio.run(scenario())


def test_a_stream_cancelled_while_its_client_reads_nothing_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        stream = Stream()
        task = asyncio.create_task(stream.run())
        await turns()
        stream.source.give(0, LETTERS[:1])
        await turns()
        stream.server.gate.clear()
        stream.source.give(1, LETTERS[1:2])
        await turns()
        assert stream.server.sends_now == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (stream.server.sends_now, stream.statuses) == (0, [499])
        assert stream.source.left == list(stream.source.events)

    asyncio.run(scenario())
