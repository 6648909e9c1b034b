"""What a benchmark ran on: every figure is only comparable within one run on one machine."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np

READ_BYTES = 128 * 2**20


def describe() -> dict[str, Any]:
    """CPU name, cores available, read bandwidth of a copy loop in GB/s, and the time (UTC)."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "copy_gb_s": copy_bandwidth(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def copy_bandwidth() -> float:
    """GB/s (bytes read + written) of copying 128 MiB on one core, median of 7.

    A reading of the machine's state, not of its peak: shared machines change speed by the minute.
    """
    source = np.ones(16 * 2**20, dtype=np.float64)
    target = np.empty_like(source)
    spans = []
    for _ in range(7):
        begin = time.perf_counter()
        np.copyto(target, source)
        spans.append(time.perf_counter() - begin)
    return round(2 * source.nbytes / float(np.median(spans)) / 1e9, 1)


def read_bandwidth(threads: int) -> float:
    """GB/s of reading 128 MiB by so many threads, median of 9: a reading of the machine's state.

    By the native library's streaming read; without it by numpy, whose sums fall short of the peak.
    """
    native = _native_read()
    if native is not None:
        return round(native(threads, READ_BYTES), 1)
    parts = np.array_split(np.ones(READ_BYTES // 8, dtype=np.float64), threads)
    spans = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(9):
            begin = time.perf_counter()
            list(pool.map(np.sum, parts))
            spans.append(time.perf_counter() - begin)
    return round(READ_BYTES / float(np.median(spans)) / 1e9, 1)


class OtherLoad:
    """How many cores others kept busy while a process was measured.

    `cores` is known when the context is left: what the machine's CPUs did, user and system, less
    what process `pid` did. Above a few hundredths a measurement was disturbed.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.cores = 0.0

    def __enter__(self) -> Self:
        self._begin = time.monotonic()
        self._busy, self._own = _busy_ticks(), _own_ticks(self._pid)
        return self

    def __exit__(self, *_: object) -> None:
        spent = time.monotonic() - self._begin
        others = (_busy_ticks() - self._busy) - (_own_ticks(self._pid) - self._own)
        self.cores = round(max(others / os.sysconf("SC_CLK_TCK") / spent, 0.0), 2)


def _busy_ticks() -> int:
    """Clock ticks that all CPUs have spent on anything but idling and waiting."""
    total = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]
    ticks = [int(value) for value in total]
    return sum(ticks) - ticks[3] - ticks[4]


def _own_ticks(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    fields = text.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _native_read() -> Callable[[int, int], float] | None:
    try:
        module = importlib.import_module("mirror_sd._native")
    except ImportError:
        return None
    read: Callable[[int, int], float] | None = getattr(module, "read_bandwidth", None)
    return read


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
