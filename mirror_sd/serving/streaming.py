"""Answers on their way to the client: server-sent events, or one body at the end.

The order of a stream: for each choice an opening chunk with the role, chunks with text, one with
the finish reason; then, if asked for, one with the usage and no choices; then `[DONE]`. An error in
a stream is one `{"error": ...}` event, and the stream ends there.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

from mirror_sd.api.choice import Delta
from mirror_sd.api.responses import DONE, Json, WholeChoice, event, usage
from mirror_sd.serving.generation import Generation
from mirror_sd.serving.intake import Plan


class EventStream:
    """What falcon sends: an async iterator whose `close` it awaits however the response ends."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], on_close: Callable[[], Awaitable[None]]
    ) -> None:
        self._events = events
        self._on_close = on_close

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> bytes:
        return await self._events.__anext__()

    async def close(self) -> None:
        """Stop sending and release everything behind the stream."""
        await self._events.aclose()
        await self._on_close()


class ChunkWriter:
    """Renders deltas as events."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seeds = {
            sequence.choice.index: sequence.submit.params.seed for sequence in plan.sequences
        }
        # In a stream that ends with its usage, OpenAI's other chunks say `usage: null`.
        self._extra: Json = {"usage": None} if plan.decoding.include_usage else {}

    def render(self, delta: Delta) -> bytes:
        """The events of one delta, the opening of its choice first where it is the first."""
        form = self._plan.form
        entries = list(form.chunks(delta))
        seed = self._seeds.pop(delta.index, None)
        if seed is not None:
            entries.insert(0, form.opening(delta.index, seed))
        return b"".join(self._event(entry) for entry in entries)

    def ending(self, generation: Generation) -> bytes:
        """The last events: usage where asked for, and `[DONE]`."""
        if not self._plan.decoding.include_usage:
            return DONE
        body = self._plan.envelope.wrap([], is_chunk=True)
        return event(body | {"usage": usage(generation.usage())}) + DONE

    def _event(self, entry: Json) -> bytes:
        return event(self._plan.envelope.wrap([entry], is_chunk=True) | self._extra)


async def events(
    plan: Plan, generation: Generation, first: Delta | None
) -> AsyncGenerator[bytes, None]:
    """The stream's events, from `first`, a delta already taken, on; raises what a sequence did."""
    writer = ChunkWriter(plan)
    delta = first
    while delta is not None:
        yield writer.render(delta)
        delta = await generation.next_delta()
    yield writer.ending(generation)


async def whole_answer(plan: Plan, generation: Generation, first: Delta | None) -> Json:
    """The complete body, once every choice has finished."""
    choices = {
        sequence.choice.index: WholeChoice(sequence.choice.index, sequence.submit.params.seed)
        for sequence in plan.sequences
    }
    delta = first
    while delta is not None:
        choices[delta.index].add(delta)
        delta = await generation.next_delta()
    body = plan.envelope.wrap([plan.form.whole(choice) for choice in choices.values()])
    return body | {"usage": usage(generation.usage())}
