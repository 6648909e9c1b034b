"""The requests of one device class that wait for a worker.

The order is a key function of the ticket, smallest first: `tier_then_arrival` puts VIP before
standard and keeps each tier first in, first out. Another policy is another function.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from mirror_sd.errors import QueueFull

TIERS = ("vip", "standard")
_RANK = {tier: rank for rank, tier in enumerate(TIERS)}


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request as the scheduler sees it; times are seconds of the injected clock.

    `arrived_at` is when the gateway received it: a request that is submitted again after a lost
    worker keeps it, and so its place in the queue.
    """

    request_id: str
    device_class: str
    tier: str
    tenant: str
    arrived_at: float
    deadline: float = math.inf


OrderKey = Callable[[Ticket], tuple[float, ...]]


def tier_then_arrival(ticket: Ticket) -> tuple[float, ...]:
    """VIP first, then by arrival; an unknown tier ranks with the last one."""
    return (_RANK.get(ticket.tier, len(TIERS) - 1), ticket.arrived_at)


@dataclass(frozen=True, slots=True, order=True)
class _Entry:
    key: tuple[float, ...]
    number: int
    queued_at: float
    ticket: Ticket


class PriorityQueue:
    """A bounded heap; removal from the middle costs O(log n) amortised.

    A removed entry stays in the heap as a dead one until it surfaces, or until dead entries
    outnumber live ones and the heap is rebuilt.
    """

    def __init__(
        self, limit: int, clock: Callable[[], float], order: OrderKey = tier_then_arrival
    ) -> None:
        self._limit = limit
        self._clock = clock
        self._order = order
        self._heap: list[_Entry] = []
        self._live: dict[str, _Entry] = {}
        self._depths: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._drain = DrainRate(clock)

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def push(self, ticket: Ticket) -> None:
        """Raises `QueueFull` at the limit and `ValueError` if the id is waiting already."""
        if ticket.request_id in self._live:
            raise ValueError(f"{ticket.request_id} is waiting already")
        if len(self._live) >= self._limit:
            raise QueueFull(
                f"the {ticket.device_class} queue is full ({self._limit} requests wait)",
                retry_after_s=self._drain.seconds_for(len(self._live)),
            )
        entry = _Entry(self._order(ticket), next(self._numbers), self._clock(), ticket)
        self._live[ticket.request_id] = entry
        self._depths[ticket.tier] += 1
        heapq.heappush(self._heap, entry)

    def head_key(self) -> tuple[float, ...] | None:
        """The order key of the next ticket; None when nothing waits."""
        self._drop_dead_head()
        return self._heap[0].key if self._heap else None

    def pop(self) -> tuple[Ticket, float]:
        """The next ticket and the seconds it waited; raises `IndexError` when nothing waits."""
        self._drop_dead_head()
        entry = heapq.heappop(self._heap)
        self._forget(entry)
        self._drain.record()
        return entry.ticket, self._clock() - entry.queued_at

    def remove(self, request_id: str) -> Ticket | None:
        """Take a ticket out of the queue; None if it does not wait here."""
        entry = self._live.get(request_id)
        if entry is None:
            return None
        self._forget(entry)
        if len(self._heap) > 2 * len(self._live) + 8:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)
        return entry.ticket

    def expired(self) -> list[Ticket]:
        """Take out and return the tickets whose deadline has passed."""
        now = self._clock()
        late = [entry.ticket for entry in self._live.values() if entry.ticket.deadline <= now]
        for ticket in late:
            self.remove(ticket.request_id)
        return late

    def clear(self) -> list[Ticket]:
        """Take out and return everything, in order."""
        tickets = [entry.ticket for entry in sorted(self._live.values())]
        self._heap.clear()
        self._live.clear()
        self._depths.clear()
        return tickets

    def depth(self, tier: str) -> int:
        return self._depths[tier]

    def oldest_age_s(self) -> float:
        """Seconds the longest-waiting ticket has waited; 0 when nothing waits."""
        # Entries are inserted in time order, so the first one left is the oldest.
        first = next(iter(self._live.values()), None)
        return 0.0 if first is None else self._clock() - first.queued_at

    def _forget(self, entry: _Entry) -> None:
        del self._live[entry.ticket.request_id]
        self._depths[entry.ticket.tier] -= 1

    def _drop_dead_head(self) -> None:
        while self._heap:
            head = self._heap[0]
            if self._live.get(head.ticket.request_id) is head:
                return
            heapq.heappop(self._heap)


class DrainRate:
    """How fast a queue empties, from its last departures within a minute."""

    WINDOW_S = 60.0
    SAMPLES = 128
    BOUNDS_S = (1.0, 60.0)

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._departures: deque[float] = deque(maxlen=self.SAMPLES)

    def record(self) -> None:
        self._departures.append(self._clock())

    def seconds_for(self, requests: int) -> float:
        """Seconds until that many have left, within `BOUNDS_S`; the upper bound if none did."""
        shortest, longest = self.BOUNDS_S
        now = self._clock()
        while self._departures and now - self._departures[0] > self.WINDOW_S:
            self._departures.popleft()
        if not self._departures:
            return longest
        span = max(now - self._departures[0], 1e-3)
        return min(longest, max(shortest, requests * span / len(self._departures)))
