"""An engine in a process of its own, spoken to in lines of JSON (see `peer_drivers.session`).

A process that is not being asked is stopped by a signal, so that an idle engine's threads cannot
take time from the one that is measured.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from mirror_sd.bench import peer_drivers
from mirror_sd.child import die_with_parent
from mirror_sd.errors import ConfigError, SetupError

PACKAGE = "mirror_sd_peers"
# By its path: the other interpreter must see neither our dependencies nor `bench` on `sys.path`.
BOOTSTRAP = f"""
import importlib, importlib.util, sys
spec = importlib.util.spec_from_file_location("{PACKAGE}", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["{PACKAGE}"] = module
spec.loader.exec_module(module)
importlib.import_module("{PACKAGE}.session").main()
"""


class PeerFailed(SetupError):
    """An engine's process ended, took too long or answered with an error."""


def peer_command(python: Path) -> list[str]:
    """How to start a session of the peer drivers under an interpreter."""
    return [str(python), "-E", "-c", BOOTSTRAP, str(Path(peer_drivers.__file__))]


def engine_command() -> list[str]:
    """How to start a session of our own engine."""
    return [sys.executable, "-m", "mirror_sd.bench.peer_engine"]


class PeerProcess:
    """A session; entering the context starts the process, leaving it ends it.

    The child's `threads` are set for OpenMP; a library that has a setting of its own is given it
    when it loads. `environment`: its further variables.
    """

    def __init__(
        self,
        command: Sequence[str],
        threads: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = list(command)
        self._threads = threads
        self._more = environment or {}
        self._buffer = b""

    def __enter__(self) -> Self:
        """Raises `ConfigError` where the command cannot be executed."""
        parent_pid = os.getpid()
        self._log = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**_environment(self._threads), **self._more},
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGKILL, parent_pid),
            )
        except OSError as error:
            self._log.close()
            raise ConfigError(f"cannot start {self._command[0]}: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGKILL)
        self._process.communicate()
        self._log.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, name: str, timeout_s: float = 600.0, **arguments: Any) -> Any:
        """The value that the child's handler `name` gives. Raises `PeerFailed`."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"call": name, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
            reply = self._reply(name, time.monotonic() + timeout_s)
        except BrokenPipeError as error:
            raise PeerFailed(self._last_words()) from error
        finally:
            self._signal(signal.SIGSTOP)
        if "error" in reply:
            raise PeerFailed(reply["error"])
        return reply["value"]

    def _reply(self, name: str, deadline: float) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise PeerFailed(f"no answer to {name!r} in time")
            piece = os.read(descriptor, 1 << 20)
            if not piece:
                raise PeerFailed(self._last_words())
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply: Mapping[str, Any] = json.loads(line)
        return reply

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        self._signal(signal.SIGKILL)
        status = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"its process ended ({how}): {lines[-1] if lines else 'it said nothing'}"


def _environment(threads: int) -> dict[str, str]:
    count = str(threads)
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **offline, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
