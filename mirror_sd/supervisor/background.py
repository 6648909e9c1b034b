"""A stack without a terminal: `up --detach` and `down`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from mirror_sd.config import Config
from mirror_sd.errors import SetupError
from mirror_sd.run_dir import RunDir
from mirror_sd.supervisor import run_directory
from mirror_sd.supervisor.processes import import_path
from mirror_sd.supervisor.run_directory import Claim

# Tells the supervisor that its caller reads its output only until it is ready.
ENV_DETACHED = "MIRROR_SD_DETACHED"
_POLL_S = 0.1
_DOWN_MARGIN_S = 20.0


def is_detached() -> bool:
    """Whether this process is the one that `up_detached` started."""
    return os.environ.get(ENV_DETACHED) == "1"


def up_detached(port: int, announce: Callable[[str], None]) -> int:
    """Run the same command line in a session of its own and return when it is ready.

    Returns the exit status of a start that failed; it has told why on standard error.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "mirror_sd.cli", *sys.argv[1:]],
        env={**os.environ, ENV_DETACHED: "1", "PYTHONPATH": import_path()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline().strip()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        return process.wait()
    if not line.startswith("ready "):
        return process.wait() or 1
    announce(line)
    hint = f"pid {process.pid}; stop it by `mirror-sd down --port {port}`"
    print(hint, file=sys.stderr)
    return 0


def down(port: int) -> None:
    """Stop the stack on `port` and wait until nothing is left of it.

    Clears what a killed supervisor left. Raises `SetupError` where nothing runs.
    """
    run = RunDir.of_port(port)
    pid = run_directory.supervisor_pid(run)
    if pid is None:
        _clear(run)
        return
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _drain_s(run) + _DOWN_MARGIN_S
    while psutil.pid_exists(pid) and run.path.exists():
        if time.monotonic() >= deadline:
            raise SetupError(f"the stack on port {port} (pid {pid}) does not stop; kill it by hand")
        time.sleep(_POLL_S)


def _clear(run: RunDir) -> None:
    if not run.path.exists():
        raise SetupError(f"no stack runs on port {run.path.name}")
    claim = Claim(run)
    try:
        claim.acquire()
    finally:
        claim.release()


def _drain_s(run: RunDir) -> float:
    try:
        text = run.config_json.read_text(encoding="utf-8")
        return Config.model_validate_json(text).server.drain_s
    except (OSError, ValueError):
        return 0.0
