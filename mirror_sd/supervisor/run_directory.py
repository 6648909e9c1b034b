"""The run directory of a stack: claimed by one supervisor at a time, gone when it ends.

The claim is a lock on the directory itself, which the kernel drops with its holder. So a directory
that can be locked belongs to nobody, whatever pid is written in it, and what an earlier supervisor
left there (files, and processes that have not noticed its death yet) may be cleared.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from mirror_sd.errors import SetupError
from mirror_sd.run_dir import RunDir

_LONGEST_SOCKET_PATH = 107
_ORPHANS_GONE_S = 5.0
_LOCK_ATTEMPTS = 5
_TOKEN_BYTES = 32


class Claim:
    """`acquire` makes the directory, empty but for its own pid file; `release` removes it, also
    after an `acquire` that failed half-way."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._fd: int | None = None

    def acquire(self) -> None:
        """Raises `SetupError`: already claimed, or it cannot be made."""
        _check_socket_paths(self.run)
        try:
            self._fd = self._lock()
            end_orphans(self.run)
            _empty(self.run.path)
            for directory in (logs(self.run), self.run.metrics, self.run.nginx, self.run.tokenizer):
                directory.mkdir(mode=0o700)
            self.run.supervisor_pid.write_text(f"{os.getpid()}\n", encoding="ascii")
        except OSError as error:
            raise SetupError(f"cannot use {self.run.path}: {error.strerror or error}") from error

    def release(self) -> None:
        """Remove the directory, and its parent if no other stack is in it."""
        if self._fd is None:
            return
        _empty(self.run.path)
        with suppress(OSError):
            self.run.path.rmdir()
            self.run.path.parent.rmdir()
        os.close(self._fd)
        self._fd = None

    def _lock(self) -> int:
        for _ in range(_LOCK_ATTEMPTS):
            with suppress(FileNotFoundError):  # removed by its last holder in this moment
                _make_private(self.run.path)
                fd = os.open(self.run.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                if _try_lock(fd, fcntl.LOCK_EX) and _is_at(fd, self.run.path):
                    return fd
                os.close(fd)
            # Perhaps only `supervisor_pid` looked at it.
            time.sleep(0.05)
        raise SetupError(_already_runs(self.run))


def supervisor_pid(run: RunDir) -> int | None:
    """The pid of the live supervisor of this directory; None where there is none."""
    try:
        fd = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        is_claimed = not _try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)
    return _recorded_pid(run) if is_claimed else None


def logs(run: RunDir) -> Path:
    """Directory of the processes' logs, one file a process."""
    return run.path / "logs"


def write_admin_token(run: RunDir) -> str:
    """Draw the bearer token of the admin endpoints; only the stack's user can read the file.

    nginx reads it when it starts, so write it before.
    """
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    fd = os.open(run.admin_token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(token)
    return token


def end_orphans(run: RunDir) -> list[int]:
    """Kill the processes of a stack whose supervisor is gone; returns their pids."""
    orphans = list(_members(run))
    for process in orphans:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(orphans, timeout=_ORPHANS_GONE_S)
    if alive:
        pids = ", ".join(str(process.pid) for process in alive)
        raise SetupError(f"processes of an earlier stack in {run.path} do not end: {pids}")
    return [process.pid for process in orphans]


def _members(run: RunDir) -> Iterator[psutil.Process]:
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        if process.pid not in own:
            with suppress(psutil.Error):
                if process.uids().real == os.getuid() and _belongs(process, run):
                    yield process


def _belongs(process: psutil.Process, run: RunDir) -> bool:
    if process.status() == psutil.STATUS_ZOMBIE:
        return False
    # nginx writes its title over its environment, but stays in its directory.
    is_nginx_here = process.cwd().removesuffix(" (deleted)") == str(run.nginx)
    return is_nginx_here or process.environ().get("MIRROR_SD_CONFIG_JSON") == str(run.config_json)


def _recorded_pid(run: RunDir) -> int | None:
    # The holder writes it right after it has locked the directory.
    for _ in range(20):
        try:
            return int(run.supervisor_pid.read_text(encoding="ascii"))
        except (OSError, ValueError):
            time.sleep(0.05)
    return None


def _already_runs(run: RunDir) -> str:
    pid = _recorded_pid(run)
    port = run.path.name
    return (
        f"a stack already runs on port {port}" + (f" (pid {pid})" if pid else "") + "; "
        f"stop it by `mirror-sd down --port {port}`, or choose another port by --port"
    )


def _check_socket_paths(run: RunDir) -> None:
    longest = str(run.path / "broker-gateway.sock")
    if len(os.fsencode(longest)) > _LONGEST_SOCKET_PATH:
        raise SetupError(
            f"{run.path} is too long for unix sockets; name a shorter MIRROR_SD_RUN_DIR"
        )


def _make_private(directory: Path) -> None:
    with suppress(FileExistsError):
        directory.parent.mkdir(mode=0o700, parents=True)
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    # The default base lies in /tmp, where another user could have made it first.
    for path in (directory.parent, directory):
        if path.stat().st_uid not in (os.getuid(), 0):
            raise SetupError(f"{path} belongs to another user")


def _try_lock(fd: int, operation: int) -> bool:
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
