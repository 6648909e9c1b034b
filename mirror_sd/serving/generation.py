"""Running a plan: events of all its sequences in the order they come, turned into deltas."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from mirror_sd import telemetry
from mirror_sd.api.choice import Delta
from mirror_sd.api.responses import ChoiceUsage
from mirror_sd.messages import Chunk, Finished, SequenceUsage, Stats, Submit
from mirror_sd.serving.intake import Plan, PlannedSequence
from mirror_sd.serving.text_thread import TextThread
from mirror_sd.serving.token_meter import TokenMeter

# Taken at once before other requests get their turn.
_MAX_DELTAS = 256

Event = Chunk | Finished | Exception


class Broker(Protocol):
    """What a gateway needs of `broker_client.BrokerClient`."""

    @property
    def alive(self) -> bool: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def open(self, submit: Submit, on_event: Callable[[Event], None]) -> Callable[[], None]: ...

    async def stats(self) -> Stats: ...


class ClientGone(Exception):
    """The HTTP client has left; nobody waits for an answer."""


class Generation:
    """The sequences of one request. `start` it, take deltas until `next_deltas` gives none,
    `close` it in any case: that cancels what still runs, down to the workers.

    One task may wait in `next_deltas`. Events that nobody takes wait here; they are at most the
    request's `max_tokens`. `arrived_at` is the request's arrival on `clock`.
    """

    def __init__(
        self,
        broker: Broker,
        text_thread: TextThread,
        plan: Plan,
        arrived_at: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker = broker
        self._text_thread = text_thread
        self._plan = plan
        self._meter = TokenMeter(plan.caller.device_class, plan.tier, arrived_at, clock)
        self._unfinished = len(plan.sequences)
        self._events: deque[tuple[PlannedSequence, Event]] = deque()
        self._last_at: dict[int, float] = {}
        self._leaves: dict[int, Callable[[], None]] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._is_gone = False
        self._reports: dict[int, SequenceUsage] = {}

    def start(self) -> None:
        """Submit every sequence; raises the `MirrorError` of one that is refused at once."""
        for tokens in {s.prompt_index: len(s.submit.prompt) for s in self._plan.sequences}.values():
            telemetry.PROMPT_TOKENS.labels(self._plan.caller.device_class).inc(tokens)
        for sequence in self._plan.sequences:
            leave = self._broker.open(sequence.submit, partial(self._hear, sequence))
            self._leaves[sequence.choice.index] = leave

    async def next_deltas(self) -> list[Delta]:
        """The deltas of any choice that are there, at least one, none when all have finished.

        Raises the error that ended a sequence, or `ClientGone` after `abandon`.
        """
        while self._unfinished:
            if self._is_gone:
                raise ClientGone
            deltas = await self._take()
            if deltas:
                return deltas
            if not self._events and not self._is_gone:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        return []

    def abandon(self) -> None:
        """The client has gone: cancel everything and wake whoever waits for a delta."""
        self._is_gone = True
        self._leave_all()
        self._wake()

    async def close(self) -> None:
        """Cancel what still runs."""
        self._leave_all()
        self._meter.flush()

    def usage(self) -> list[ChoiceUsage]:
        """The counts so far, one a choice."""
        return [
            ChoiceUsage(
                prompt_index=sequence.prompt_index,
                prompt_tokens=len(sequence.submit.prompt),
                completion_tokens=sequence.choice.tokens_delivered,
                reported=self._reports.get(sequence.choice.index),
            )
            for sequence in self._plan.sequences
        ]

    def _hear(self, sequence: PlannedSequence, event: Event) -> None:
        if isinstance(event, Chunk):
            index = sequence.choice.index
            last_at = self._last_at.get(index)
            self._last_at[index] = self._meter.arrived(len(event.tokens), last_at)
        self._events.append((sequence, event))
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _take(self) -> list[Delta]:
        """The deltas of the events that are there; an error waits until they are taken."""
        deltas: list[Delta] = []
        while self._events and len(deltas) < _MAX_DELTAS:
            sequence, event = self._events[0]
            if isinstance(event, Exception):
                if deltas:
                    break
                raise event
            self._events.popleft()
            delta = await self._delta(sequence, event)
            if delta is None:
                continue
            deltas.append(delta)
            if delta.finish_reason is not None:
                self._unfinished -= 1
                self._leave(sequence.choice.index)
        return deltas

    async def _delta(self, sequence: PlannedSequence, event: Chunk | Finished) -> Delta | None:
        choice = sequence.choice
        if choice.is_stopped:
            return None
        if isinstance(event, Finished):
            self._reports[choice.index] = event.usage
            if choice.is_light:
                return choice.finish(event.reason)
            return await self._text_thread.run(choice.finish, event.reason)
        known = choice.tokens_delivered
        if choice.is_light and event.prompt_logprobs is None:
            delta = choice.feed(event)
        else:
            delta = await self._text_thread.run(choice.feed, event)
        self._meter.delivered(choice.tokens_delivered - known)
        return delta

    def _leave(self, index: int) -> None:
        leave = self._leaves.pop(index, None)
        if leave is not None:
            leave()

    def _leave_all(self) -> None:
        for index in list(self._leaves):
            self._leave(index)
