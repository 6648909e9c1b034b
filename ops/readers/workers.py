"""The live workers of each class, from `/admin/state`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ops.readings import ClassReading, DeviceReading, combine, share, temperature


def read(
    state: Mapping[str, Any],
    classes: Iterable[str],
    patience_s: float,
    devices: Mapping[str, DeviceReading],
) -> dict[str, ClassReading]:
    """A reading for each of `classes`.

    `devices`: what this machine's own sensors say of a class; of the rest, and of what is emulated,
    the workers tell. A worker is live until it has been silent for longer than `patience_s`.
    """
    workers = [item for item in _dicts(state.get("workers")) if _is_live(item, patience_s)]
    queues = _dicts(state.get("queues"))
    return {
        name: _class_reading(
            [item for item in workers if item.get("device_class") == name],
            [item for item in queues if item.get("device_class") == name],
            devices.get(name),
        )
        for name in classes
    }


def _class_reading(
    workers: list[Mapping[str, Any]],
    queues: list[Mapping[str, Any]],
    device: DeviceReading | None,
) -> ClassReading:
    emulated = any(item.get("emulated") is True for item in workers)
    told = combine([_health(item.get("health")) for item in workers])
    return ClassReading(
        device=told if emulated or device is None else _first_known(device, told),
        workers=len(workers),
        slots=sum(_count(item.get("slots")) for item in workers),
        in_flight=sum(_count(item.get("in_flight")) for item in workers),
        waiting=sum(_count(item.get("depth")) for item in queues),
        emulated=emulated,
    )


def _is_live(worker: Mapping[str, Any], patience_s: float) -> bool:
    silent_s = worker.get("silent_s", 0.0)
    is_heard = isinstance(silent_s, int | float) and silent_s <= patience_s
    return is_heard and worker.get("draining") is not True


def _health(told: object) -> DeviceReading:
    if not isinstance(told, Mapping):
        return DeviceReading()
    return DeviceReading(
        temperature_c=temperature(told.get("temperature_c")),
        utilisation=share(told.get("utilisation")),
        memory_pressure=share(told.get("memory_pressure")),
    )


def _first_known(sensors: DeviceReading, told: DeviceReading) -> DeviceReading:
    def chosen(own: float | None, other: float | None) -> float | None:
        return other if own is None else own

    return DeviceReading(
        temperature_c=chosen(sensors.temperature_c, told.temperature_c),
        utilisation=chosen(sensors.utilisation, told.utilisation),
        memory_pressure=chosen(sensors.memory_pressure, told.memory_pressure),
        pcie=sensors.pcie,
        is_throttled=sensors.is_throttled,
    )


def _dicts(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
