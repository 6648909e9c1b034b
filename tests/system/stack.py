"""A stack of a test's own: started as a user would, watched, hurt, stopped, inspected."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import tokenizers
from prometheus_client.parser import text_string_to_metric_families

from mirror_sd.admin_client import AdminClient
from mirror_sd.supervisor.preflight import free_ports

ROOT = Path(__file__).resolve().parents[2]
CLI = (sys.executable, "-m", "mirror_sd.cli")
MODEL = "smollm2-135m-instruct"


def free_port() -> int:
    [port] = free_ports(1)
    return port


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As nginx binds: connections in TIME_WAIT are no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def until(claim: Callable[[], Any], timeout_s: float, what: str, every_s: float = 0.02) -> Any:
    """The first true value of `claim`; fails with `what` when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        if value := claim():
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(every_s)


def on_this_load(seconds: float) -> float:
    """A limit meant for an otherwise idle machine, stretched where others use the cores as well."""
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


class Stack:
    """`settings` are `--set` items. `command` starts it in the foreground: `mirror-sd up`, or
    `ops/up`. `base`, where given, is another stack's, to keep both run directories in one. Its
    admin port and its file of API keys, which is not there at first, are its own."""

    def __init__(
        self,
        settings: Sequence[str] = (),
        command: Sequence[str] = (*CLI, "up"),
        base: Path | None = None,
    ) -> None:
        self.port, self.admin_port = free_ports(2)
        # Short: paths of unix sockets are limited to 107 bytes.
        self.base = base or Path(tempfile.mkdtemp(prefix="msd-", dir="/tmp"))
        self.url = f"http://127.0.0.1:{self.port}"
        self.keys = self.base / f"{self.port}-keys.json"
        own = (f"server.admin_port={self.admin_port}", f"server.keys_file={self.keys}")
        self._arguments = [*command, "--port", str(self.port)]
        for item in (*own, *settings):
            self._arguments += ["--set", item]
        self._log = self.base / f"{self.port}.log"
        self._seen: dict[int, psutil.Process] = {}
        self.supervisor: subprocess.Popen[bytes] | None = None
        self.ready_after_s = 0.0

    @property
    def environ(self) -> dict[str, str]:
        return os.environ | {"MIRROR_SD_RUN_DIR": str(self.base / "run")}

    @property
    def run(self) -> Path:
        """The run directory: sockets, pid, logs; gone when the stack is."""
        return self.base / "run" / str(self.port)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    # Life

    def launch(self) -> None:
        """Start the command without waiting for anything."""
        with self._log.open("wb") as log:
            self.supervisor = subprocess.Popen(
                self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environ,
                cwd=ROOT,
                start_new_session=True,
            )

    def start(self, timeout_s: float = 120.0) -> Stack:
        begun = time.monotonic()
        self.launch()
        assert self.supervisor is not None
        line = f"ready {self.url}"
        while line not in self.log.splitlines():
            assert self.supervisor.poll() is None, f"ended before it was ready:\n{self.log}"
            assert time.monotonic() - begun < timeout_s, f"not ready in {timeout_s} s:\n{self.log}"
            time.sleep(0.05)
        self.ready_after_s = time.monotonic() - begun
        self.note_processes()
        return self

    def signal(self, number: int) -> None:
        assert self.supervisor is not None
        self.note_processes()
        self.supervisor.send_signal(number)

    def wait(self, timeout_s: float = 30.0) -> int:
        assert self.supervisor is not None
        return self.supervisor.wait(timeout_s)

    def stop(self) -> None:
        """SIGTERM, then the claims that every stack must meet when it is gone."""
        assert self.supervisor is not None
        if self.supervisor.poll() is None:
            self.signal(signal.SIGTERM)
        try:
            status = self.wait()
            assert status == 0, f"status {status}:\n{self.log}"
            self.assert_nothing_left()
        finally:
            self.destroy()

    def assert_nothing_left(self) -> None:
        until(lambda: not self.alive(), 3.0, f"every process gone, still there: {self.alive()}")
        assert not self.run.exists(), f"left behind: {sorted(self.run.rglob('*'))}"
        assert is_free(self.port), f"port {self.port} is still taken"

    def destroy(self) -> None:
        """End what a failed test left, by the process ids this stack is known to have had."""
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.supervisor is not None:
            self.supervisor.wait(10)
        shutil.rmtree(self.base, ignore_errors=True)

    # Processes

    def note_processes(self) -> None:
        """Remember every process of the stack, so that later claims hold for respawned ones too."""
        assert self.supervisor is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.supervisor.pid)
            for process in (root, *root.children(recursive=True)):
                self._seen.setdefault(process.pid, process)

    def alive(self) -> list[psutil.Process]:
        return [
            process
            for process in self._seen.values()
            # psutil compares creation times: a recycled pid is not ours.
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        ]

    def status(self) -> dict[str, Any]:
        done = self.cli("status", "--port", str(self.port), "--json")
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def pids(self, role: str) -> list[int]:
        return [item["pid"] for item in self.status()["processes"] if item["role"] == role]

    def cli(self, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*CLI, *arguments],
            capture_output=True,
            text=True,
            env=self.environ,
            cwd=ROOT,
            timeout=timeout_s,
        )

    # Clients

    def client(self, key: str = "unused") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def http(self, key: str | None = None) -> httpx.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, timeout=120, headers=headers)

    def knows(self, key: str) -> bool:
        """Whether all of nginx's workers know a key that was just added. Each reads the file for
        itself, and until then lets anybody in where there was no key, as another tenant."""

        def status(key: str | None) -> int:
            with self.http(key) as http:
                return http.get("/v1/models").status_code

        return all(status(None) == 401 and status(key) == 200 for _ in range(6))

    def admin(self) -> AdminClient:
        token = (self.run / "admin-token").read_text().strip()
        return AdminClient(self.admin_port, token)

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The one that the gateways use."""
        return tokenizers.Tokenizer.from_file(str(self.run / "tokenizer" / "tokenizer.json"))

    # Metrics

    def metrics_text(self) -> str:
        answer = httpx.get(f"{self.url}/metrics", timeout=10)
        assert answer.status_code == 200, answer.text
        return answer.text

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        for family in text_string_to_metric_families(self.metrics_text()):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples of that name whose labels include `labels`."""
        return sum(
            value
            for sample, found, value in self.samples()
            if sample == name and labels.items() <= found.items()
        )

    def idle(self) -> bool:
        """Nothing waits, runs, or holds KV blocks."""
        busy = {
            "mirror_broker_queue_depth",
            "mirror_broker_in_flight",
            "mirror_worker_running_sequences",
            "mirror_worker_kv_blocks_used",
        }
        seen = dict.fromkeys(busy, 0.0)
        found = set()
        for name, _, value in self.samples():
            if name in busy:
                found.add(name)
                seen[name] += value
        return found == busy and not any(seen.values())


@contextlib.contextmanager
def started(settings: Sequence[str]) -> Iterator[Stack]:
    """A stack that runs within the block; that it leaves nothing behind is checked at its end."""
    stack = Stack(settings)
    try:
        stack.start()
        yield stack
        stack.stop()
    finally:
        stack.destroy()
