"""How fast a queue empties, and so how long one that joins it will wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class DrainRate:
    """From its last departures within a minute."""

    WINDOW_S = 60.0
    SAMPLES = 256
    BOUNDS_S = (1.0, 60.0)

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._departures: deque[float] = deque(maxlen=self.SAMPLES)

    def record(self) -> None:
        self._departures.append(self._clock())

    def forget(self) -> None:
        """The queue is empty: what leaves it from now on says how much comes, not how fast."""
        self._departures.clear()

    def seconds_for(self, requests: int) -> float:
        """Seconds until that many have left, within `BOUNDS_S`; the upper bound if none did."""
        shortest, longest = self.BOUNDS_S
        wait_s = self.wait_s(requests, evidence=1)
        return longest if wait_s is None else min(longest, max(shortest, wait_s))

    def wait_s(self, requests: int, evidence: int) -> float | None:
        """Seconds until that many have left; None if fewer than `evidence` did of late."""
        now = self._clock()
        while self._departures and now - self._departures[0] > self.WINDOW_S:
            self._departures.popleft()
        if len(self._departures) < evidence:
            return None
        span_s = max(now - self._departures[0], 1e-3)
        return requests * span_s / len(self._departures)
