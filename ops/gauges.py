"""The probe's readings and decisions as metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mirror_sd import telemetry
from ops.device_weights import Weights
from ops.readings import ClassReading, ServiceReading


def show_weights(weights: Weights, classes: Mapping[str, ClassReading]) -> None:
    """Per class: the factor and what it follows from."""
    telemetry.PROBE_DRAFT_FACTOR.set(weights.draft_factor)
    for name, factor in weights.factors.items():
        telemetry.PROBE_FACTOR.labels(name).set(factor)
        device = classes[name].device
        telemetry.PROBE_UTILISATION.labels(name).set(_or_nan(device.utilisation))
        telemetry.PROBE_TEMPERATURE.labels(name).set(_or_nan(device.temperature_c))
        telemetry.PROBE_MEMORY.labels(name).set(_or_nan(device.memory_pressure))
        telemetry.PROBE_PCIE.labels(name).set(_or_nan(device.pcie))


def show_service(service: ServiceReading, degrade_level: int, firing: Mapping[str, int]) -> None:
    """Of the whole stack."""
    telemetry.PROBE_P99.set(_or_nan(service.inter_token_p99_s))
    telemetry.PROBE_REJECTION.set(_or_nan(service.rejection_rate))
    telemetry.PROBE_DEGRADE_LEVEL.set(degrade_level)
    for name, count in firing.items():
        telemetry.PROBE_ALERTS.labels(name).set(count)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
