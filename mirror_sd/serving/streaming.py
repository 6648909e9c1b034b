"""Answers on their way to the client: server-sent events, or one body at the end.

The order of a stream: for each choice an opening chunk with the role, chunks with text, one with
the finish reason; then, if asked for, one with the usage and no choices; then `[DONE]`. An error in
a stream is one `{"error": ...}` event, and the stream ends there.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

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


class EventStream:
    """What falcon sends: an async iterator whose `close` it awaits however the response ends.

    It gives the events of all deltas that are there as one block, beginning with `first`, deltas
    already taken. `on_end` is told the status once, 499 where the client left.
    """

    def __init__(
        self,
        plan: Plan,
        generation: Generation,
        first: Sequence[Delta],
        *,
        on_end: Callable[[int], None],
        on_close: Callable[[], Awaitable[None]],
    ) -> None:
        self._caller = plan.caller
        self._generation = generation
        self._writer = ChunkWriter(plan)
        self._first = first
        self._on_end = on_end
        self._on_close = on_close
        self._is_over = False

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> bytes:
        if self._is_over:
            raise StopAsyncIteration
        try:
            deltas, self._first = self._first, ()
            deltas = deltas or await self._generation.next_deltas()
            if deltas:
                return b"".join(map(self._writer.render, deltas))
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
        await self._on_close()

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
        """The last events: usage where asked for, and `[DONE]`."""
        if not self._plan.decoding.include_usage:
            return DONE
        body = self._plan.envelope.wrap([], is_chunk=True)
        return event(body | {"usage": usage(generation.usage())}) + DONE

    def _event(self, entry: Json) -> bytes:
        return event(self._plan.envelope.wrap([entry], is_chunk=True) | self._extra)


async def whole_answer(plan: Plan, generation: Generation) -> Json:
    """The complete body, once every choice has finished."""
    choices = {
        sequence.choice.index: WholeChoice(sequence.choice.index, sequence.submit.params.seed)
        for sequence in plan.sequences
    }
    while deltas := await generation.next_deltas():
        for delta in deltas:
            choices[delta.index].add(delta)
    body = plan.envelope.wrap([plan.form.whole(choice) for choice in choices.values()])
    return body | {"usage": usage(generation.usage())}
