"""A factor that falls while something is too high and rises again when it is low.

What is relieved answers late (a chip cools for half a minute), so a factor that simply went back
to 1 would heat the device again, for ever. Three things prevent it: nothing moves between `low`
and `high`; the way back is a ramp; and a value that is high again within a quarter of an hour after
the way back began, or under a ceiling at all, sets a ceiling below the factor that was too much.
The ceiling is lifted slowly, after a pause that doubles with each such relapse.
"""

from __future__ import annotations

from dataclasses import dataclass

# Below `healthy_factor` of the policy: VIP requests leave a class that is relieved.
_CUT = 0.4
_CUT_AGAIN_S = 5.0
_RAMP_PER_S = 0.1
_RELAPSE_WITHIN_S = 900.0
_CEILING_CUT = 0.85
_CEILING_RAMP_PER_S = 0.005
_FIRST_PAUSE_S = 60.0
_LONGEST_PAUSE_S = 3600.0
# A sensor that stays silent no longer holds traffic back.
_FORGET_S = 10.0


@dataclass(slots=True)
class Relief:
    """Call `update` regularly. The factor is within `floor`..1; 1 is no relief.

    `high` and `low` are in the unit of the value, `low` below `high`.
    """

    high: float
    low: float
    floor: float = 0.1
    factor: float = 1.0
    _ceiling: float = 1.0
    _pause_s: float = _FIRST_PAUSE_S
    _updated_at: float | None = None
    _known_at: float | None = None
    _cut_at: float | None = None
    _risen_from: float | None = None
    _is_high: bool = False

    def update(self, now: float, value: float | None) -> float:
        """The factor from `now` on, monotonic seconds; None is a value that cannot be read."""
        elapsed_s = 0.0 if self._updated_at is None else max(now - self._updated_at, 0.0)
        self._updated_at = now
        if value is not None:
            self._known_at = now
        is_forgotten = self._known_at is None or now - self._known_at > _FORGET_S
        if value is not None and value >= self.high:
            self._cut(now)
        elif is_forgotten or (value is not None and value < self.low):
            self._rise(now, elapsed_s)
        return self.factor

    def _cut(self, now: float) -> None:
        is_relapse = (
            not self._is_high
            and self._risen_from is not None
            # Near its balance a device warms for minutes; under a ceiling it is one however late.
            and (self._ceiling < 1.0 or now - self._risen_from <= _RELAPSE_WITHIN_S)
        )
        if is_relapse:
            self._ceiling = max(self.factor * _CEILING_CUT, self.floor)
            self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)
        # Each cut gets time to show in the value before the next.
        if not self._is_high or self._cut_at is None or now - self._cut_at >= _CUT_AGAIN_S:
            self.factor = max(self.factor * _CUT, self.floor)
            self._cut_at = now
        self._is_high = True

    def _rise(self, now: float, elapsed_s: float) -> None:
        if self._is_high:
            self._is_high = False
            self._risen_from = now
        if self._cut_at is not None and now - self._cut_at > self._pause_s:
            self._ceiling = min(self._ceiling + _CEILING_RAMP_PER_S * elapsed_s, 1.0)
        self.factor = min(self.factor + _RAMP_PER_S * elapsed_s, self._ceiling)
