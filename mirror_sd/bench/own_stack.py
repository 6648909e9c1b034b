"""A stack that a benchmark starts for itself, with keys and settings of its own, and stops."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from mirror_sd.admin_client import AdminClient
from mirror_sd.bench.serve_stack import RunningStack
from mirror_sd.child import die_with_parent
from mirror_sd.config import Config
from mirror_sd.errors import SetupError
from mirror_sd.keys import KeyFile, Tier
from mirror_sd.run_dir import RunDir
from mirror_sd.supervisor import process_table
from mirror_sd.supervisor.preflight import free_ports
from mirror_sd.supervisor.processes import import_path

_READY_S = 120.0
_STOP_S = 30.0


class OwnStack:
    """Use it as a context; `settings` are `--set` items. Raises `SetupError` with the end of its
    log where it does not start."""

    def __init__(self, settings: Sequence[str], keys: Sequence[tuple[str, Tier]]) -> None:
        self.port, self._admin_port = free_ports(2)
        # Short: paths of unix sockets are limited to 107 bytes.
        self._base = Path(tempfile.mkdtemp(prefix="msd-", dir="/tmp"))
        self.run = RunDir(self._base / "run" / str(self.port))
        self._log = self._base / "log"
        file = KeyFile(self._base / "keys.json")
        # API keys by tenant.
        self.keys = {tenant: file.add(tenant, tier)[1] for tenant, tier in keys}
        own = (f"server.admin_port={self._admin_port}", f"server.keys_file={file.path}")
        self._settings = [*own, *settings]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._base, ignore_errors=True)

    @property
    def config(self) -> Config:
        """As the stack resolved it."""
        return Config.model_validate_json(self.run.config_json.read_text(encoding="utf-8"))

    def processes(self) -> RunningStack:
        """For the CPU time of its processes."""
        return RunningStack(self.port, self.run)

    def admin(self) -> AdminClient:
        """For its admin endpoints."""
        token = self.run.admin_token.read_text(encoding="ascii").strip()
        return AdminClient(self._admin_port, token)

    def tokens_by_class(self) -> dict[str, int]:
        """What the workers of each class have generated so far."""
        tokens: dict[str, int] = {}
        for worker in process_table.load(self.run)["workers"] or ():
            name = worker["device_class"]
            tokens[name] = tokens.get(name, 0) + int(worker.get("tokens", 0))
        return tokens

    def _start(self) -> None:
        argv = [sys.executable, "-P", "-m", "mirror_sd.cli", "up", "--port", str(self.port)]
        for item in self._settings:
            argv += ["--set", item]
        parent = os.getpid()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "PYTHONPATH": import_path(),
                    "MIRROR_SD_RUN_DIR": str(self.run.path.parent),
                },
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM, parent),
            )

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _READY_S
        while not any(line.startswith(b"ready ") for line in self._log.read_bytes().splitlines()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                shown = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
                raise SetupError("the stack does not start:\n  " + "\n  ".join(shown))
            time.sleep(0.05)
