"""Gauges of dead processes, which must not be summed with those of the living.

prometheus_client keeps them in one file a process. A broker or a pool that died is the
supervisor's own child, but a gunicorn worker or the worker of a killed pool is not, so the files
are compared with the processes that exist.
"""

from __future__ import annotations

from pathlib import Path

import psutil
from prometheus_client import multiprocess


def forget_dead(metrics: Path) -> list[int]:
    """Remove the live gauges of processes that are gone; returns their pids."""
    written = {_pid(path) for path in metrics.glob("gauge_live*_*.db")}
    dead = sorted(pid for pid in written if pid is not None and not psutil.pid_exists(pid))
    for pid in dead:
        multiprocess.mark_process_dead(pid, str(metrics))  # type: ignore[no-untyped-call]
    return dead


def _pid(path: Path) -> int | None:
    number = path.stem.rpartition("_")[2]
    return int(number) if number.isdigit() else None
