"""Notices the death of processes on this machine at once, by pidfd.

A killed peer says nothing: its heartbeats stop, and a ROUTER learns of it only when it sends.
`os.kill(pid, 0)` would take a zombie for a live process, and a pid may be used again; a pidfd
becomes readable the moment the process ends, reaped or not, and stays with that process.
"""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Set

_log = logging.getLogger(__name__)


class ProcessWatch:
    """An epoll set of pidfds; `fileno` is readable when `dead` has something to tell."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._fds: dict[int, int] = {}
        self._unwatched: set[int] = set()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def watch(self, pids: Set[int]) -> None:
        """Watch these processes and no others.

        One that cannot be watched (no pidfd in this kernel, another pid namespace) is left to
        its heartbeats.
        """
        for pid in self._fds.keys() - pids:
            self._release(pid)
        self._unwatched &= pids
        for pid in pids - self._fds.keys() - self._unwatched:
            try:
                fd = os.pidfd_open(pid)
            except (OSError, ValueError, OverflowError, AttributeError) as error:
                _log.info("process %s is watched by heartbeats only: %s", pid, error)
                self._unwatched.add(pid)
                continue
            self._fds[pid] = fd
            self._epoll.register(fd, select.EPOLLIN)

    def dead(self) -> list[int]:
        """The watched processes that have ended since the last call."""
        ready = {fd for fd, _ in self._epoll.poll(0)}
        ended = [pid for pid, fd in self._fds.items() if fd in ready]
        for pid in ended:
            self._release(pid)
        return ended

    def close(self) -> None:
        for pid in list(self._fds):
            self._release(pid)
        self._epoll.close()

    def _release(self, pid: int) -> None:
        fd = self._fds.pop(pid)
        self._epoll.unregister(fd)
        os.close(fd)
