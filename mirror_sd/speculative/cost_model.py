"""What a forward of so many rows costs, and a pass of the draft head, learned while serving.

The time of a forward is a line through knots. Each step moves the knots beside its number of rows
towards what it took, and all others a little in proportion: a device that has become slower has
become so for every number of rows.

What looks dear is not chosen, and so is not read again. A single slow reading must therefore not
decide: a knot counts from its second reading on, and one that was read a few times only is given up
when it has not been read for long.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from mirror_sd.messages import Pace

_KNOTS = (
    *range(1, 11), 12, 14, 16, 17, 20, 24, 28, 32, 33, 40, 48, 56, 64, 65, 80, 96, 128, 192, 256,
    512, 1024,
)  # fmt: skip
MOST_ROWS: int = _KNOTS[-1]
# Growth a row that is expected where nothing was measured: low, so that it gets measured.
_GROWTH = 0.01
_SLOWEST_GAIN, _DRIFT = 0.06, 0.03
# A step that took longer than this many times what was expected met something else.
_OUTLIER = 2.0
_REFRESH_EVERY = 8
# A knot with fewer readings is given up after so many steps without one.
_SURE_AFTER, _GIVEN_UP_AFTER = 8, 1000
# Of these the worker tells its stack.
_TOLD = (1, 2, 4, 8, 16, 32, 64)


@dataclass(slots=True)
class _Knot:
    """`seconds` of so many rows, or sequences; 0 readings: not known. `measured`: before the first
    request, 0 where it was not."""

    seconds: float = 0.0
    readings: int = 0
    measured: float = 0.0
    first: float | None = None
    read_at: int = 0

    def measure(self, seconds: float) -> None:
        self.seconds, self.readings, self.measured = seconds, 1, seconds

    def read(self, seconds: float) -> None:
        if self.readings:
            self.readings += 1
            seconds = min(seconds, self.seconds * _OUTLIER)
            gain = max(_SLOWEST_GAIN, 1.0 / self.readings)
            self.seconds += gain * (seconds - self.seconds)
        elif self.first is None:
            self.first = seconds
        else:
            self.seconds, self.readings = min(self.first, seconds), 1

    def scale(self, factor: float) -> None:
        self.seconds *= factor
        self.measured *= factor

    def give_up(self) -> None:
        """Go back to what was measured, or to the next reading."""
        self.first = self.seconds
        self.seconds, self.readings = self.measured, int(self.measured > 0)


class VerifyCost:
    """Seconds of a step by the rows of its forward."""

    def __init__(self) -> None:
        self._knots = [_Knot() for _ in _KNOTS]
        self._table: list[float] = []
        self._observed = 0

    @property
    def is_known(self) -> bool:
        return any(knot.readings for knot in self._knots)

    def measure(self, rows: int, seconds: float) -> None:
        """The quickest of several forwards, before the first request."""
        if seconds > 0:
            self._near(rows).measure(seconds)
            self._table = []

    def observe(self, rows: int, seconds: float) -> None:
        """A step that served. A clock too coarse for it tells nothing."""
        if seconds <= 0:
            return
        near = self._near(rows)
        was_known = near.readings > 0
        if was_known:
            self._drift(near, 1.0 + _DRIFT * (min(seconds / near.seconds, _OUTLIER) - 1.0))
        near.read(seconds)
        self._observed += 1
        near.read_at = self._observed
        if was_known != (near.readings > 0) or self._observed % _REFRESH_EVERY == 0:
            self._give_up_stale()
            self._table = []

    def _near(self, rows: int) -> _Knot:
        rows = min(max(rows, 1), _KNOTS[-1])
        above = min(bisect_right(_KNOTS, rows), len(_KNOTS) - 1)
        below = above - 1
        share = (rows - _KNOTS[below]) / (_KNOTS[above] - _KNOTS[below])
        return self._knots[below if share < 0.5 else above]

    def _drift(self, near: _Knot, factor: float) -> None:
        if abs(factor - 1.0) < 1e-4:
            return
        for knot in self._knots:
            if knot is not near:
                knot.scale(factor)

    def _give_up_stale(self) -> None:
        for knot in self._knots:
            is_stale = self._observed - knot.read_at > _GIVEN_UP_AFTER
            if is_stale and 0 < knot.readings < _SURE_AFTER:
                knot.give_up()

    def seconds(self, rows: int) -> float:
        """Of a forward of `rows`; 0 before anything was measured."""
        table = self.table()
        return table[min(rows, MOST_ROWS)]

    def pace(self, chunk: int) -> Pace | None:
        """For the plan of the stack; `chunk`: prompt tokens in a forward. None before anything was
        measured."""
        if not self.is_known:
            return None
        table, chunk = self.table(), min(chunk, MOST_ROWS)
        curve = tuple((rows, table[rows]) for rows in _TOLD)
        return Pace(curve=curve, prefill_tok_s=chunk / table[chunk]) if curve[0][1] > 0 else None

    def table(self) -> list[float]:
        """[1025] seconds by rows, never falling."""
        if not self._table:
            self._table = self._interpolated()
        return self._table

    def _interpolated(self) -> list[float]:
        known = [(at, k.seconds) for at, k in zip(_KNOTS, self._knots, strict=True) if k.readings]
        knots, times = [at for at, _ in known], [seconds for _, seconds in known]
        if not knots:
            return [0.0] * (_KNOTS[-1] + 1)
        first, last = knots[0], knots[-1]
        at = np.arange(_KNOTS[-1] + 1, dtype=np.float64)
        line = np.interp(at, knots, times)
        # Beyond what was measured a row costs as on the way there, at least a little.
        slope = (times[-1] - times[0]) / (last - first) if last > first else 0.0
        slope = max(slope, _GROWTH * times[-1] / max(last, 8))
        line[last:] += slope * (at[last:] - last)
        # Fewer rows are expected to cost as little as may be, so that they are tried.
        steep = (times[1] - times[0]) / (knots[1] - first) if len(knots) > 1 else 0.0
        steep = max(steep, _GROWTH * times[0])
        line[:first] = np.maximum(times[0] - steep * (first - at[:first]), 0.5 * times[0])
        table: list[float] = np.maximum.accumulate(line).tolist()
        return table


class PassCost:
    """Seconds of one pass of the draft head by the sequences in it."""

    def __init__(self, guess_s: float) -> None:
        self._guess = guess_s
        # By the bits of the number of sequences.
        self._knots: dict[int, _Knot] = {}

    def measure(self, sequences: int, seconds: float) -> None:
        """The quickest of several passes, before the first request."""
        if seconds > 0:
            self._knot(sequences).measure(seconds)

    def observe(self, sequences: int, passes: int, seconds: float) -> None:
        """A call that served. A clock too coarse for it tells nothing."""
        if seconds > 0:
            self._knot(sequences).read(seconds / passes)

    def _knot(self, sequences: int) -> _Knot:
        return self._knots.setdefault(sequences.bit_length(), _Knot())

    def seconds(self, sequences: int) -> float:
        bucket = sequences.bit_length()
        known = sorted((at, k.seconds) for at, k in self._knots.items() if k.readings)
        if not known:
            return self._guess
        below = [(at, seconds) for at, seconds in known if at <= bucket]
        if not below:
            return min(seconds for _, seconds in known)
        before, at_most = below[0][0], below[0][1]
        for at, seconds in below:
            # Twice the sequences never take more than two passes: what says so was disturbed.
            at_most, before = min(seconds, at_most * 2.0 ** (at - before)), at
        return at_most * 1.3 ** (bucket - before)
