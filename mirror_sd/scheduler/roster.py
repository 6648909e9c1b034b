"""The live workers, what each holds, and the credit each has left."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

# How much busier, as a share of its slots, a worker may be that has a request's prefix cached.
_PREFERENCE = 0.25


@dataclass(slots=True)
class _Seat:
    worker_id: str
    device_class: str
    slots: int
    limit: int
    joined: int
    draining: bool = False
    last_given: int = 0
    requests: set[str] = field(default_factory=set)

    def credit(self, *, beyond_limit: bool = False) -> int:
        if self.draining:
            return 0
        return (self.slots if beyond_limit else self.limit) - len(self.requests)

    @property
    def load(self) -> float:
        return len(self.requests) / self.slots


class Roster:
    """Credit is the batch limit, or for a VIP the slots, minus requests held: what a worker's
    socket buffers could not be reordered, so nothing is sent to it beyond what it runs.

    Absence is the time since a class last had a worker that takes requests, counted from
    construction for a class in `expected` and endless for any other.
    """

    def __init__(self, expected: Iterable[str], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seats: dict[str, _Seat] = {}
        self._holder: dict[str, str] = {}
        self._absent_since = dict.fromkeys(expected, clock())
        self._numbers = itertools.count(1)

    def join(self, worker_id: str, device_class: str, slots: int) -> None:
        """Raises `ValueError` for a worker that is there already or has no slot."""
        if worker_id in self._seats or slots < 1:
            raise ValueError(f"worker {worker_id} with {slots} slots cannot join")
        number = next(self._numbers)
        self._seats[worker_id] = _Seat(worker_id, device_class, slots, slots, number)
        self._absent_since.pop(device_class, None)

    def leave(self, worker_id: str) -> list[str]:
        """Forget a worker; the requests it held, to be told to their gateways."""
        seat = self._seats.pop(worker_id, None)
        if seat is None:
            return []
        for request_id in seat.requests:
            del self._holder[request_id]
        self._note_absence(seat.device_class)
        return sorted(seat.requests)

    def drain(self, worker_id: str) -> None:
        """Give the worker nothing new; what it holds may finish."""
        seat = self._seats.get(worker_id)
        if seat is not None and not seat.draining:
            seat.draining = True
            self._note_absence(seat.device_class)

    def set_limit(self, worker_id: str, limit: int) -> None:
        """Give the worker at most so many requests, VIP ones apart; what it holds stays."""
        seat = self._seats[worker_id]
        seat.limit = max(1, min(limit, seat.slots))

    def choose(
        self,
        classes: Iterable[str],
        *,
        beyond_limit: bool = False,
        preferred: str | None = None,
    ) -> str | None:
        """A worker of the classes that has credit: the preferred one unless it is much busier
        than the least loaded by share of its slots taken, which is the next choice; among equals
        the one that was given nothing for longest."""
        wanted = set(classes)
        free = [
            seat
            for seat in self._seats.values()
            if seat.device_class in wanted and seat.credit(beyond_limit=beyond_limit) > 0
        ]
        if not free:
            return None
        best = min(free, key=lambda s: (s.load, s.last_given, s.joined))
        for seat in free:
            if seat.worker_id == preferred and seat.load <= best.load + _PREFERENCE:
                return preferred
        return best.worker_id

    def give(self, request_id: str, worker_id: str) -> None:
        """Raises `ValueError` without a free slot, or if a worker holds the request already."""
        seat = self._seats.get(worker_id)
        has_slot = seat is not None and seat.credit(beyond_limit=True) > 0
        if seat is None or not has_slot or request_id in self._holder:
            raise ValueError(f"{worker_id} cannot take {request_id}")
        seat.requests.add(request_id)
        seat.last_given = next(self._numbers)
        self._holder[request_id] = worker_id

    def credit(self, worker_id: str) -> int:
        """Requests that the worker may be given besides those it holds."""
        return max(0, self._seats[worker_id].credit())

    def release(self, request_id: str) -> str | None:
        """The request is over; the worker that held it, None if none did."""
        worker_id = self._holder.pop(request_id, None)
        if worker_id is not None:
            self._seats[worker_id].requests.discard(request_id)
        return worker_id

    def holder(self, request_id: str) -> str | None:
        return self._holder.get(request_id)

    def class_of(self, worker_id: str) -> str:
        return self._seats[worker_id].device_class

    def held(self, worker_id: str) -> int:
        """Requests that the worker holds."""
        return len(self._seats[worker_id].requests)

    def running(self, classes: Iterable[str]) -> list[str]:
        """The requests that workers of the classes hold, draining ones apart."""
        wanted = set(classes)
        seats = [s for s in self._seats.values() if s.device_class in wanted and not s.draining]
        return [request_id for seat in seats for request_id in seat.requests]

    def limits(self, device_class: str) -> int:
        """Sum of the batch limits of the class's workers."""
        return sum(s.limit for s in self._seats.values() if s.device_class == device_class)

    def in_flight(self, device_class: str) -> int:
        return sum(len(s.requests) for s in self._seats.values() if s.device_class == device_class)

    def workers(self, device_class: str) -> int:
        """Live workers of the class, draining ones included."""
        return sum(seat.device_class == device_class for seat in self._seats.values())

    def accepts(self, device_class: str) -> bool:
        """Whether the class has a live worker that is not draining, busy or not."""
        return any(s.device_class == device_class and not s.draining for s in self._seats.values())

    def absence_s(self, device_class: str) -> float:
        """Seconds the class has had no worker that takes requests; 0 while it has one."""
        if self.accepts(device_class):
            return 0.0
        since = self._absent_since.get(device_class)
        return float("inf") if since is None else self._clock() - since

    def check_integrity(self) -> None:
        """Raises `AssertionError` if the two directions of who holds what disagree."""
        held = {r: s.worker_id for s in self._seats.values() for r in s.requests}
        if held != self._holder:
            raise AssertionError(f"held {held}, but recorded {self._holder}")
        over = [s.worker_id for s in self._seats.values() if len(s.requests) > s.slots]
        if over:
            raise AssertionError(f"more requests than slots: {over}")

    def _note_absence(self, device_class: str) -> None:
        if not self.accepts(device_class):
            self._absent_since.setdefault(device_class, self._clock())
