"""What runs in a stack and what it does: the answer of `mirror-sd status`."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from mirror_sd import allocator
from mirror_sd.run_dir import RunDir
from mirror_sd.supervisor.unix_connection import UnixConnection

_ANSWER_S = 3.0
# Processes that serve only through the children they fork.
_MASTERS = ("nginx", "gateway")


@dataclass(frozen=True, slots=True)
class StackProcess:
    """One process; `device_class` only for a pool and its workers; of a worker also the most memory
    it had, and its malloc, where the system tells."""

    role: str
    pid: int
    device_class: str | None
    rss_mb: float
    peak_mb: float | None = None
    allocator: str | None = None

    def to_json(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"role": self.role, "pid": self.pid, "rss_mb": self.rss_mb}
        if self.device_class is not None:
            entry["class"] = self.device_class
        if self.role == "worker":
            entry |= {"peak_mb": self.peak_mb, "allocator": self.allocator}
        return entry


def processes(supervisor_pid: int) -> list[StackProcess]:
    """Every process of the stack once, the supervisor first."""
    try:
        supervisor = psutil.Process(supervisor_pid)
        found = [StackProcess("supervisor", supervisor_pid, None, _rss_mb(supervisor))]
        children = supervisor.children()
    except psutil.Error:
        return []
    for child in children:
        with suppress(psutil.Error):  # it ended while we looked
            found.extend(_family(child))
    return found


def _family(process: psutil.Process) -> Iterator[StackProcess]:
    role, device_class = role_of(process)
    children = process.children()
    own_role = f"{role}-master" if role in _MASTERS else role
    yield StackProcess(own_role, process.pid, device_class, _rss_mb(process))
    if role in _MASTERS:
        for child in children:
            with suppress(psutil.Error):
                yield StackProcess(role, child.pid, None, _rss_mb(child))
    elif role == "pool":
        for child in children:
            with suppress(psutil.Error):
                yield _worker(child, device_class)


def _worker(process: psutil.Process, device_class: str | None) -> StackProcess:
    peak = allocator.peak_bytes(process.pid)
    return StackProcess(
        "worker",
        process.pid,
        device_class,
        _rss_mb(process),
        None if peak is None else round(peak / 2**20, 1),
        allocator.running(process.pid),
    )


def role_of(process: psutil.Process) -> tuple[str, str | None]:
    """The role of a stack's process and, of a pool and its workers, the device class."""
    environment = process.environ()
    role = environment.get("MIRROR_SD_ROLE")
    if role is None:
        # nginx writes its title over its environment.
        role = "nginx" if process.name() in ("nginx", "openresty") else process.name()
    return role, environment.get("MIRROR_SD_CLASS")


def _rss_mb(process: psutil.Process) -> float:
    return round(float(process.memory_info().rss) / 2**20, 1)


def load(run: RunDir) -> dict[str, Any]:
    """`running`, `waiting`, `kv_blocks_used` and `workers` as the broker sees them, from the first
    gateway that answers; None for each where none does."""
    return summary(state(run))


def state(run: RunDir) -> dict[str, Any]:
    """`/admin/state` of the first gateway that answers; empty where none does."""
    for path in sorted(run.path.glob("gateway-*.sock")):
        with suppress(OSError, http.client.HTTPException, ValueError):
            return _get_json(path, "/admin/state")
    return {}


def summary(state: dict[str, Any]) -> dict[str, Any]:
    """What `load` tells, from a state."""
    workers: list[dict[str, Any]] | None = state.get("workers")
    return {
        "running": state.get("running"),
        "waiting": state.get("waiting"),
        "kv_blocks_used": _sum(workers, "kv_blocks_used"),
        "kv_blocks_free": _sum(workers, "kv_blocks_free"),
        "kv_blocks_peak": _sum(workers, "kv_blocks_peak"),
        "workers": workers,
    }


def _sum(workers: list[dict[str, Any]] | None, key: str) -> int | None:
    # What is 0 may be left out.
    return None if workers is None else sum(worker.get(key, 0) for worker in workers)


def _get_json(path: Path, resource: str) -> dict[str, Any]:
    connection = UnixConnection(path, _ANSWER_S)
    try:
        connection.request("GET", resource)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise ValueError(f"{resource}: status {answer.status}")
        decoded: dict[str, Any] = json.loads(content)
        return decoded
    finally:
        connection.close()
