"""Shares of the classes by what their devices measured, for the edge to go by in place of its
policy's (`scheduler.split`)."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mirror_sd.scheduler import measurements
from mirror_sd.scheduler.measurements import Traffic
from mirror_sd.scheduler.splitter import DynamicSplitter, Factors, Split

_log = logging.getLogger(__name__)

# Shares move towards a new plan in this time: one that answers each gust would swing.
_SMOOTHING_S = 3.0
# A class that got nothing would measure nothing, and never be seen to have become quick again.
_LEAST_SHARE = 0.01


class ClassSplit:
    """Call `update` with each reading. `splits`, for the weight document, is None while a class
    with workers has not been measured: then the edge goes by its policy."""

    def __init__(self, classes: Sequence[str]) -> None:
        self._classes = tuple(classes)
        self._shares: list[Mapping[str, float]] | None = None
        self._updated_at = 0.0
        self._unknown: tuple[str, ...] = ()

    def update(
        self,
        now: float,
        state: Mapping[str, Any],
        traffic: Traffic,
        health: Mapping[str, float],
    ) -> list[dict[str, Any]] | None:
        """`now` is monotonic, in seconds; `state` that of `/admin/state`; `traffic` what was
        answered lately; `health` by class, without what only evens out the load."""
        listed = state.get("workers")
        workers = [item for item in listed if isinstance(item, Mapping)] if listed else []
        there = {str(item.get("device_class")) for item in workers}
        found = {name: measurements.profile(name, workers) for name in self._classes}
        devices = [device for device in found.values() if device is not None]
        self._note(tuple(name for name in self._classes if name in there and not found[name]))
        if self._unknown or not devices:
            self._shares = None
            return None
        edge = state.get("edge")
        demand = measurements.demand(edge if isinstance(edge, Mapping) else {}, workers, traffic)
        plan = DynamicSplitter(devices).plan(demand, Factors(health))
        alive = {d.device_class for d in devices if d.workers and health.get(d.device_class, 1.0)}
        return self._smoothed(now, plan.splits, alive)

    def _smoothed(
        self, now: float, splits: Sequence[Split], alive: Collection[str]
    ) -> list[dict[str, Any]]:
        weight = 1.0
        if self._shares is not None:
            weight = 1.0 - math.exp(-max(now - self._updated_at, 0.0) / _SMOOTHING_S)
        before = self._shares or [split.shares for split in splits]
        self._updated_at = now
        self._shares = [
            _between(old, split.shares, weight, alive)
            for old, split in zip(before, splits, strict=True)
        ]
        return [
            {
                **({} if split.below is None else {"below": split.below}),
                "shares": {name: round(share, 4) for name, share in shares.items()},
            }
            for split, shares in zip(splits, self._shares, strict=True)
        ]

    def _note(self, unknown: tuple[str, ...]) -> None:
        if unknown != self._unknown:
            self._unknown = unknown
            if unknown:
                _log.warning(
                    "no shares are measured, the policy holds: %s tells no pace", ", ".join(unknown)
                )
            else:
                _log.info("shares go by what all classes measured")


def _between(
    old: Mapping[str, float], new: Mapping[str, float], weight: float, alive: Collection[str]
) -> Mapping[str, float]:
    """`weight` of the way from old to new shares, a little for each class that is alive; what one
    that has gone leaves is taken over at once."""
    mixed = {
        name: max((1.0 - weight) * old.get(name, 0.0) + weight * share, _LEAST_SHARE)
        for name, share in new.items()
        if name in alive
    }
    if not mixed:
        return new
    total = sum(mixed.values())
    return {name: mixed.get(name, 0.0) / total for name in new}
