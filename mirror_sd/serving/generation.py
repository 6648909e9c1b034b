"""Running a plan: events of all its sequences in the order they come, turned into deltas."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Protocol

from prometheus_client import Counter

from mirror_sd import telemetry
from mirror_sd.api.choice import Choice, Delta
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
        self._meanwhile: Callable[[], bool] | None = None
        self._is_gone = False
        self._reports: dict[int, SequenceUsage] = {}

    def start(self) -> None:
        """Submit every sequence; raises the `MirrorError` of one that is refused at once."""
        prompts = {s.prompt_index: len(s.submit.prompt) for s in self._plan.sequences}
        _prompt_tokens(self._plan.caller.device_class).inc(sum(prompts.values()))
        for sequence in self._plan.sequences:
            leave = self._broker.open(sequence.submit, partial(self._hear, sequence))
            self._leaves[sequence.choice.index] = leave

    async def next_deltas(self) -> list[Delta]:
        """The deltas of any choice that are there, at least one, none when all have finished;
        raises as `take`."""
        while not self.is_finished:
            deltas = await self.take()
            if deltas:
                return deltas
            await self.wait()
        return []

    async def take(self) -> list[Delta]:
        """The deltas that are there. Raises the error that ended a sequence, or `ClientGone` after
        `abandon`."""
        if self._is_gone:
            raise ClientGone
        return self.take_now() or (await self._take_heavy() if self._events else [])

    def take_now(self) -> list[Delta]:
        """The deltas of the events that are there, up to one that is an error or that takes a
        thread."""
        deltas: list[Delta] = []
        while self._events and len(deltas) < _MAX_DELTAS:
            sequence, event = self._events[0]
            choice = sequence.choice
            if isinstance(event, Exception) or not _is_light(choice, event):
                break
            self._events.popleft()
            known = choice.tokens_delivered
            self._keep(deltas, sequence, event, _delta_of(choice, event), known)
        return deltas

    async def wait(self, meanwhile: Callable[[], bool] | None = None) -> None:
        """Until there is something to take, or all is over. `meanwhile` is called first for each
        event that comes, and may `take_now`; the wait goes on unless it returns True."""
        if not self.is_idle:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        self._meanwhile = meanwhile
        try:
            await self._waiter
        finally:
            self._meanwhile = None

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do until another event comes."""
        return not (self._events or self.is_finished or self._is_gone)

    @property
    def is_finished(self) -> bool:
        """Whether every choice has given its last delta."""
        return self._unfinished == 0

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
        if self._meanwhile is None or self._meanwhile():
            self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        self._meanwhile = None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _take_heavy(self) -> list[Delta]:
        """The delta of the first event, worked out in the text thread; raises what it is."""
        deltas: list[Delta] = []
        sequence, event = self._events[0]
        if isinstance(event, Exception):
            raise event
        self._events.popleft()
        choice = sequence.choice
        known = choice.tokens_delivered
        delta = await self._text_thread.run(_delta_of, choice, event)
        self._keep(deltas, sequence, event, delta, known)
        return deltas

    def _keep(
        self,
        deltas: list[Delta],
        sequence: PlannedSequence,
        event: Chunk | Finished,
        delta: Delta | None,
        known: int,
    ) -> None:
        """Put down what an event gave, before which `known` tokens were delivered."""
        choice = sequence.choice
        self._meter.delivered(choice.tokens_delivered - known)
        if delta is None:
            return
        deltas.append(delta)
        if isinstance(event, Finished):
            self._reports[choice.index] = event.usage
        if delta.finish_reason is not None:
            self._unfinished -= 1
            self._leave(choice.index)

    def _leave(self, index: int) -> None:
        leave = self._leaves.pop(index, None)
        if leave is not None:
            leave()

    def _leave_all(self) -> None:
        for index in list(self._leaves):
            self._leave(index)


@lru_cache(maxsize=64)
def _prompt_tokens(device_class: str) -> Counter:
    return telemetry.PROMPT_TOKENS.labels(device_class)


def _is_light(choice: Choice, event: Chunk | Finished) -> bool:
    return choice.is_light and (isinstance(event, Finished) or event.prompt_logprobs is None)


def _delta_of(choice: Choice, event: Chunk | Finished) -> Delta | None:
    if choice.is_stopped:
        return None
    return choice.finish(event.reason) if isinstance(event, Finished) else choice.feed(event)
