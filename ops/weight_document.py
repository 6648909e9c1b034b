"""The document that the edge weighs its classes by, each second."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ops.device_weights import Weights
from ops.readings import ClassReading

VERSION = 1


def weight_document(
    unix_now: float,
    weights: Weights,
    readings: Mapping[str, ClassReading],
    degrade_level: int,
    splits: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """What is unknown is left out, so that no number stands for it. `at` is unix time in seconds.
    `splits`: measured shares by prompt length, where the edge is to go by them.

    Raises `ValueError` for a factor that is none: better no document than a wrong one.
    """
    for name, factor in (*weights.factors.items(), ("draft_factor", weights.draft_factor)):
        if not math.isfinite(factor) or not 0.0 <= factor <= 1.0:
            raise ValueError(f"the factor of {name} is {factor}")
    return {
        "version": VERSION,
        "at": round(unix_now, 3),
        "classes": {
            name: _entry(factor, weights.health[name], readings.get(name, ClassReading()))
            for name, factor in weights.factors.items()
        },
        "degrade_level": degrade_level,
        "draft_factor": round(weights.draft_factor, 4),
        **({} if splits is None else {"splits": list(splits)}),
    }


def _entry(factor: float, health: float, reading: ClassReading) -> dict[str, Any]:
    known = {
        "factor": round(factor, 4),
        "health": round(health, 4),
        "utilisation": reading.device.utilisation,
        "temperature_c": reading.device.temperature_c,
        "memory_pressure": reading.device.memory_pressure,
        "in_flight": reading.in_flight,
        "slots": reading.slots or None,
        "emulated": reading.emulated,
    }
    return {key: value for key, value in known.items() if value is not None}
