"""Tickets of one tier, shared fairly between tenants.

Start-time fair queueing (Goyal, Vin, Cheng, 1996): each tenant has a virtual time that its served
cost moves on, and the one furthest behind is next. A tenant that was idle starts at the time of
the one served last, so that idling saves nothing up. Within a tenant `order` decides, smallest
first, then the order of pushes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mirror_sd.scheduler.ticket import Ticket

OrderKey = Callable[[Ticket], tuple[float, ...]]

# Tenants whose debt is remembered while they have nothing waiting.
_DEBTORS = 1024


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    key: tuple[float, ...]
    number: int
    queued_at: float = field(compare=False)
    ticket: Ticket = field(compare=False)


@dataclass(slots=True)
class _Lane:
    virtual_time: float
    heap: list[Entry] = field(default_factory=list)
    live: int = 0
    cost: float = 0.0  # of what is live


class FairQueue:
    """Removal from the middle leaves a dead entry in its heap until it surfaces, or until dead
    ones outnumber the live ones and the heap is made anew: O(log n) amortised."""

    def __init__(self, order: OrderKey) -> None:
        self._order = order
        self._live: dict[str, Entry] = {}
        self._lanes: dict[str, _Lane] = {}
        self._turns: list[tuple[float, int, str]] = []
        self._debts: dict[str, float] = {}
        self._virtual_time = 0.0
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __iter__(self) -> Iterator[Entry]:
        """The longest waiting first."""
        return iter(self._live.values())

    def push(self, ticket: Ticket, queued_at: float) -> None:
        """Take in a ticket that has waited since `queued_at`."""
        entry = Entry(self._order(ticket), next(self._numbers), queued_at, ticket)
        lane = self._lanes.get(ticket.tenant)
        if lane is None:
            owed = self._debts.pop(ticket.tenant, 0.0)
            lane = self._lanes[ticket.tenant] = _Lane(max(owed, self._virtual_time))
            self._take_turn(ticket.tenant, lane)
        heapq.heappush(lane.heap, entry)
        lane.live += 1
        lane.cost += ticket.cost
        newest = next(reversed(self._live.values()), entry)
        self._live[ticket.request_id] = entry
        if newest.queued_at > queued_at:  # it has waited elsewhere before
            by_age = sorted(self._live.values(), key=lambda entry: entry.queued_at)
            self._live = {entry.ticket.request_id: entry for entry in by_age}

    def replace(self, ticket: Ticket) -> bool:
        """Put a ticket, of the same tenant, in the place of the one with its id; False if none
        is here."""
        old = self._live.get(ticket.request_id)
        if old is None:
            return False
        lane = self._lanes[ticket.tenant]
        lane.cost += ticket.cost - old.ticket.cost
        entry = Entry(self._order(ticket), old.number, old.queued_at, ticket)
        self._live[ticket.request_id] = entry
        heapq.heappush(lane.heap, entry)
        self._prune(lane)
        return True

    def ahead_of(self, tenant: str) -> int:
        """How many will be served before one more of this tenant, about: all of its own, and of
        each other tenant what its equal share comes to by then."""
        own = self._lanes.get(tenant)
        if own is None:
            begin = max(self._debts.get(tenant, 0.0), self._virtual_time)
        else:
            begin = own.virtual_time + own.cost
        ahead = 0 if own is None else own.live
        for lane in self._lanes.values():
            if lane is not own:
                share = max(0.0, begin - lane.virtual_time) * lane.live / max(lane.cost, 1e-9)
                ahead += min(lane.live, 1 + int(share))
        return ahead

    def head(self) -> Entry | None:
        """The next entry; None when nothing waits."""
        lane = self._next_lane()
        if lane is None:
            return None
        while self._live.get(lane.heap[0].ticket.request_id) is not lane.heap[0]:
            heapq.heappop(lane.heap)
        return lane.heap[0]

    def oldest(self) -> Entry | None:
        """The one that has waited longest; None when nothing waits."""
        return next(iter(self._live.values()), None)

    def take(self, entry: Entry) -> None:
        """Take out an entry that is served, at its tenant's cost."""
        tenant = entry.ticket.tenant
        lane = self._lanes[tenant]
        self._virtual_time = max(self._virtual_time, lane.virtual_time)
        lane.virtual_time += entry.ticket.cost
        self._forget(entry)
        if lane.live:
            self._take_turn(tenant, lane)

    def remove(self, request_id: str) -> Entry | None:
        """Take out an entry that will not be served; None if it is not here."""
        entry = self._live.get(request_id)
        if entry is not None:
            self._forget(entry)
        return entry

    def clear(self) -> list[Entry]:
        """Take out everything, the longest waiting first."""
        entries = list(self._live.values())
        for entry in entries:
            self._forget(entry)
        return entries

    def _forget(self, entry: Entry) -> None:
        tenant = entry.ticket.tenant
        lane = self._lanes[tenant]
        del self._live[entry.ticket.request_id]
        lane.live -= 1
        lane.cost -= entry.ticket.cost
        if not lane.live:
            del self._lanes[tenant]
            self._remember_debt(tenant, lane.virtual_time)
        else:
            self._prune(lane)

    def _prune(self, lane: _Lane) -> None:
        if len(lane.heap) > 2 * lane.live + 8:
            lane.heap = [e for e in lane.heap if self._live.get(e.ticket.request_id) is e]
            heapq.heapify(lane.heap)

    def _remember_debt(self, tenant: str, virtual_time: float) -> None:
        if virtual_time > self._virtual_time:
            self._debts[tenant] = virtual_time
        if len(self._debts) > _DEBTORS:
            owing = {t: v for t, v in self._debts.items() if v > self._virtual_time}
            self._debts = owing if len(owing) <= _DEBTORS else {}

    def _take_turn(self, tenant: str, lane: _Lane) -> None:
        heapq.heappush(self._turns, (lane.virtual_time, next(self._numbers), tenant))
        if len(self._turns) > 2 * len(self._lanes) + 64:
            self._turns = [
                (other.virtual_time, next(self._numbers), name)
                for name, other in self._lanes.items()
            ]
            heapq.heapify(self._turns)

    def _next_lane(self) -> _Lane | None:
        while self._turns:
            virtual_time, _, tenant = self._turns[0]
            lane = self._lanes.get(tenant)
            if lane is not None and lane.virtual_time == virtual_time:
                return lane
            heapq.heappop(self._turns)
        return None
