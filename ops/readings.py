"""What the probe knows at one moment. None means unknown: no sensor, or one that told nonsense."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from mirror_sd.scheduler.measurements import Traffic

# Outside of this a sensor is broken, not hot.
_COLDEST_C = -50.0
_HOTTEST_C = 150.0


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One class's devices: the hottest, the fullest, the busiest link; the mean utilisation.

    Shares are 0..1. `pcie` is the busier direction's share of what the link can carry.
    """

    temperature_c: float | None = None
    utilisation: float | None = None
    memory_pressure: float | None = None
    pcie: float | None = None
    is_throttled: bool = False


@dataclass(frozen=True, slots=True)
class ClassReading:
    """A device class: its devices, and its live workers as the broker counts them."""

    device: DeviceReading = DeviceReading()
    workers: int = 0
    slots: int = 0
    in_flight: int = 0
    waiting: int = 0
    emulated: bool = False


@dataclass(frozen=True, slots=True)
class ServiceReading:
    """How clients fare, over the last 10 s; `worker_restarts` of the last 10 minutes.

    `usual_p99_s` is the p99 of the class that the median token comes from. `latest_...` are the
    same over the last 4 s, None where those hold too few tokens. `traffic` is of the last 30 s.
    """

    inter_token_p99_s: float | None = None
    usual_p99_s: float | None = None
    rejection_rate: float | None = None
    latest_p99_s: float | None = None
    latest_usual_p99_s: float | None = None
    worker_restarts: Mapping[str, float] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)


@dataclass(frozen=True, slots=True)
class StackReading:
    """`at` is the probe's monotonic clock in seconds."""

    at: float
    classes: Mapping[str, ClassReading]
    service: ServiceReading = ServiceReading()

    @property
    def queue_pressure(self) -> float:
        """Requests for which there is no slot, for each slot of a live worker. One that waits while
        slots of its class are free is held back by the batch limit: that is no overload."""
        beyond = sum(
            max(item.waiting - max(item.slots - item.in_flight, 0), 0)
            for item in self.classes.values()
        )
        slots = sum(item.slots for item in self.classes.values())
        return beyond / max(slots, 1)


def share(value: object) -> float | None:
    """A number 0..1, None for anything else; what is above 1 by rounding is 1."""
    number = _number(value)
    if number is None or not 0 <= number <= 1.01:
        return None
    return min(number, 1.0)


def temperature(value: object) -> float | None:
    """A plausible temperature in degrees Celsius, None for anything else."""
    number = _number(value)
    return number if number is not None and _COLDEST_C <= number <= _HOTTEST_C else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def combine(readings: list[DeviceReading]) -> DeviceReading:
    """Several devices of one class as one."""
    return DeviceReading(
        temperature_c=_most([reading.temperature_c for reading in readings]),
        utilisation=_mean([reading.utilisation for reading in readings]),
        memory_pressure=_most([reading.memory_pressure for reading in readings]),
        pcie=_most([reading.pcie for reading in readings]),
        is_throttled=any(reading.is_throttled for reading in readings),
    )


def _most(values: list[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
