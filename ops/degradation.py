"""The ladder of degradation: what is given up, step by step, while tokens come too slowly.

    0  nothing
    1  batches are not waited for, drafts are shorter
    2  and `max_tokens` of tier standard is capped
    3  and tier standard is refused with a 503

Steps 1 and 2 follow the latency of all tokens. Step 3 turns clients away, so it wants more: a
queue, since where nothing waits fewer requests would not make a slow device faster; and that the
classes which serve most tokens are slow themselves, since a small slow class, or the pauses of
displaced requests, are soon a hundredth of the tokens. Pure: the clock is given.
"""

from __future__ import annotations

from dataclasses import dataclass

from ops.readings import ServiceReading

HIGHEST = 3
# How long it must have been bad before each step up.
_CLIMB_AFTER_S = (3.0, 5.0, 10.0)
_SHED_PRESSURE = 1.0
# Calm is clearly below the limit, and for long, so that the relief itself does not end it.
_CALM_SHARE = 0.8
_CALM_PRESSURE = 0.5
_DESCEND_AFTER_S = 10.0
# From the step that turns clients away, half as long.
_READMIT_SHARE = 0.5
_LONGEST_DESCENT_S = 160.0
_RELAPSE_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Step:
    """A change of the level, with its reason in words."""

    before: int
    after: int
    reason: str


class DegradationLadder:
    """`level` 0..3; call `update` about once a second. `limit_s` bounds the p99 between tokens."""

    def __init__(self, limit_s: float) -> None:
        self.level = 0
        self._limit_s = limit_s
        self._bad_since: float | None = None
        self._calm_since: float | None = None
        self._descended_at: float | None = None
        self._descend_after_s = _DESCEND_AFTER_S

    def update(self, now: float, service: ServiceReading, queue_pressure: float) -> Step | None:
        """One step at most. A p99 that is None: too few tokens came to tell. `queue_pressure`:
        waiting requests for each slot."""
        p99_s = service.inter_token_p99_s
        latest_s = service.latest_p99_s
        # Over 10 s a device that has recovered looks slow for as long: no reason to climb.
        is_over = latest_s is not None and latest_s < self._limit_s * _CALM_SHARE
        is_bad = p99_s is not None and p99_s > self._limit_s and not is_over
        is_calm = self._is_calm(service, queue_pressure)
        self._bad_since = self._since(self._bad_since, now, is_bad)
        self._calm_since = self._since(self._calm_since, now, is_calm)
        if self._calm_since is not None and self.level > 0:
            return self._descend(now, now - self._calm_since)
        if self._bad_since is not None and p99_s is not None:
            is_due = self._is_due(now - self._bad_since, service, queue_pressure)
            return self._climb(now, p99_s, queue_pressure) if is_due else None
        return None

    def _is_calm(self, service: ServiceReading, pressure: float) -> bool:
        # The latest where it is known, so that what is over holds nothing up.
        calm_s = self._limit_s * _CALM_SHARE
        if self.level < HIGHEST:
            p99_s = _first_known(service.latest_p99_s, service.inter_token_p99_s)
            return p99_s is None or p99_s < calm_s
        # What did not justify this step does not hold it either.
        usual_s = _first_known(service.latest_usual_p99_s, service.usual_p99_s)
        return (usual_s is None or usual_s < calm_s) and pressure < _CALM_PRESSURE

    def _is_due(self, bad_s: float, service: ServiceReading, pressure: float) -> bool:
        if self.level == HIGHEST or bad_s < _CLIMB_AFTER_S[self.level]:
            return False
        if self.level + 1 < HIGHEST:
            return True
        is_usual_bad = service.usual_p99_s is not None and service.usual_p99_s > self._limit_s
        return is_usual_bad and pressure >= _SHED_PRESSURE

    def _climb(self, now: float, p99_s: float, pressure: float) -> Step:
        if self._descended_at is not None and now - self._descended_at <= _RELAPSE_WITHIN_S:
            self._descend_after_s = min(self._descend_after_s * 2, _LONGEST_DESCENT_S)
        elif self.level == 0:
            self._descend_after_s = _DESCEND_AFTER_S
        self._bad_since = now
        why = (
            f"p99 between tokens is {p99_s * 1000:.0f} ms, above {self._limit_s * 1000:.0f} ms, "
            f"and {pressure:.1f} requests wait for each slot"
        )
        return self._go(self.level + 1, why)

    def _descend(self, now: float, calm_s: float) -> Step | None:
        share = _READMIT_SHARE if self.level == HIGHEST else 1.0
        if calm_s < self._descend_after_s * share:
            return None
        self._calm_since = now
        self._descended_at = now
        return self._go(self.level - 1, f"calm for {calm_s:.0f} s")

    def _go(self, level: int, reason: str) -> Step:
        step = Step(self.level, level, reason)
        self.level = level
        return step

    @staticmethod
    def _since(since: float | None, now: float, is_so: bool) -> float | None:
        if not is_so:
            return None
        return now if since is None else since


def _first_known(latest: float | None, longer: float | None) -> float | None:
    return longer if latest is None else latest
