"""NVIDIA GPUs by NVML: utilisation, temperature, memory, PCIe throughput, throttle reasons.

Where there is no driver, or it stops answering, the reading is empty and the probe goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import pynvml

from ops.readings import DeviceReading, combine, share, temperature

_log = logging.getLogger(__name__)
T = TypeVar("T")

# A lane's usable KB/s by PCIe generation, one direction.
_LANE_KB_S = {1: 250e3, 2: 500e3, 3: 985e3, 4: 1969e3, 5: 3938e3, 6: 7563e3}
_LOOK_AGAIN_S = 60.0


class Gpus:
    """`read` looks at each GPU that NVML shows; `nvml` is the module, or what has its functions.

    A driver that is not there is looked for again each minute.
    """

    def __init__(self, nvml: Any = pynvml, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._clock = clock
        self._handles: list[Any] = []
        self._look_at = clock()

    def read(self) -> DeviceReading:
        """All GPUs as one device; everything None where there is none. Never raises."""
        if not self._handles:
            self._find()
        try:
            return combine([self._read_one(handle) for handle in self._handles])
        except self._nvml.NVMLError as error:
            _log.warning("the GPUs are no longer read: %s", error)
            self.close()
            return DeviceReading()

    def close(self) -> None:
        """Let the driver go."""
        self._handles = []
        self._look_at = self._clock() + _LOOK_AGAIN_S
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _find(self) -> None:
        if self._clock() < self._look_at:
            return
        self._look_at = self._clock() + _LOOK_AGAIN_S
        try:
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        except self._nvml.NVMLError as error:
            _log.info("no GPU is read: %s", error)

    def _read_one(self, handle: Any) -> DeviceReading:
        nvml = self._nvml
        # The temperature is what the rest is for: without it the GPU counts as lost.
        degrees = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        memory = self._maybe(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        busy = self._maybe(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        throttle = self._maybe(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        thermal = nvml.nvmlClocksThrottleReasonSwThermalSlowdown
        thermal |= nvml.nvmlClocksThrottleReasonHwThermalSlowdown
        return DeviceReading(
            temperature_c=temperature(degrees),
            utilisation=None if busy is None else share(busy / 100),
            memory_pressure=None if memory is None else share(memory.used / memory.total),
            pcie=self._link_share(handle),
            is_throttled=bool((throttle or 0) & thermal),
        )

    def _link_share(self, handle: Any) -> float | None:
        nvml = self._nvml
        directions = (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
        generation = self._maybe(lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))
        width = self._maybe(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))
        rates: list[float | None] = [
            self._maybe(partial(nvml.nvmlDeviceGetPcieThroughput, handle, direction))
            for direction in directions
        ]
        known = [rate for rate in rates if rate is not None]
        if generation not in _LANE_KB_S or not width or not known:
            return None
        # Bursts are sampled over 20 ms and may read above the link's own figure.
        return min(max(known) / (_LANE_KB_S[generation] * float(width)), 1.0)

    def _maybe(self, read: Callable[[], T]) -> T | None:
        """None where this GPU, or its driver, does not know the figure."""
        try:
            return read()
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_FunctionNotFound):
            return None
        except self._nvml.NVMLError_Unknown:
            return None
