"""The requests of one device class that wait for a worker.

Which one is next:

    1. a standard one that has waited nearly `max_wait_s`, the longest waiting first, but while VIP
       waits too only every second time
    2. while both tiers wait, a standard one each time that its share of the dispatches is due
    3. VIP before standard

Within a tier tenants share fairly (`fair_queue`), and within a tenant the next is the one that
must be served soonest: by its own deadline, or `max_wait_s` after its arrival.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mirror_sd.errors import QueueFull
from mirror_sd.scheduler.drain_rate import DrainRate
from mirror_sd.scheduler.fair_queue import Entry, FairQueue, OrderKey
from mirror_sd.scheduler.ticket import TIERS, Ticket

_VIP, _STANDARD = TIERS
# Of `max_wait_s`: a standard request goes before VIP a little early, so that it is served by then,
# and is refused when a wait is foreseen that is still shorter: or under steady overload all would
# wait just long enough to go before VIP.
_PROMOTED_AT = 0.8
_REFUSED_AT = 0.6
# Departures that must have been seen before a wait is foreseen.
_EVIDENCE = 4


@dataclass(frozen=True, slots=True)
class QueueRules:
    """`limit`: requests that may wait; VIP ones may wait in `vip_extra` of it besides."""

    limit: int
    vip_extra: float = 0.0
    standard_share: float = 0.0
    max_wait_s: float = math.inf

    def limit_of(self, ticket: Ticket) -> int:
        return self.limit + (math.ceil(self.limit * self.vip_extra) if ticket.is_vip else 0)


@dataclass(frozen=True, slots=True)
class Pick:
    """The next ticket of a queue. `rank`: smaller goes first among queues, then by `key`.
    `is_entitled`: it is its turn by share or by age, so it must not be displaced at once."""

    entry: Entry
    rank: int
    is_entitled: bool

    @property
    def ticket(self) -> Ticket:
        return self.entry.ticket

    @property
    def key(self) -> tuple[float, ...]:
        return (self.rank, *self.entry.key)


class PriorityQueue:
    def __init__(
        self, rules: QueueRules, clock: Callable[[], float], order: OrderKey | None = None
    ) -> None:
        self._rules = rules
        self._clock = clock
        self._tiers = {tier: FairQueue(order or self._due_at) for tier in TIERS}
        self._drain = DrainRate(clock)
        # Of standard requests since there were last none.
        self._backlog_drain = DrainRate(clock)
        self._count = 0
        # Whether the last one passed a VIP because of its age: the next one does not.
        self._has_passed = False
        # The part of a dispatch that standard is owed.
        self._owed = 0.0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, request_id: str) -> bool:
        return any(request_id in tier for tier in self._tiers.values())

    @property
    def is_full(self) -> bool:
        """Whether a standard request would be refused for want of room."""
        return len(self) >= self._rules.limit

    def push(self, ticket: Ticket) -> None:
        """Raises `QueueFull` at the limit, or where a standard request might wait for more than
        `max_wait_s`, but never for one that is resumed; `ValueError` if the id is waiting."""
        if ticket.request_id in self:
            raise ValueError(f"{ticket.request_id} is waiting already")
        if not ticket.is_resumed:
            self._check_room(ticket)
        self._tier(ticket).push(ticket, self._clock())
        self._count += 1

    def pick(self, *, vip_first: bool = False) -> Pick | None:
        """The next ticket; None when nothing waits. It is not taken out. `vip_first`: a VIP if
        there is one, whoever's turn it is."""
        vip, standard = self._tiers[_VIP].head(), self._tiers[_STANDARD].head()
        if vip is not None and vip_first:
            return Pick(vip, 1, is_entitled=False)
        oldest = self._tiers[_STANDARD].oldest()
        is_overdue = oldest is not None and self._is_overdue(oldest)
        if oldest is not None and is_overdue and not (vip is not None and self._has_passed):
            return Pick(oldest, 0, is_entitled=True)
        if standard is None:
            return None if vip is None else Pick(vip, 1, is_entitled=False)
        if vip is None:
            return Pick(standard, 2, is_entitled=False)
        if self._owed + self._rules.standard_share >= 1.0:
            return Pick(standard, 1, is_entitled=True)
        return Pick(vip, 1, is_entitled=False)

    def take(self, pick: Pick) -> float:
        """Take out what `pick` gave, to be served; the seconds it waited."""
        ticket = pick.ticket
        self._has_passed = pick.rank == 0
        if all(self._tiers.values()):
            served = 0.0 if ticket.is_vip else 1.0
            self._owed = min(1.0, max(0.0, self._owed + self._rules.standard_share - served))
        self._tier(ticket).take(pick.entry)
        self._count -= 1
        self._drain.record()
        if not ticket.is_vip:
            self._backlog_drain.record()
        self._note_empty()
        return self._clock() - pick.entry.queued_at

    def pop(self) -> tuple[Ticket, float]:
        """The next ticket and the seconds it waited; raises `IndexError` when nothing waits."""
        pick = self.pick()
        if pick is None:
            raise IndexError("nothing waits")
        return pick.ticket, self.take(pick)

    def remove(self, request_id: str) -> Ticket | None:
        """Take a ticket out of the queue; None if it does not wait here."""
        for tier in self._tiers.values():
            entry = tier.remove(request_id)
            if entry is not None:
                self._count -= 1
                self._note_empty()
                return entry.ticket
        return None

    def replace(self, ticket: Ticket) -> bool:
        """Change a waiting ticket, which keeps its age; False if it does not wait here."""
        if self._tier(ticket).replace(ticket):
            return True
        for tier in self._tiers.values():
            entry = tier.remove(ticket.request_id)
            if entry is not None:
                self._tier(ticket).push(ticket, entry.queued_at)
                return True
        return False

    def expired(self) -> list[Ticket]:
        """Take out and return the tickets whose deadline has passed."""
        now = self._clock()
        late = [entry.ticket for entry in self if entry.ticket.deadline <= now]
        for ticket in late:
            self.remove(ticket.request_id)
        return late

    def clear(self) -> list[Ticket]:
        """Take out and return everything."""
        self._count = 0
        return [entry.ticket for tier in self._tiers.values() for entry in tier.clear()]

    def __iter__(self) -> Iterator[Entry]:
        for tier in self._tiers.values():
            yield from tier

    def depth(self, tier: str) -> int:
        return len(self._tiers[tier])

    def oldest_age_s(self, tier: str | None = None) -> float:
        """Seconds the longest-waiting ticket has waited; 0 when nothing waits."""
        tiers = self._tiers.values() if tier is None else (self._tiers[tier],)
        waiting = [entry.queued_at for queue in tiers if (entry := queue.oldest()) is not None]
        return self._clock() - min(waiting) if waiting else 0.0

    def _tier(self, ticket: Ticket) -> FairQueue:
        return self._tiers[_VIP if ticket.is_vip else _STANDARD]

    def _due_at(self, ticket: Ticket) -> tuple[float, ...]:
        return (min(ticket.deadline, ticket.arrived_at + min(self._rules.max_wait_s, 1e9)),)

    def _is_overdue(self, entry: Entry) -> bool:
        return self._clock() - entry.queued_at >= self._rules.max_wait_s * _PROMOTED_AT

    def _note_empty(self) -> None:
        if not self._tiers[_STANDARD]:
            self._backlog_drain.forget()

    def _check_room(self, ticket: Ticket) -> None:
        if len(self) >= self._rules.limit_of(ticket):
            raise QueueFull(
                f"the {ticket.device_class} queue is full ({len(self)} requests wait)",
                retry_after_s=self._drain.seconds_for(len(self)),
            )
        if not ticket.is_vip:
            self._check_foreseen_wait(ticket)

    def _check_foreseen_wait(self, ticket: Ticket) -> None:
        # By its tenant's turn: one that floods must not have the others refused.
        ahead = self._tiers[_STANDARD].ahead_of(ticket.tenant)
        wait_s = self._backlog_drain.wait_s(ahead, _EVIDENCE)
        limit_s = self._rules.max_wait_s * _REFUSED_AT
        if wait_s is not None and wait_s > limit_s:
            raise QueueFull(
                f"a standard request would wait for {wait_s:.0f} s for {ticket.device_class}; "
                f"{self._rules.max_wait_s:g} s are allowed, and no wait is certain",
                retry_after_s=min(60.0, max(1.0, wait_s - limit_s)),
            )
