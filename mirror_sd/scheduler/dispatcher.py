"""Hands waiting requests to workers that have credit.

A request waits in the queue of the class it asked for. While that class has a live worker only
that class serves it; when it has had none for `fallback_s` any other class may, because a worker
that restarts is back sooner than a stream is worth moving to another precision. When no class has
had a worker for `worker_wait_s` the request fails with `NoWorker`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mirror_sd.errors import DeadlineExceeded, MirrorError, NoWorker
from mirror_sd.scheduler.priority_queue import (
    OrderKey,
    PriorityQueue,
    Ticket,
    tier_then_arrival,
)
from mirror_sd.scheduler.roster import Roster


@dataclass(frozen=True, slots=True)
class Assignment:
    """`served_by` is the class of the worker, another than `ticket.device_class` on fall-back."""

    ticket: Ticket
    worker_id: str
    served_by: str
    waited_s: float


class Dispatcher:
    """`classes` may be asked for; those in `expected` have a pool, so that a worker may come."""

    def __init__(
        self,
        classes: Sequence[str],
        expected: Iterable[str],
        *,
        clock: Callable[[], float],
        max_queue: int,
        fallback_s: float,
        worker_wait_s: float,
        order: OrderKey = tier_then_arrival,
    ) -> None:
        self._queues = {name: PriorityQueue(max_queue, clock, order) for name in classes}
        self.roster = Roster(expected, clock)
        self._fallback_s = fallback_s
        self._worker_wait_s = worker_wait_s

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self._queues)

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def queue(self, device_class: str) -> PriorityQueue:
        """The queue of a class, to be read; raises `KeyError` for an unknown class."""
        return self._queues[device_class]

    def enqueue(self, ticket: Ticket) -> None:
        """Raises `QueueFull`, or `NoWorker` when none has been there for too long."""
        if self._is_hopeless():
            raise self._no_worker(ticket)
        self._queues[ticket.device_class].push(ticket)

    def withdraw(self, request_id: str) -> bool:
        """Take a request out of its queue; False if it does not wait."""
        return any(queue.remove(request_id) is not None for queue in self._queues.values())

    def withdraw_all(self) -> list[Ticket]:
        """Empty the queues; what waited."""
        return [ticket for queue in self._queues.values() for ticket in queue.clear()]

    def next_assignment(self) -> Assignment | None:
        """Give the first ticket, over all queues, that some worker can take; None if none can."""
        best: tuple[tuple[float, ...], PriorityQueue, str] | None = None
        for name, queue in self._queues.items():
            key = queue.head_key()
            if key is None or (best is not None and best[0] <= key):
                continue
            worker_id = self.roster.choose(self._serving(name))
            if worker_id is not None:
                best = (key, queue, worker_id)
        if best is None:
            return None
        _, queue, worker_id = best
        ticket, waited_s = queue.pop()
        self.roster.give(ticket.request_id, worker_id)
        return Assignment(ticket, worker_id, self.roster.class_of(worker_id), waited_s)

    def overdue(self) -> list[tuple[Ticket, MirrorError]]:
        """Take out what must not wait any longer, each with the error to answer."""
        failures: list[tuple[Ticket, MirrorError]] = []
        for queue in self._queues.values():
            for ticket in queue.expired():
                error = DeadlineExceeded("the request's time ran out while it waited for a worker")
                failures.append((ticket, error))
        if self.waiting and self._is_hopeless():
            failures += [(ticket, self._no_worker(ticket)) for ticket in self.withdraw_all()]
        return failures

    def _serving(self, device_class: str) -> Sequence[str]:
        if self.roster.accepts(device_class):
            return (device_class,)
        is_gone = self.roster.absence_s(device_class) > self._fallback_s
        return self.classes if is_gone else ()

    def _is_hopeless(self) -> bool:
        return all(self.roster.absence_s(name) > self._worker_wait_s for name in self._queues)

    def _no_worker(self, ticket: Ticket) -> NoWorker:
        return NoWorker(
            f"no worker for {ticket.device_class} has been there for {self._worker_wait_s:g} s",
            retry_after_s=min(60.0, max(1.0, self._worker_wait_s / 2)),
        )
