"""The processes of a running stack and the CPU time that each kind of them takes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from mirror_sd.config import Config
from mirror_sd.errors import SetupError
from mirror_sd.run_dir import RunDir
from mirror_sd.supervisor.process_table import role_of

# Whoever measures is named so among the stack's roles.
CLIENT = "client"
_SHARED_SECTIONS = ("model", "pools", "engine", "speculation", "scheduler")


class RunningStack:
    """The stack on a port of this machine. Raises `SetupError` where its run directory is not
    here (another machine's, another user's, or another `MIRROR_SD_RUN_DIR`)."""

    def __init__(self, port: int, run: RunDir | None = None) -> None:
        run = run or RunDir.of_port(port)
        try:
            self.config = Config.model_validate_json(run.config_json.read_text(encoding="utf-8"))
            supervisor = psutil.Process(int(run.supervisor_pid.read_text(encoding="utf-8")))
            self._cores = len(supervisor.cpu_affinity())
            self._processes = [(role_of(p)[0], p) for p in supervisor.children(recursive=True)]
            self._processes.append(("supervisor", supervisor))
            self._spent: dict[int, float] = {}
        except (OSError, ValueError, psutil.Error) as error:
            raise SetupError(f"no stack runs on port {port} (looked in {run.path})") from error

    @property
    def threads(self) -> int:
        """Threads of one worker of the first pool."""
        pool = next(iter(self.config.pools.values()))
        return pool.threads or max(self._cores // pool.workers, 1)

    def overrides(self) -> list[str]:
        """Its settings of model, pools and engine as `--set` items, for an engine like its own."""
        tree = self.config.model_dump(mode="json", by_alias=True)
        return [
            f"{path}={json.dumps(value)}"
            for section in _SHARED_SECTIONS
            for path, value in _leaves(section, tree[section])
        ]

    def cpu_s(self) -> dict[str, float]:
        """User and system seconds so far by role, the measuring process as `CLIENT`; of a process
        that has ended, what was known last."""
        seconds = {CLIENT: time.process_time()}
        for role, process in self._processes:
            with suppress(psutil.NoSuchProcess):
                spent = process.cpu_times()
                self._spent[process.pid] = spent.user + spent.system
            seconds[role] = seconds.get(role, 0.0) + self._spent.get(process.pid, 0.0)
        return seconds


@dataclass(slots=True)
class CpuUse:
    """Seconds by role; `other_cores` is what all other processes kept busy, on average."""

    seconds: dict[str, float] = field(default_factory=dict)
    other_cores: float = 0.0

    def ms_per_request(self, requests: int) -> dict[str, float]:
        """Milliseconds of CPU that a request takes, by role."""
        return {role: round(1e3 * s / max(requests, 1), 3) for role, s in self.seconds.items()}

    def row(self, tokens: int) -> dict[str, Any]:
        """Figures of a report; `serving_us` is what a token costs outside its worker."""
        us = {role: 1e6 * spent / tokens for role, spent in self.seconds.items()}
        return {
            "cpu_s": {role: round(spent, 2) for role, spent in self.seconds.items()},
            "us_per_token": {role: round(value, 1) for role, value in us.items()},
            "serving_us": round(sum(value for role, value in us.items() if role != "worker"), 1),
            "other_load": round(self.other_cores, 2),
        }


@contextmanager
def measured(stack: RunningStack) -> Iterator[CpuUse]:
    """What the stack uses within the block; known when it is left."""
    use = CpuUse()
    begin, busy, before = time.monotonic(), _busy_s(), stack.cpu_s()
    yield use
    after = stack.cpu_s()
    use.seconds = {role: after[role] - before.get(role, 0.0) for role in sorted(after)}
    others = _busy_s() - busy - sum(use.seconds.values())
    use.other_cores = max(others / (time.monotonic() - begin), 0.0)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield path, value
        return
    for key, item in value.items():
        yield from _leaves(f"{path}.{key}", item)


def _busy_s() -> float:
    times = psutil.cpu_times()
    return sum(times[:8]) - times.idle - times.iowait
