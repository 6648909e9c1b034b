"""The tokens of one request in the metrics.

A write to the shared metrics costs more than turning the token into text (6 us against 2, with the
two system calls by which prometheus_client looks for a fork), so a request counts for itself and
writes now and then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache

from prometheus_client import Counter, Histogram

from mirror_sd import telemetry

_FLUSH_S = 1.0


class Tally:
    """Observations of `histogram` that it is told at `flush`; labels must be bound."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._counts = [0] * len(histogram._upper_bounds)
        self._sum = 0.0

    def observe(self, value: float, times: int) -> None:
        """As `times` calls of the histogram's own `observe`."""
        self._counts[bisect_left(self._histogram._upper_bounds, value)] += times
        self._sum += value * times

    def flush(self) -> None:
        for index, count in enumerate(self._counts):
            if count:
                self._histogram._buckets[index].inc(count)
                self._counts[index] = 0
        if self._sum:
            self._histogram._sum.inc(self._sum)
            self._sum = 0.0


@lru_cache(maxsize=64)
def _metrics_of(device_class: str, tier: str) -> tuple[Histogram, Counter, Histogram]:
    return (
        telemetry.TIME_TO_FIRST_TOKEN.labels(device_class, tier),
        telemetry.COMPLETION_TOKENS.labels(device_class),
        telemetry.INTER_TOKEN_LATENCY.labels(device_class, tier),
    )


class TokenMeter:
    """Counts what comes for a request that arrived at `arrived_at` on `clock`."""

    def __init__(
        self, device_class: str, tier: str, arrived_at: float, clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._arrived_at = arrived_at
        self._first, self._delivered, gaps = _metrics_of(device_class, tier)
        self._gaps = Tally(gaps)
        self._tokens = 0
        self._is_begun = False
        self._flushed_at = arrived_at

    def arrived(self, tokens: int, last_at: float | None) -> float:
        """Tokens of a sequence came now; `last_at` is when its previous ones did. Returns now."""
        now = self._clock()
        if not self._is_begun:
            self._is_begun = True
            self._first.observe(now - self._arrived_at)
        if last_at is not None and tokens:
            self._gaps.observe((now - last_at) / tokens, tokens)
        if now - self._flushed_at >= _FLUSH_S:
            self._flushed_at = now
            self.flush()
        return now

    def delivered(self, tokens: int) -> None:
        """Tokens became text of the answer."""
        self._tokens += tokens

    def flush(self) -> None:
        """Write what is not yet written; call it at the end."""
        if self._tokens:
            self._delivered.inc(self._tokens)
            self._tokens = 0
        self._gaps.flush()
