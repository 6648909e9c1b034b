"""How clients fare, from the difference of two scrapes of `/metrics`."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from mirror_sd.scheduler import measurements
from mirror_sd.scheduler.measurements import Traffic
from ops.readings import ServiceReading

_GAPS = "mirror_gateway_inter_token_latency_seconds"
_DRAFTED = "mirror_worker_drafted_tokens_total"
_ACCEPTED = "mirror_worker_accepted_tokens_total"
_RESTARTS = "mirror_pool_worker_restarts_total"
WANTED = (f"{_GAPS}_bucket", _DRAFTED, _ACCEPTED, _RESTARTS, *measurements.TRAFFIC_COUNTERS)

# Where 10 s hold too few gaps for a quantile, three times as long may do.
_LATENCY_WINDOW_S = 10.0
_LONG_WINDOW_S = 30.0
# Two scrapes: what a device does now that was slow a moment ago.
_LATEST_WINDOW_S = 4.0
_RESTART_WINDOW_S = 600.0
# Fewer say nothing about a hundredth of them, or about a share.
_FEWEST_GAPS = 100
# And with fewer than these in the last 10 s nothing is served any more.
_FEWEST_RECENT_GAPS = 10
_FEWEST_DRAFTED = 200


@dataclass(frozen=True, slots=True)
class Counts:
    """The counters of one scrape. `gaps`: by class, tokens that came within each bound, by it."""

    gaps: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    drafted: float = 0.0
    accepted: float = 0.0
    restarts: Mapping[str, float] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)


def parse(text: str) -> Counts:
    """The counters in a scrape; raises `ValueError` where it cannot be read."""
    # A few families of forty: reading the others as well takes ten times as long.
    lines = [line for line in text.splitlines() if line.startswith(WANTED)]
    gaps: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    totals: dict[str, float] = defaultdict(float)
    restarts: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        for sample in family.samples:
            if not math.isfinite(sample.value):
                raise ValueError(f"{sample.name} is {sample.value}")
            if sample.name == f"{_GAPS}_bucket":
                gaps[sample.labels["class"]][float(sample.labels["le"])] += sample.value
            elif sample.name == _RESTARTS:
                restarts[sample.labels["class"]] += sample.value
            elif measurements.is_answered(sample.labels):
                totals[sample.name] += sample.value
    traffic = measurements.traffic(totals)
    return Counts(gaps, totals[_DRAFTED], totals[_ACCEPTED], restarts, traffic)


class ServiceWindow:
    """Keeps the scrapes of ten minutes, one a second at first, then thinner."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, Counts]] = deque()
        self._old: deque[tuple[float, Mapping[str, float]]] = deque()

    def add(self, now: float, counts: Counts) -> None:
        """`now` is monotonic, in seconds."""
        if self._recent and counts.drafted < self._recent[-1][1].drafted:
            # Counters that fall are another stack's.
            self._recent.clear()
            self._old.clear()
        self._recent.append((now, counts))
        while self._recent[0][0] < now - _LONG_WINDOW_S:
            self._recent.popleft()
        if not self._old or now - self._old[-1][0] >= 10.0:
            self._old.append((now, counts.restarts))
        while self._old[0][0] < now - _RESTART_WINDOW_S:
            self._old.popleft()

    def reading(self, now: float) -> ServiceReading:
        """What is known at `now`; nothing where the last scrape is too old."""
        if not self._recent or now - self._recent[-1][0] > _LATENCY_WINDOW_S:
            return ServiceReading()
        latest = self._recent[-1][1]
        first = self._recent[0][1]
        gaps = _since(self._at(now - _LATENCY_WINDOW_S), latest)
        if _FEWEST_RECENT_GAPS <= _count(_sum(gaps)) < _FEWEST_GAPS:
            gaps = _since(first, latest)
        now_gaps = _since(self._at(now - _LATEST_WINDOW_S), latest)
        drafted = latest.drafted - first.drafted
        accepted = latest.accepted - first.accepted
        restarts = self._old[0][1]
        return ServiceReading(
            inter_token_p99_s=quantile(0.99, _sum(gaps)),
            usual_p99_s=usual_p99_s(gaps),
            latest_p99_s=quantile(0.99, _sum(now_gaps)),
            latest_usual_p99_s=usual_p99_s(now_gaps),
            rejection_rate=1.0 - min(max(accepted / drafted, 0.0), 1.0)
            if drafted >= _FEWEST_DRAFTED
            else None,
            traffic=latest.traffic.since(first.traffic),
            worker_restarts={
                name: count - restarts.get(name, 0.0) for name, count in latest.restarts.items()
            },
        )

    def _at(self, when: float) -> Counts:
        """The last scrape not later than `when`, else the first one."""
        found = self._recent[0][1]
        for at, counts in self._recent:
            if at > when:
                break
            found = counts
        return found


def usual_p99_s(gaps: Mapping[str, Mapping[float, float]]) -> float | None:
    """The p99 of the class that the median token came from, classes in the order of their p99;
    classes with too few gaps left out, None where all are."""
    known = []
    for counts in gaps.values():
        p99_s = quantile(0.99, counts)
        if p99_s is not None:
            known.append((p99_s, _count(counts)))
    half, passed = sum(count for _, count in known) / 2, 0.0
    for p99_s, count in sorted(known):
        passed += count
        if passed >= half:
            return p99_s
    return None


def _since(before: Counts, after: Counts) -> dict[str, dict[float, float]]:
    """The gaps between two scrapes, by class and bound."""
    return {
        name: {
            bound: count - before.gaps.get(name, {}).get(bound, 0.0)
            for bound, count in counts.items()
        }
        for name, counts in after.gaps.items()
    }


def _sum(gaps: Mapping[str, Mapping[float, float]]) -> dict[float, float]:
    total: dict[float, float] = defaultdict(float)
    for counts in gaps.values():
        for bound, count in counts.items():
            total[bound] += count
    return total


def _count(counts: Mapping[float, float]) -> float:
    return max(counts.values(), default=0.0)


def quantile(share: float, cumulative: Mapping[float, float]) -> float | None:
    """As PromQL's histogram_quantile: linear within a bucket, the last finite bound at most; None
    where fewer than 100 were counted."""
    bounds = sorted(cumulative)
    if not bounds or cumulative[bounds[-1]] < _FEWEST_GAPS:
        return None
    rank = share * cumulative[bounds[-1]]
    return _interpolate(rank, [(bound, cumulative[bound]) for bound in bounds])


def _interpolate(rank: float, buckets: Iterable[tuple[float, float]]) -> float:
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if math.isinf(bound) or count <= below:
                return low
            return low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low
