"""What a forward of so many rows costs, and a pass of the draft head, learned while serving.

The time of a forward is a line through knots. Each step moves the knots beside its number of rows
towards what it took, and all others a little in proportion: a device that has become slower has
become so for every number of rows.
"""

from __future__ import annotations

from bisect import bisect_right

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
# Of these the worker tells its stack.
_TOLD = (1, 2, 4, 8, 16, 32, 64)


class VerifyCost:
    """Seconds of a step by the rows of its forward."""

    def __init__(self) -> None:
        self._seconds = [0.0] * len(_KNOTS)
        self._seen = [0] * len(_KNOTS)
        self._table: list[float] = []
        self._observed = 0

    @property
    def is_known(self) -> bool:
        return self._observed > 0

    def observe(self, rows: int, seconds: float) -> None:
        rows = min(max(rows, 1), _KNOTS[-1])
        above = min(bisect_right(_KNOTS, rows), len(_KNOTS) - 1)
        below = above - 1
        share = (rows - _KNOTS[below]) / (_KNOTS[above] - _KNOTS[below])
        near = below if share < 0.5 else above
        if self._seen[near] == 0:
            self._seconds[near] = seconds
        else:
            expected = self._seconds[near]
            seconds = min(seconds, expected * _OUTLIER)
            gain = max(_SLOWEST_GAIN, 1.0 / (self._seen[near] + 1))
            self._drift(near, 1.0 + _DRIFT * (seconds / expected - 1.0) if expected > 0 else 1.0)
            self._seconds[near] += gain * (seconds - expected)
        is_new = self._seen[near] == 0
        self._seen[near] += 1
        self._observed += 1
        if is_new or self._observed % _REFRESH_EVERY == 0:
            self._table = []

    def _drift(self, near: int, factor: float) -> None:
        if abs(factor - 1.0) < 1e-4:
            return
        for knot, seen in enumerate(self._seen):
            if seen and knot != near:
                self._seconds[knot] *= factor

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
        knots = [knot for knot, seen in zip(_KNOTS, self._seen, strict=True) if seen]
        times = [t for t, seen in zip(self._seconds, self._seen, strict=True) if seen]
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
        self._seconds: dict[int, tuple[float, int]] = {}

    def observe(self, sequences: int, passes: int, seconds: float) -> None:
        bucket = sequences.bit_length()
        mean, count = self._seconds.get(bucket, (0.0, 0))
        value = seconds / passes
        if count:
            value = min(value, mean * _OUTLIER)
        count += 1
        self._seconds[bucket] = (mean + max(0.06, 1.0 / count) * (value - mean), count)

    def seconds(self, sequences: int) -> float:
        bucket = sequences.bit_length()
        if bucket in self._seconds:
            return self._seconds[bucket][0]
        below = [known for known in self._seconds if known < bucket]
        if below:
            return self._seconds[max(below)][0] * 1.3 ** (bucket - max(below))
        if self._seconds:
            return min(mean for mean, _ in self._seconds.values())
        return self._guess
