"""What share of the requests each class gets, by the length of their prompts.

Requests are dealt out in small parts, each to the class where it adds least to the time that all
requests take together, its own and that by which it holds up the others. So the quickest class
takes all while it has room, and at full load all classes fill up at once: shares are then those of
what they can answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mirror_sd.scheduler.device_profile import DeviceProfile

# Parts that the requests are dealt out in.
_PARTS = 50
# Without any load a plan is still for somebody, and a class is never planned to be quite full.
_LEAST_LOAD, _MOST_LOAD = 0.02, 0.95


@dataclass(frozen=True, slots=True)
class Demand:
    """`requests_per_s` of `prompt_tokens` and `answer_tokens` on average. `in_flight`: sequences
    that a class runs now, where that is known."""

    requests_per_s: float = 0.0
    prompt_tokens: float = 200.0
    answer_tokens: float = 128.0
    in_flight: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Split:
    """Shares, which add up to 1, of the requests with fewer than `below` prompt tokens (and not
    fewer than the split before); planned for `prompt_tokens`."""

    below: int | None
    prompt_tokens: int
    shares: Mapping[str, float]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Service:
    """One class and one kind of request."""

    device: DeviceProfile
    prompt_tokens: float
    answer_tokens: float

    @property
    def per_s(self) -> float:
        """Requests a second with every slot taken."""
        device = self.device
        decode_s = self.answer_tokens * device.step_s(device.slots) / device.slots
        busy_s = self.prompt_tokens / device.prefill_tok_s + decode_s
        return device.workers / busy_s

    def seconds(self, used: float) -> float:
        """Of one request, waiting included, where the share `used` of the class is in use."""
        device = self.device
        streams = max(used * device.slots, 1.0)
        own = self.prompt_tokens / device.prefill_tok_s
        own += self.answer_tokens * device.step_s(streams)
        # Sakasegawa's approximation for a queue before so many places.
        places = max(device.slots * device.workers, 1)
        used = min(used, 0.999)
        waits = math.pow(used, math.sqrt(2 * (places + 1))) / (places * (1.0 - used))
        return own * (1.0 + waits)


def load(devices: Sequence[DeviceProfile], demand: Demand) -> float:
    """Requests asked for, by those that all classes together can answer."""
    possible = sum(
        _Service(device, demand.prompt_tokens, demand.answer_tokens).per_s for device in devices
    )
    return demand.requests_per_s / possible if possible > 0 else 0.0


def splits(
    devices: Sequence[DeviceProfile],
    demand: Demand,
    health: Mapping[str, float],
    bounds: Sequence[int],
) -> tuple[Split, ...]:
    """One for each of the rising `bounds` and one for what is longer; each as if all requests were
    of that length and asked for the same part of what can be answered."""
    asked = min(max(load(devices, demand), _LEAST_LOAD), _MOST_LOAD)
    result, floor = [], 0
    for below in (*bounds, None):
        tokens = _typical(floor, below)
        services = [_Service(device, tokens, demand.answer_tokens) for device in devices]
        shares, notes = _held_back(services, asked, health)
        reasons = (_speeds(services), *notes)
        result.append(Split(below, tokens, shares, reasons))
        floor = below or floor
    return tuple(result)


def _typical(floor: int, below: int | None) -> int:
    if below is None:
        return max(2 * floor, 1)
    return max(round(math.sqrt(floor * below)) if floor else below // 2, 1)


def _held_back(
    services: Sequence[_Service], asked: float, health: Mapping[str, float]
) -> tuple[Mapping[str, float], list[str]]:
    """Shares where no class gets more than the probe leaves of the share that it would have."""
    free = _deal(services, asked, {})
    factors = {
        service.device.device_class: health.get(service.device.device_class, 1.0)
        for service in services
        if service.per_s > 0
    }
    best = max(factors.values(), default=0.0)
    if best <= 0 or min(factors.values()) == best:
        return free, []
    limits = {name: free[name] * factor / best for name, factor in factors.items() if factor < best}
    notes = [
        f"the probe leaves {name} {factors[name]:.2f} of its share of {100 * free[name]:.0f} %"
        for name, limit in limits.items()
        if limit < free[name]
    ]
    return _deal(services, asked, limits), notes


def _deal(
    services: Sequence[_Service], asked: float, limits: Mapping[str, float]
) -> dict[str, float]:
    """Shares that add up to 1; `limits`: the most of some. `asked`: part of all that can be
    answered."""
    names = [service.device.device_class for service in services]
    per_s = [service.per_s for service in services]
    part = asked * sum(per_s) / _PARTS
    total_s = [0.0] * len(services)
    counts = [0] * len(services)
    most = [limits.get(name, 1.0) * _PARTS for name in names]
    for _ in range(_PARTS):
        best, least, taken_s = None, float("inf"), 0.0
        for index, service in enumerate(services):
            if per_s[index] <= 0 or counts[index] + 1 > most[index] + 0.5:
                continue
            rate = (counts[index] + 1) * part
            used = rate / per_s[index]
            # Beyond what a class can answer its queue would only grow.
            seconds = rate * service.seconds(used) * (1.0 if used < 1.0 else 1e3 * used)
            added = seconds - total_s[index]
            if added < least:
                best, least, taken_s = index, added, seconds
        if best is None:
            break
        counts[best] += 1
        total_s[best] = taken_s
    dealt = sum(counts)
    if not dealt:  # no class has a worker: they are all as good
        return {name: 1.0 / len(names) for name in names}
    return {name: count / dealt for name, count in zip(names, counts, strict=True)}


def _speeds(services: Sequence[_Service]) -> str:
    parts = [
        f"{service.device.device_class} {service.seconds(0.0):.2f} s, {service.per_s:.1f} a second"
        if service.per_s > 0
        else f"{service.device.device_class} has no worker"
        for service in services
    ]
    return "a request alone, and how many at full load: " + "; ".join(parts)
