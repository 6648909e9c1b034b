"""Running a plan: one task a sequence, their deltas merged in the order they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from mirror_sd import telemetry
from mirror_sd.api.choice import Delta
from mirror_sd.api.responses import ChoiceUsage
from mirror_sd.errors import InternalError
from mirror_sd.messages import Chunk, Finished, SequenceUsage, Stats, Submit
from mirror_sd.serving.intake import Plan, PlannedSequence
from mirror_sd.serving.text_thread import TextThread

_MAX_WAITING_DELTAS = 256


class Broker(Protocol):
    """What a gateway needs of `broker_client.BrokerClient`."""

    @property
    def alive(self) -> bool: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def generate(self, submit: Submit) -> AsyncGenerator[Chunk | Finished, None]: ...

    async def stats(self) -> Stats: ...


class ClientGone(Exception):
    """The HTTP client has left; nobody waits for an answer."""


class Generation:
    """The sequences of one request. `start` it, take deltas until `next_delta` gives None, `close`
    it in any case: that cancels what still runs, down to the workers.

    `arrived_at` is the request's arrival on `clock`.
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
        self._clock = clock
        self._arrived_at = arrived_at
        self._is_begun = False
        self._unfinished = len(plan.sequences)
        self._arrivals: asyncio.Queue[Delta | Exception] = asyncio.Queue(_MAX_WAITING_DELTAS)
        self._tasks: list[asyncio.Task[None]] = []
        self._gone = asyncio.Event()
        self._reports: dict[int, SequenceUsage] = {}

    def start(self) -> None:
        """Submit every sequence."""
        for tokens in {s.prompt_index: len(s.submit.prompt) for s in self._plan.sequences}.values():
            telemetry.PROMPT_TOKENS.labels(self._plan.caller.device_class).inc(tokens)
        self._tasks = [
            asyncio.create_task(self._follow(sequence), name=sequence.submit.request_id)
            for sequence in self._plan.sequences
        ]

    async def next_delta(self) -> Delta | None:
        """The next delta of any choice, None when all have finished.

        Raises the error that ended a sequence, or `ClientGone` after `abandon`.
        """
        if self._unfinished == 0:
            return None
        if self._gone.is_set():
            raise ClientGone
        arrival = await self._arrivals.get()
        if isinstance(arrival, Exception):
            raise arrival
        if arrival.finish_reason is not None:
            self._unfinished -= 1
        return arrival

    def abandon(self) -> None:
        """The client has gone: cancel everything and wake whoever waits for a delta."""
        self._gone.set()
        for task in self._tasks:
            task.cancel()
        if self._arrivals.empty():
            self._arrivals.put_nowait(ClientGone())

    async def close(self) -> None:
        """Cancel what still runs and wait until the broker was told."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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

    async def _follow(self, sequence: PlannedSequence) -> None:
        try:
            async with aclosing(self._broker.generate(sequence.submit)) as frames:
                await self._deliver(sequence, frames)
        except Exception as error:  # noqa: BLE001 - raised again by `next_delta`
            await self._arrivals.put(error)

    async def _deliver(
        self, sequence: PlannedSequence, frames: AsyncGenerator[Chunk | Finished, None]
    ) -> None:
        choice = sequence.choice
        last_at: float | None = None
        async for frame in frames:
            if isinstance(frame, Finished):
                self._reports[choice.index] = frame.usage
                await self._arrivals.put(await self._text_thread.run(choice.finish, frame.reason))
                return
            last_at = self._observe(frame, last_at)
            known = choice.tokens_delivered
            delta = await self._text_thread.run(choice.feed, frame)
            completed = choice.tokens_delivered - known
            telemetry.COMPLETION_TOKENS.labels(self._plan.caller.device_class).inc(completed)
            if delta is not None:
                await self._arrivals.put(delta)
            if choice.is_stopped:
                return
        raise InternalError(f"{sequence.submit.request_id} ended without a last frame")

    def _observe(self, chunk: Chunk, last_at: float | None) -> float:
        """Count a chunk and its time; `last_at` is when the sequence's previous one came."""
        now = self._clock()
        labels = (self._plan.caller.device_class, self._plan.tier)
        if not self._is_begun:
            self._is_begun = True
            telemetry.TIME_TO_FIRST_TOKEN.labels(*labels).observe(now - self._arrived_at)
        if last_at is not None and chunk.tokens:
            gap = (now - last_at) / len(chunk.tokens)
            latency = telemetry.INTER_TOKEN_LATENCY.labels(*labels)
            for _ in chunk.tokens:
                latency.observe(gap)
        return now
