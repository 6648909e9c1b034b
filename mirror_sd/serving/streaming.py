"""Answers on their way to the client: server-sent events, or one body at the end.

The order of a stream: for each choice an opening chunk with the role, chunks with text, one with
the finish reason; then, if asked for, one with the usage and no choices; then `[DONE]`. An error in
a stream is one `{"error": ...}` event, and the stream ends there.

For the edge, which keeps it from the client, a comment with the true counts of prompt and
completion tokens follows `[DONE]`: `: mirror-usage 12 34`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec

from mirror_sd import telemetry
from mirror_sd.api.choice import Delta
from mirror_sd.api.responses import DONE, Json, WholeChoice, event, usage
from mirror_sd.serving.error_answers import answer_to
from mirror_sd.serving.generation import ClientGone, Generation
from mirror_sd.serving.intake import Plan

_log = logging.getLogger(__name__)
CLIENT_GONE = 499
# Not in any envelope: control characters are escaped in JSON, and none of its texts has any.
_PLACEHOLDER = "\x00"


Send = Callable[[dict[str, Any]], Coroutine[Any, Any, None]]


class EventStream:
    """What falcon sends: an async iterator whose `close` it awaits however the response ends.

    It gives the events of all deltas that are there as one block, beginning with `first`, deltas
    already taken. While falcon waits for the next block, blocks go past it to `send`, the ASGI
    server's own, as their tokens come: to wake falcon's task for each costs as much as making the
    block. Falcon gets the next one when the server takes no more, and the last. `on_end` is told
    the status once, 499 where the client left.
    """

    def __init__(
        self,
        plan: Plan,
        generation: Generation,
        first: Sequence[Delta],
        send: Send,
        *,
        on_end: Callable[[int], None],
        on_close: Callable[[], Awaitable[None]],
    ) -> None:
        self._caller = plan.caller
        self._generation = generation
        self._writer = ChunkWriter(plan)
        self._first = first
        self._send = send
        self._held: tuple[Coroutine[Any, Any, None], asyncio.Future[Any]] | None = None
        self._failure: Exception | None = None
        self._on_end = on_end
        self._on_close = on_close
        self._is_over = False

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> bytes:
        if self._is_over:
            raise StopAsyncIteration
        try:
            block = await self._next_block()
            if block:
                return block
            block = self._writer.ending(self._generation)
        except ClientGone:
            _log.info("%s: the client left in the middle of its stream", self._caller.request_id)
            self._end(CLIENT_GONE)
            raise StopAsyncIteration from None
        except Exception as error:  # noqa: BLE001 - logged and told to the client
            telemetry.STREAM_ERRORS.labels(self._caller.device_class, self._caller.tier).inc()
            block = event(answer_to(error, self._caller.request_id).body)
        self._end(200)
        return block

    async def close(self) -> None:
        """Stop sending and release everything behind the stream."""
        self._end(CLIENT_GONE)
        if self._held is not None:
            self._held[0].close()
        await self._on_close()

    async def _next_block(self) -> bytes:
        """The block that falcon is to send; b"" at the end."""
        deltas, self._first = self._first, ()
        while not deltas and not self._generation.is_finished:
            deltas = await self._generation.take()
            if not deltas:
                await self._generation.wait(self._send_past)
                await self._finish_send()
        return b"".join(map(self._writer.render, deltas))

    def _send_past(self) -> bool:
        """Send what is there, now; True where falcon's task has to go on."""
        try:
            deltas = self._generation.take_now()
            if deltas:
                block = b"".join(map(self._writer.render, deltas))
                self._start_send({"type": "http.response.body", "body": block, "more_body": True})
        except Exception as error:  # noqa: BLE001 - raised again in falcon's task
            self._failure = error
        has_trouble = self._held is not None or self._failure is not None
        return has_trouble or not self._generation.is_idle

    def _start_send(self, message: dict[str, Any]) -> None:
        sending = self._send(message)
        try:
            self._held = sending, sending.send(None)
        except StopIteration:
            return

    async def _finish_send(self) -> None:
        """Wait out a send that the server held back, as a task of its own would."""
        while self._held is not None:
            sending, waits_for = self._held
            await asyncio.wait([waits_for])
            try:
                self._held = sending, sending.send(None)
            except StopIteration:
                self._held = None
        if self._failure is not None:
            raise self._failure

    def _end(self, status: int) -> None:
        if self._is_over:
            return
        self._is_over = True
        if status == CLIENT_GONE:
            telemetry.DISCONNECTS.inc()
        self._on_end(status)


class ChunkWriter:
    """Renders deltas as events."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seeds = {
            sequence.choice.index: sequence.submit.params.seed for sequence in plan.sequences
        }
        # In a stream that ends with its usage, OpenAI's other chunks say `usage: null`.
        self._extra: Json = {"usage": None} if plan.decoding.include_usage else {}
        self._has_logprobs = plan.decoding.logprobs is not None
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def render(self, delta: Delta) -> bytes:
        """The events of one delta, the opening of its choice first where it is the first."""
        frame = self._frames.get(delta.index)
        if frame is not None and delta.text and delta.finish_reason is None:
            return msgspec.json.encode(delta.text).join(frame)
        form = self._plan.form
        entries = list(form.chunks(delta))
        seed = self._seeds.pop(delta.index, None)
        if seed is not None:
            entries.insert(0, form.opening(delta.index, seed))
            self._keep_frame(delta.index)
        return b"".join(self._event(entry) for entry in entries)

    def _keep_frame(self, index: int) -> None:
        """What stands before and after the text of a choice, the same in all its chunks: building
        and encoding it anew is most of the cost of an event."""
        if not self._has_logprobs:
            [entry] = self._plan.form.chunks(Delta(index, _PLACEHOLDER))
            before, _, after = self._event(entry).partition(msgspec.json.encode(_PLACEHOLDER))
            self._frames[index] = before, after

    def ending(self, generation: Generation) -> bytes:
        """The last events: usage where asked for, and `[DONE]`; then a comment with the counts for
        the edge, which keeps it from the client."""
        counts = usage(generation.usage())
        comment = f": mirror-usage {counts['prompt_tokens']} {counts['completion_tokens']}\n\n"
        if not self._plan.decoding.include_usage:
            return DONE + comment.encode()
        body = self._plan.envelope.wrap([], is_chunk=True)
        return event(body | {"usage": counts}) + DONE + comment.encode()

    def _event(self, entry: Json) -> bytes:
        return event(self._plan.envelope.wrap([entry], is_chunk=True) | self._extra)


class _Collector:
    """Takes deltas as they come, so that the request's task sleeps until its answer is complete: to
    wake it for each token costs as much as all else that is done with the token."""

    def __init__(self, choices: dict[int, WholeChoice], generation: Generation) -> None:
        self._choices = choices
        self._generation = generation
        self._failure: Exception | None = None

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._choices[delta.index].add(delta)

    def take(self) -> bool:
        """Take what is there; True where the task has to go on."""
        try:
            self.add(self._generation.take_now())
        except Exception as error:  # noqa: BLE001 - raised again in the request's task
            self._failure = error
        return self._failure is not None or not self._generation.is_idle

    def check(self) -> None:
        """Raise what went wrong meanwhile."""
        if self._failure is not None:
            raise self._failure


async def whole_answer(plan: Plan, generation: Generation) -> Json:
    """The complete body, once every choice has finished."""
    choices = {
        sequence.choice.index: WholeChoice(sequence.choice.index, sequence.submit.params.seed)
        for sequence in plan.sequences
    }
    collector = _Collector(choices, generation)
    while not generation.is_finished:
        collector.add(await generation.take())
        await generation.wait(collector.take)
        collector.check()
    body = plan.envelope.wrap([plan.form.whole(choice) for choice in choices.values()])
    return body | {"usage": usage(generation.usage())}
