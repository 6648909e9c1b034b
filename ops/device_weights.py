"""How much of its policy's traffic each device class should get now. Pure: the clock is given.

A class's factor is the product of what heat, memory, deaths and the balance between the classes
leave of it; 0 where no worker of it lives and another class has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mirror_sd.config import ProbeConfig
from ops.balance import Balance
from ops.readings import ClassReading
from ops.relief import Relief

# A memory that was full must fall by this before its class is trusted again.
_MEMORY_BAND = 0.05
_PCIE_HIGH = 0.85
_PCIE_LOW = 0.6


@dataclass(frozen=True, slots=True)
class Weights:
    """`factors` by class, 0..1. `health` is the factor without what only evens out the load: a
    class that is merely busy stays fit for what may not wait. `draft_factor` is how much of the
    usual drafting across devices the PCIe links leave room for. `causes` are those that hold a
    class back, by class."""

    factors: Mapping[str, float]
    health: Mapping[str, float]
    draft_factor: float
    causes: Mapping[str, tuple[str, ...]]


class DeviceWeights:
    """Call `update` with each reading, about once a second."""

    def __init__(self, classes: Iterable[str], config: ProbeConfig) -> None:
        self._heat = {name: Relief(config.hot_c, config.cool_c) for name in classes}
        full = config.memory_pressure
        self._memory = {name: Relief(full, full - _MEMORY_BAND) for name in self._heat}
        # Its workers are back: that is not yet to say that they will stay.
        self._absence = {name: Relief(1.0, 0.5) for name in self._heat}
        self._has_lived: set[str] = set()
        self._links = Relief(_PCIE_HIGH, _PCIE_LOW, floor=0.0)
        self._balance = Balance(config.utilisation_gap)
        self._hot_c = config.hot_c

    def update(self, now: float, readings: Mapping[str, ClassReading]) -> Weights:
        """`now` is monotonic, in seconds; a class without a reading counts as one without
        workers."""
        classes = {name: readings.get(name, ClassReading()) for name in self._heat}
        heat = {
            name: self._heat[name].update(now, self._temperature(r)) for name, r in classes.items()
        }
        memory = {
            name: self._memory[name].update(now, reading.device.memory_pressure)
            for name, reading in classes.items()
        }
        # A class that is relieved is less busy on purpose: not a gap to be closed.
        comparable = {
            name: reading.device.utilisation
            if reading.workers and heat[name] == memory[name] == 1.0
            else None
            for name, reading in classes.items()
        }
        balance = self._balance.update(now, comparable)
        absent = self._absent(classes)
        factors: dict[str, float] = {}
        health: dict[str, float] = {}
        causes: dict[str, tuple[str, ...]] = {}
        for name in classes:
            is_lost = name in absent and name in self._has_lived
            deaths = self._absence[name].update(now, float(is_lost))
            health[name] = 0.0 if name in absent else heat[name] * memory[name] * deaths
            factors[name] = health[name] * balance[name]
            parts = {"heat": heat[name], "memory": memory[name], "deaths": deaths}
            parts["balance"] = balance[name]
            why = tuple(part for part, value in parts.items() if value < 1.0)
            if name in absent or why:
                causes[name] = ("no live worker",) if name in absent else why
        links = [r.device.pcie for r in classes.values() if r.device.pcie is not None]
        draft_factor = self._links.update(now, max(links, default=None))
        return Weights(factors, health, draft_factor, causes)

    def _absent(self, classes: Mapping[str, ClassReading]) -> set[str]:
        """Classes without a live worker; none of them where no class has one."""
        alive = {name for name, reading in classes.items() if reading.workers}
        self._has_lived |= alive
        return set(classes) - alive if alive else set()

    def _temperature(self, reading: ClassReading) -> float | None:
        # A device that throttles itself is too hot, whatever its sensor says.
        known = reading.device.temperature_c
        if reading.device.is_throttled:
            return max(known or self._hot_c, self._hot_c)
        return known
