"""Profiles and demand from what a running stack tells of itself (`/admin/state`, `/metrics`).

What cannot be read counts as not told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mirror_sd.scheduler.class_shares import Demand
from mirror_sd.scheduler.device_profile import DeviceProfile, DrafterProfile

# Fewer requests say little of their average.
_FEWEST_REQUESTS = 10
# In the order of `Traffic`.
TRAFFIC_COUNTERS = (
    "mirror_gateway_requests_total",
    "mirror_gateway_prompt_tokens_total",
    "mirror_gateway_completion_tokens_total",
)
DRAFTER_PACE = "mirror_drafter_seconds_per_token"
_NO_CURVE = ((1, 1.0),)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counters of what was answered, all along or within a time."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    answer_tokens: float = 0.0

    def since(self, before: Traffic) -> Traffic:
        return Traffic(
            self.requests - before.requests,
            self.prompt_tokens - before.prompt_tokens,
            self.answer_tokens - before.answer_tokens,
        )


def is_answered(labels: Mapping[str, str]) -> bool:
    """Whether a counter with these labels counts for the traffic: requests that were refused have
    no tokens."""
    return labels.get("status", "200") == "200"


def traffic(totals: Mapping[str, float]) -> Traffic:
    """By the sums of `TRAFFIC_COUNTERS` over what `is_answered`."""
    return Traffic(*(totals.get(name, 0.0) for name in TRAFFIC_COUNTERS))


def profile(
    device_class: str,
    workers: Iterable[Mapping[str, Any]],
    expected: DeviceProfile | None = None,
) -> DeviceProfile | None:
    """Of a class by its live `workers`, as the state lists them. Where none tells its pace it is
    the `expected` one with the workers that are there, None without."""
    alive = [item for item in workers if item.get("device_class") == device_class]
    slots = max((_count(item.get("slots")) for item in alive), default=0)
    bare = DeviceProfile(device_class, _NO_CURVE, 1.0, max(slots, 1), len(alive))
    for item in alive:
        if (told := _pace(item.get("pace"))) is not None:
            with suppress(ValueError):
                return bare.measured(*told)
    if expected is None:
        return None
    return replace(expected, workers=len(alive), slots=slots or expected.slots)


def drafter(seconds_per_token: float, expected: DrafterProfile) -> DrafterProfile:
    """By what a drafted token took lately; the `expected` one where none was drafted yet."""
    if not 0 < seconds_per_token < math.inf:
        return expected
    return replace(expected, device=expected.device.at_pace(seconds_per_token))


def demand(
    edge: Mapping[str, Any], workers: Iterable[Mapping[str, Any]], traffic: Traffic
) -> Demand:
    """The load of this moment by the `edge` part of the state and the running sequences; how long
    requests are by `traffic`."""
    usual = Demand()
    in_flight: dict[str, int] = {}
    for item in workers:
        name = str(item.get("device_class"))
        in_flight[name] = in_flight.get(name, 0) + _count(item.get("in_flight"))
    rates = edge.get("qps")
    rate = _number(rates.get("all")) if isinstance(rates, Mapping) else None
    enough = traffic.requests >= _FEWEST_REQUESTS
    return Demand(
        requests_per_s=max(rate or 0.0, 0.0),
        prompt_tokens=max(traffic.prompt_tokens / traffic.requests, 1.0)
        if enough
        else usual.prompt_tokens,
        answer_tokens=max(traffic.answer_tokens / traffic.requests, 1.0)
        if enough
        else usual.answer_tokens,
        in_flight=in_flight,
    )


def _pace(told: object) -> tuple[list[tuple[int, float]], float] | None:
    if not isinstance(told, Mapping) or not isinstance(told.get("curve"), list):
        return None
    prefill_tok_s = _number(told.get("prefill_tok_s"))
    curve = []
    for point in told["curve"]:
        if not isinstance(point, list) or len(point) != 2:
            return None
        rows, seconds = _count(point[0]), _number(point[1])
        if not rows or seconds is None:
            return None
        curve.append((rows, seconds))
    return (curve, prefill_tok_s) if curve and prefill_tok_s else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
