"""Factors that move traffic from the busiest class to the least busy one.

An integrating rule with a dead band: while the gap is within the limit nothing moves, so factors
that have closed the gap stay. Utilisation answers late to a move, so moves are small and rare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

_EVERY_S = 2.0
_SMOOTHING_S = 2.0
_GAIN = 0.3
_LARGEST_STEP = 0.15
_FLOOR = 0.25
# Below this no class is busy, and what was learnt about another load fades.
_IDLE = 0.2
_FADE_PER_S = 0.01


class Balance:
    """Factors within 0.25..1 by class; `gap` is the difference of utilisation, 0..1, that acts."""

    def __init__(self, gap: float) -> None:
        self._gap = gap
        self.factors: dict[str, float] = {}
        self._smoothed: dict[str, float] = {}
        self._updated_at: float | None = None
        self._moved_at = -math.inf

    def update(self, now: float, utilisation: Mapping[str, float | None]) -> Mapping[str, float]:
        """Take the classes' utilisation, 0..1, at `now`; None leaves a class out."""
        elapsed_s = 0.0 if self._updated_at is None else max(now - self._updated_at, 0.0)
        self._updated_at = now
        self._smooth(elapsed_s, utilisation)
        for name in utilisation:
            self.factors.setdefault(name, 1.0)
        if len(self._smoothed) >= 2 and now - self._moved_at >= _EVERY_S:
            self._move(now)
        if max(self._smoothed.values(), default=0.0) < _IDLE:
            for name, factor in self.factors.items():
                self.factors[name] = min(factor + _FADE_PER_S * elapsed_s, 1.0)
        return self.factors

    def _smooth(self, elapsed_s: float, utilisation: Mapping[str, float | None]) -> None:
        weight = 1.0 - math.exp(-elapsed_s / _SMOOTHING_S)
        smoothed = {}
        for name, value in utilisation.items():
            if value is not None:
                before = self._smoothed.get(name, value)
                smoothed[name] = before + weight * (value - before)
        self._smoothed = smoothed

    def _move(self, now: float) -> None:
        busiest = max(self._smoothed, key=lambda name: self._smoothed[name])
        idlest = min(self._smoothed, key=lambda name: self._smoothed[name])
        spread = self._smoothed[busiest] - self._smoothed[idlest]
        if spread <= self._gap:
            return
        self._moved_at = now
        step = min(_GAIN * (spread - self._gap / 2), _LARGEST_STEP)
        if self.factors[idlest] < 1.0:
            self.factors[idlest] = min(self.factors[idlest] * (1.0 + step), 1.0)
        else:
            self.factors[busiest] = max(self.factors[busiest] * (1.0 - step), _FLOOR)
