"""A child process that is started, watched, started again with back-off, and stopped.

The supervisor keeps the processes of a stack this way, a pool its workers. A child never outlives
its parent: the kernel sends it `ChildSpec.orphan_signal` when the thread that started it is gone,
so start children from a thread that lives as long as the process.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_log = logging.getLogger(__name__)

# The exit status (EX_CONFIG) of a child that told in one sentence why trying again is no use.
CANNOT_START = 78

_PR_SET_PDEATHSIG = 1
# Loaded before any fork: between fork and exec nothing may be imported.
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start a child. `env` is added to the parent's; `log` None inherits the output."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None
    cwd: Path | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    orphan_signal: signal.Signals = signal.SIGKILL


@dataclass(slots=True)
class Backoff:
    """The wait before a restart: doubles with each quick death, forgets once a child settled."""

    first_s: float = 0.1
    longest_s: float = 15.0
    settled_s: float = 20.0
    _quick_deaths: int = 0

    def delay_s(self, lived_s: float) -> float:
        """The wait after a child that lived for `lived_s`."""
        if lived_s >= self.settled_s:
            self._quick_deaths = 0
        delay = self.first_s * 2.0 ** min(self._quick_deaths, 32)
        self._quick_deaths += 1
        return min(delay, self.longest_s)


@dataclass(frozen=True, slots=True)
class Death:
    """`status` is the exit status, negative for a signal; `delay_s` the wait before the restart."""

    name: str
    pid: int
    status: int
    lived_s: float
    delay_s: float

    def __str__(self) -> str:
        how = f"status {self.status}"
        if self.status < 0:
            with suppress(ValueError):
                how = signal.Signals(-self.status).name
        return f"{self.name} (pid {self.pid}) ended with {how} after {self.lived_s:.1f} s"


class Child:
    """One process and its successors. Call `tend` regularly from the thread that starts it."""

    def __init__(
        self,
        spec: ChildSpec,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self.restarts = 0
        self._backoff = backoff if backoff is not None else Backoff()
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._start_at: float | None = None

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Raises `OSError` where the command cannot be executed."""
        self._start_at = None
        self._started_at = self._clock()
        self._process = _spawn(self.spec)
        _log.debug("started %s, pid %d", self.spec.name, self._process.pid)

    def tend(self) -> Death | None:
        """Reap it if it ended, start it again when its wait is over."""
        now = self._clock()
        if self._process is None:
            if self._start_at is not None and now >= self._start_at:
                self._restart(now)
            return None
        death = self.reap()
        if death is not None:
            self._start_at = now + death.delay_s
        return death

    def reap(self) -> Death | None:
        """The death of the process, once, if it ended; it is not started again by itself."""
        process = self._process
        if process is None or not _has_ended(process.pid):
            return None
        # What it started itself (a master's workers) must not hold its sockets any longer. Not yet
        # reaped, it still owns its process group's number.
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
        self._process = None
        lived_s = self._clock() - self._started_at
        return Death(
            self.spec.name,
            process.pid,
            process.returncode,
            lived_s,
            self._backoff.delay_s(lived_s),
        )

    def _restart(self, now: float) -> None:
        self.restarts += 1
        try:
            self.start()
        except OSError as error:
            delay_s = self._backoff.delay_s(0.0)
            self._start_at = now + delay_s
            _log.error("cannot start %s: %s; again in %.1f s", self.spec.name, error, delay_s)

    def stop(self) -> None:
        """Ask it to finish, and never start it again by itself."""
        self._start_at = None
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(self.spec.stop_signal)

    def kill(self) -> None:
        """End it and all that it started, now, and reap it."""
        self._start_at = None
        if self._process is not None:
            _signal_group(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
            self._process = None


class Waker:
    """Lets a loop sleep until a signal, the death of a child included, or a time-out."""

    def __init__(self) -> None:
        self._read_fd = -1

    def install(self) -> None:
        """Call on the main thread; the process's own handlers may be set before or after."""
        self._read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def wait(self, seconds: float) -> None:
        readable, _, _ = select.select([self._read_fd], [], [], max(seconds, 0.0))
        if readable:
            os.read(self._read_fd, 4096)


def die_with_parent(orphan_signal: signal.Signals, parent_pid: int) -> None:
    """Have the kernel send this process `orphan_signal` when its parent ends."""
    if _libc.prctl(_PR_SET_PDEATHSIG, int(orphan_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def _spawn(spec: ChildSpec) -> subprocess.Popen[bytes]:
    parent_pid = os.getpid()

    def bind_to_parent() -> None:
        die_with_parent(spec.orphan_signal, parent_pid)

    log = None if spec.log is None else spec.log.open("ab")
    try:
        return subprocess.Popen(
            list(spec.argv),
            env={**os.environ, **spec.env},
            cwd=spec.cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Its own process group: a terminal's Ctrl-C reaches the parent alone.
            start_new_session=True,
            preexec_fn=bind_to_parent,
        )
    finally:
        if log is not None:
            log.close()


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
