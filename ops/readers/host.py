"""The processor and the memory of this machine: the devices of class `cpu`."""

from __future__ import annotations

import psutil

from ops.readings import DeviceReading, share, temperature

# Other chips (disks, batteries, radios) are warm for reasons of their own.
_PROCESSOR_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal")


class Host:
    """`read` tells of the time since the last call; the first one knows no utilisation."""

    def __init__(self) -> None:
        self._has_begun = False

    def read(self) -> DeviceReading:
        """Never raises: a sensor that cannot be read is None."""
        percent = psutil.cpu_percent(interval=None)
        utilisation = share(percent / 100) if self._has_begun else None
        self._has_begun = True
        return DeviceReading(
            temperature_c=_hottest(),
            utilisation=utilisation,
            memory_pressure=share(psutil.virtual_memory().percent / 100),
        )


def _hottest() -> float | None:
    try:
        chips = psutil.sensors_temperatures()
    except (AttributeError, OSError, RuntimeError):  # not on every platform, nor in every sandbox
        return None
    known = [
        temperature(sensor.current) for chip in _PROCESSOR_CHIPS for sensor in chips.get(chip, ())
    ]
    return max((value for value in known if value is not None), default=None)
