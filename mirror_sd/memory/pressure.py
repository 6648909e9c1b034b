"""What a pool of KV blocks does when the memory of its device runs short: first it gives up cached
prefixes, then sequences of low priority give up theirs."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

# The level falls only when so much less is used than what it rose at.
_HYSTERESIS = 0.03
_EVERY_S = 1.0


class Level(Enum):
    """How short memory is."""

    CALM = 0
    SHED = 1
    PREEMPT = 2


class MemoryPressure:
    """`read` gives the used share of the device's memory, None where it cannot be told. It is
    asked once a second at most. Cached prefixes go from `shed_above` on, sequences from half-way
    between there and all."""

    def __init__(
        self,
        shed_above: float,
        read: Callable[[], float | None],
        clock: Callable[[], float],
    ) -> None:
        self._rises = {Level.SHED: shed_above, Level.PREEMPT: (1.0 + shed_above) / 2}
        self._read = read
        self._clock = clock
        self._next = float("-inf")
        self.level = Level.CALM

    def look(self) -> Level | None:
        """The level now; None where it is too early to look again."""
        now = self._clock()
        if now < self._next:
            return None
        self._next = now + _EVERY_S
        used = self._read()
        self.level = Level.CALM if used is None else self._level(used)
        return self.level

    def _level(self, used: float) -> Level:
        found = Level.CALM
        for level, rise in self._rises.items():
            holds = level.value <= self.level.value and used >= rise - _HYSTERESIS
            if used >= rise or holds:
                found = level
        return found
