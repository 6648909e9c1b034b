"""How many tokens to draft."""

from __future__ import annotations

from collections import deque


class WindowController:
    """The window rule: over the last `window` rounds, mean acceptance above `grow_above` adds 2,
    else subtracts 1, within bounds. One per sequence."""

    def __init__(
        self, *, minimum: int, maximum: int, initial: int, window: int, grow_above: float
    ) -> None:
        if not 0 <= minimum <= maximum:
            raise ValueError(f"draft length bounds {minimum}..{maximum} are out of order")
        self._minimum, self._maximum = minimum, maximum
        self._grow_above = grow_above
        self._rounds: deque[float] = deque(maxlen=window)
        self.length = min(max(initial, minimum), maximum)

    def trust(self) -> None:
        """Begin at the longest draft: there is reason to expect that it is accepted."""
        self.length = self._maximum

    def observe(self, drafted: int, accepted: int) -> None:
        """Take in one round; a round without a draft says nothing and is left out."""
        if drafted == 0:
            return
        self._rounds.append(accepted / drafted)
        mean = sum(self._rounds) / len(self._rounds)
        step = 2 if mean > self._grow_above else -1
        self.length = min(max(self.length + step, self._minimum), self._maximum)
