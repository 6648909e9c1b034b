"""The memory of this host, or of the control group that this process lives in, if it has less."""

from __future__ import annotations

from pathlib import Path


class HostMemory:
    """`root`: of the file system in which /proc and /sys are."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def used_share(self) -> float | None:
        """0..1 of what may be used at most; page cache that can be dropped is not used. None where
        the system does not tell."""
        return max((1 - free / total for free, total in self._limits()), default=None)

    def free_bytes(self) -> int | None:
        """What can still be taken. None where the system does not tell."""
        return min((free for free, _ in self._limits()), default=None)

    def _limits(self) -> list[tuple[int, int]]:
        """(free, total) of the host and of each control group above this process."""
        return [*_host(self._root), *_groups(self._root)]


def _host(root: Path) -> list[tuple[int, int]]:
    facts = {}
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name in ("MemAvailable", "MemTotal"):
            facts[name] = int(value.split()[0]) * 1024
    return [(facts["MemAvailable"], facts["MemTotal"])] if len(facts) == 2 else []


def _groups(root: Path) -> list[tuple[int, int]]:
    found = []
    # Version 2 of control groups: `0::/path`. The limits of version 1 are not looked at.
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, path = line.partition("::")
        if number != "0":
            continue
        group, top = root / "sys/fs/cgroup" / path.lstrip("/"), root / "sys/fs/cgroup"
        while True:
            limit = _text(group / "memory.max").strip()
            if limit.isdigit() and int(limit) > 0:
                used = int(_text(group / "memory.current").strip() or 0) - _droppable(group)
                found.append((max(int(limit) - max(used, 0), 0), int(limit)))
            if group == top or top not in group.parents:
                break
            group = group.parent
    return found


def _droppable(group: Path) -> int:
    for line in _text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
