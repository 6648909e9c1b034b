"""The device that an emulated worker pretends to have: how busy, how warm, and what ails it.

Utilisation is the share of time spent in steps, temperature follows it slowly; a control file
(`RunDir.emulation`) sets either, and the faults.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from mirror_sd.messages import DeviceHealth

_log = logging.getLogger(__name__)

Fault = Literal["hang", "crash", "slow_start"]

# Above it a step is longer than any clock counts; "hang" is for that.
MAX_LATENCY_FACTOR = 1e4
_UNREADABLE = (-1, -1, -1)
_BUSY_WINDOW_S = 1.0
_WARMING_S = 20.0
_IDLE_C = 35.0
_FULL_LOAD_C = 75.0


class Control(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The control file's JSON; what is None is modelled instead. `latency_factor` stretches steps.

    `fault`: "hang" makes the next step last until it is taken back, "crash" kills the process, at
    each start again, "slow_start" delays the start.
    """

    temperature_c: float | None = None
    utilisation: float | None = None
    memory_pressure: float | None = None
    latency_factor: float = 1.0
    fault: Fault | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.latency_factor <= MAX_LATENCY_FACTOR:
            raise ValueError(f"latency_factor must be from 0 to {MAX_LATENCY_FACTOR:g}")


class ControlFile:
    """The latest readable content of a control file that need not exist."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._control = Control()

    def read(self) -> Control:
        """What it says now; a file that cannot be read is reported once and changes nothing."""
        try:
            status = os.stat(self._path)  # noqa: PTH116 - a third of the cost of Path.stat
        except FileNotFoundError:
            self._seen = None
            self._control = Control()
            return self._control
        except OSError as error:
            if self._seen != _UNREADABLE:
                self._seen = _UNREADABLE
                _log.warning("%s is ignored: %s", self._path, error)
            return self._control
        mark = (status.st_mtime_ns, status.st_ino, status.st_size)
        if mark != self._seen:
            self._seen = mark
            self._load()
        return self._control

    def _load(self) -> None:
        try:
            self._control = msgspec.json.decode(self._path.read_bytes(), type=Control)
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("%s is ignored: %s", self._path, error)
            return
        _log.info("emulation is now %s", self._control)


class EmulatedDevice:
    """`begin_step` and `end_step` on the engine's thread, `health` on any one other."""

    def __init__(self, file: ControlFile, clock: Callable[[], float]) -> None:
        self._file = file
        self._clock = clock
        now = clock()
        # Busy share at a time, and whether a step runs since; one tuple, to change at once.
        self._busy = (0.0, now, False)
        self._temperature = (_IDLE_C, now)

    @property
    def control(self) -> Control:
        return self._file.read()

    def begin_step(self) -> None:
        self._mark(is_busy=True)

    def end_step(self) -> None:
        self._mark(is_busy=False)

    def health(self, memory_pressure: float) -> DeviceHealth:
        """What a probe would read, `memory_pressure` unless the control file has another."""
        control = self.control
        now = self._clock()
        busy = self._busy_share(now)
        utilisation = busy if control.utilisation is None else control.utilisation
        modelled_c = self._follow(now, _IDLE_C + (_FULL_LOAD_C - _IDLE_C) * utilisation)
        return DeviceHealth(
            temperature_c=modelled_c if control.temperature_c is None else control.temperature_c,
            utilisation=utilisation,
            memory_pressure=(
                memory_pressure if control.memory_pressure is None else control.memory_pressure
            ),
        )

    def _mark(self, *, is_busy: bool) -> None:
        now = self._clock()
        self._busy = (self._busy_share(now), now, is_busy)

    def _busy_share(self, now: float) -> float:
        share, at, is_busy = self._busy
        kept = math.exp(-max(now - at, 0.0) / _BUSY_WINDOW_S)
        return share * kept + (1.0 - kept if is_busy else 0.0)

    def _follow(self, now: float, target_c: float) -> float:
        last_c, at = self._temperature
        kept = math.exp(-max(now - at, 0.0) / _WARMING_S)
        self._temperature = (target_c + (last_c - target_c) * kept, now)
        return self._temperature[0]
