"""Hands waiting requests to workers that have credit.

A request waits in the queue of the class it asked for. While that class has a live worker that
class serves it; a class that has nothing waiting itself may take what has waited `steal_after_s`.
When its class has had no worker for `fallback_s` any other may serve it, because a worker that
restarts is back sooner than a stream is worth moving to another precision. When no class has had a
worker for `worker_wait_s` the request fails with `NoWorker`.

An idle worker gets work at once. One that runs a batch gets newcomers together: when they fill
what it can take, or the oldest has waited `batch_wait_s`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mirror_sd.errors import DeadlineExceeded, MirrorError, NoWorker
from mirror_sd.scheduler.displacement import Candidate, Displacement
from mirror_sd.scheduler.priority_queue import Pick, PriorityQueue, QueueRules
from mirror_sd.scheduler.roster import Roster
from mirror_sd.scheduler.ticket import Ticket

# How long one that is served because of its age or its tier's share is safe from displacement: it
# gets on in its turn, but a long answer does not hold its slot against VIP.
_ENTITLED_S = 5.0


@dataclass(frozen=True, slots=True)
class DispatchRules:
    """Times in seconds; infinite ones never come."""

    fallback_s: float
    worker_wait_s: float
    batch_wait_s: float = 0.0
    steal_after_s: float = math.inf
    preemption: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """`served_by` is the class of the worker: another than `ticket.device_class` where that has
    none, or, if `is_stolen`, where that is busy."""

    ticket: Ticket
    worker_id: str
    served_by: str
    waited_s: float
    is_stolen: bool = False


@dataclass(frozen=True, slots=True)
class _Running:
    """`safe_until`: not to be displaced before."""

    ticket: Ticket
    safe_until: float


def _no_preference(request_id: str) -> str | None:
    return None


class Dispatcher:
    """`classes` may be asked for; those in `expected` have a pool, so that a worker may come.

    `preferred_worker` names the worker that a request had best go to, if it can.
    """

    def __init__(
        self,
        classes: Sequence[str],
        expected: Iterable[str],
        *,
        clock: Callable[[], float],
        queue_rules: QueueRules,
        rules: DispatchRules,
        preferred_worker: Callable[[str], str | None] = _no_preference,
    ) -> None:
        self._queues = {name: PriorityQueue(queue_rules, clock) for name in classes}
        self.roster = Roster(expected, clock)
        self._clock = clock
        self._rules = rules
        self._preferred_worker = preferred_worker
        self._displacement = Displacement(clock)
        self._running: dict[str, _Running] = {}
        # Workers whose batch is being filled in this pass, and when something held back is due.
        self._filling: set[str] = set()
        # Queues for whose VIP a slot was made free: it is not for whose turn it is.
        self._freed: set[str] = set()
        self._due_at = math.inf

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self._queues)

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def due_at(self) -> float:
        """When the next pass will find more to do than this one, if nothing happens until then."""
        return self._due_at if self.waiting else math.inf

    def queue(self, device_class: str) -> PriorityQueue:
        """The queue of a class, to be read; raises `KeyError` for an unknown class."""
        return self._queues[device_class]

    def enqueue(self, ticket: Ticket) -> None:
        """Raises `QueueFull`, or `NoWorker` when none has been there for too long."""
        if self._is_hopeless():
            raise self._no_worker(ticket)
        self._queues[ticket.device_class].push(ticket)

    def upgrade(self, ticket: Ticket) -> None:
        """Put this ticket in the place of the one with its id, waiting or running."""
        running = self._running.get(ticket.request_id)
        if running is not None:
            self._running[ticket.request_id] = _Running(ticket, running.safe_until)
        else:
            self._queues[ticket.device_class].replace(ticket)

    def withdraw(self, request_id: str) -> bool:
        """Take a request out of its queue; False if it does not wait."""
        return any(queue.remove(request_id) is not None for queue in self._queues.values())

    def withdraw_all(self) -> list[Ticket]:
        """Empty the queues; what waited."""
        return [ticket for queue in self._queues.values() for ticket in queue.clear()]

    def release(self, request_id: str) -> str | None:
        """The request is over; the worker that held it, None if none did."""
        self._running.pop(request_id, None)
        return self.roster.release(request_id)

    def next_assignment(self) -> Assignment | None:
        """Give the first ticket, over all queues, that some worker can take; None if none can,
        which ends a pass."""
        best: tuple[Pick, PriorityQueue, str] | None = None
        self._due_at = math.inf
        for name, queue in self._queues.items():
            pick = queue.pick(vip_first=name in self._freed)
            if pick is None or (best is not None and best[0].key <= pick.key):
                continue
            worker_id = self._worker_for(name, pick)
            if worker_id is not None:
                best = (pick, queue, worker_id)
        if best is None:
            self._filling.clear()
            self._freed.clear()
            return None
        return self._assign(*best)

    def next_displaced(self, tokens_left: Callable[[Ticket], int]) -> str | None:
        """The running request that must give way to a VIP that waits while every slot it could
        have is taken; None if none must. It is for the caller to stop and release it."""
        if not self._rules.preemption:
            return None
        for name, queue in self._queues.items():
            pick = queue.pick(vip_first=True)
            if pick is None or not pick.ticket.is_vip:
                continue
            classes = self._serving(name)
            if not classes or self.roster.choose(classes, beyond_limit=True) is not None:
                continue
            victim = self._displacement.choose(self._candidates(classes, tokens_left))
            if victim is not None:
                self._freed.add(name)
                return victim
        return None

    def note_displaced(self, request_id: str) -> None:
        """A request, under the id that it will be submitted again with, was displaced."""
        self._displacement.note(request_id)

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

    def check_integrity(self) -> None:
        """Raises `AssertionError` if what runs and what workers hold differ."""
        self.roster.check_integrity()
        lost = [name for name in self._running if self.roster.holder(name) is None]
        if lost:
            raise AssertionError(f"held by no worker: {lost}")

    def _worker_for(self, name: str, pick: Pick) -> str | None:
        """The worker that is to take a queue's next ticket now."""
        ticket = pick.ticket
        worker_id = self.roster.choose(
            self._serving(name),
            beyond_limit=ticket.is_vip or pick.is_entitled,
            preferred=self._preferred_worker(ticket.request_id),
        )
        if worker_id is None:
            return self._thief(name, pick)
        return worker_id if self._is_due(worker_id, name, ticket) else None

    def _is_due(self, worker_id: str, name: str, ticket: Ticket) -> bool:
        if ticket.is_vip or not ticket.waits_for_batch or worker_id in self._filling:
            return True
        is_idle = not self.roster.held(worker_id)
        queue = self._queues[name]
        is_full = queue.is_full or len(queue) >= self.roster.credit(worker_id)
        due_at = ticket.arrived_at + self._rules.batch_wait_s
        if is_idle or is_full or self._clock() >= due_at:
            self._filling.add(worker_id)
            return True
        self._due_at = min(self._due_at, due_at)
        return False

    def _thief(self, name: str, pick: Pick) -> str | None:
        """A worker of a class with nothing to do, for what has waited long enough."""
        rules = self._rules
        # A stream is worth moving only as late as if its class were gone.
        patience_s = rules.fallback_s if pick.ticket.is_resumed else rules.steal_after_s
        due_at = pick.entry.queued_at + max(patience_s, rules.steal_after_s)
        others = [
            other
            for other, queue in self._queues.items()
            if other != name and not queue and other not in pick.ticket.spare
        ]
        worker_id = self.roster.choose(others)
        if worker_id is None or self._clock() >= due_at:
            return worker_id
        self._due_at = min(self._due_at, due_at)
        return None

    def _assign(self, pick: Pick, queue: PriorityQueue, worker_id: str) -> Assignment:
        ticket = pick.ticket
        waited_s = queue.take(pick)
        if ticket.is_vip:
            self._freed.discard(ticket.device_class)
        self.roster.give(ticket.request_id, worker_id)
        safe_until = self._clock() + _ENTITLED_S if pick.is_entitled else -math.inf
        self._running[ticket.request_id] = _Running(ticket, safe_until)
        served_by = self.roster.class_of(worker_id)
        is_other = served_by != ticket.device_class
        is_stolen = is_other and self.roster.accepts(ticket.device_class)
        return Assignment(ticket, worker_id, served_by, waited_s, is_stolen)

    def _candidates(
        self, classes: Sequence[str], tokens_left: Callable[[Ticket], int]
    ) -> list[Candidate]:
        now = self._clock()
        found: list[Candidate] = []
        for request_id in self.roster.running(classes):
            running = self._running[request_id]
            if not running.ticket.is_vip and now >= running.safe_until:
                found.append(Candidate(request_id, tokens_left(running.ticket)))
        return found

    def _serving(self, device_class: str) -> Sequence[str]:
        if self.roster.accepts(device_class):
            return (device_class,)
        is_gone = self.roster.absence_s(device_class) > self._rules.fallback_s
        return self.classes if is_gone else ()

    def _is_hopeless(self) -> bool:
        worker_wait_s = self._rules.worker_wait_s
        return all(self.roster.absence_s(name) > worker_wait_s for name in self._queues)

    def _no_worker(self, ticket: Ticket) -> NoWorker:
        worker_wait_s = self._rules.worker_wait_s
        return NoWorker(
            f"no worker for {ticket.device_class} has been there for {worker_wait_s:g} s",
            retry_after_s=min(60.0, max(1.0, worker_wait_s / 2)),
        )
