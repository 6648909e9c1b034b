"""The supervisor's parts, each with real files, sockets and processes."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from mirror_sd import logs
from mirror_sd.child import Child, ChildSpec
from mirror_sd.config import Config, RunDir, load
from mirror_sd.errors import ConfigError, SetupError
from mirror_sd.supervisor import (
    background,
    edge,
    foreground,
    live_gauges,
    preflight,
    process_table,
    processes,
    run_directory,
)
from mirror_sd.supervisor.log_tail import LogTail, last_lines
from mirror_sd.supervisor.readiness import ReadinessCheck
from mirror_sd.supervisor.run_directory import Claim

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "base" / "8080")


@contextmanager
def process(code: str, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([sys.executable, "-c", code], **options)  # type: ignore[call-overload]
    try:
        yield started
    finally:
        started.kill()
        started.wait()
        if started.stdout is not None:
            started.stdout.close()


# The run directory


def test_claimed_directory_is_private_and_gone_after_release(run: RunDir) -> None:
    claim = Claim(run)
    claim.acquire()
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert int(run.supervisor_pid.read_text()) == os.getpid()
    assert run.metrics.is_dir() and run.nginx.is_dir() and run.tokenizer.is_dir()
    claim.release()
    assert not run.path.parent.exists()


def test_directory_of_a_live_supervisor_is_refused_and_left_alone(run: RunDir) -> None:
    holder = Claim(run)
    holder.acquire()
    with pytest.raises(SetupError, match=rf"already runs on port 8080 \(pid {os.getpid()}\)"):
        Claim(run).acquire()
    assert run.supervisor_pid.exists()
    holder.release()


def test_other_port_may_be_claimed_and_survives_the_first(run: RunDir) -> None:
    first, second = Claim(run), Claim(RunDir(run.path.parent / "8081"))
    first.acquire()
    second.acquire()
    first.release()
    assert second.run.supervisor_pid.exists()
    second.release()
    assert not run.path.parent.exists()


def test_what_a_killed_supervisor_left_is_cleared_though_its_pid_lives_again(run: RunDir) -> None:
    run.path.mkdir(parents=True)
    # This very process: a recorded pid says nothing, the lock does.
    run.supervisor_pid.write_text(str(os.getpid()))
    (run.path / "broker-gateway.sock").write_text("")
    (run.path / "logs").mkdir()
    (run.path / "logs" / "old.log").write_text("old")
    assert run_directory.supervisor_pid(run) is None
    claim = Claim(run)
    claim.acquire()
    assert sorted(path.name for path in run.path.iterdir()) == [
        "logs",
        "metrics",
        "nginx",
        "supervisor.pid",
        "tokenizer",
    ]
    assert list((run.path / "logs").iterdir()) == []
    claim.release()


def test_processes_that_a_killed_supervisor_left_are_ended(run: RunDir) -> None:
    run.nginx.mkdir(parents=True)
    ours = {**os.environ, "MIRROR_SD_CONFIG_JSON": str(run.config_json)}
    other = {**os.environ, "MIRROR_SD_CONFIG_JSON": str(run.path.parent / "8081" / "config.json")}
    with (
        process(SLEEP, env=ours) as gateway,
        process(SLEEP, cwd=run.nginx) as nginx,
        process(SLEEP, env=other) as stranger,
    ):
        time.sleep(0.3)
        claim = Claim(run)
        claim.acquire()
        claim.release()
        assert not psutil.pid_exists(gateway.pid)
        assert not psutil.pid_exists(nginx.pid)
        assert stranger.poll() is None


def test_pid_of_a_live_supervisor_is_found(run: RunDir) -> None:
    code = (
        "import pathlib, time\n"
        "from mirror_sd.config import RunDir\n"
        "from mirror_sd.supervisor.run_directory import Claim\n"
        f"Claim(RunDir(pathlib.Path({str(run.path)!r}))).acquire()\n"
        "print('claimed', flush=True); time.sleep(60)"
    )
    with process(code, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"claimed\n"
        assert run_directory.supervisor_pid(run) == holder.pid
        holder.kill()
        holder.wait()
        assert run_directory.supervisor_pid(run) is None


def test_path_too_long_for_a_unix_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="MIRROR_SD_RUN_DIR"):
        Claim(RunDir(tmp_path / ("x" * 100) / "8080")).acquire()


def test_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="Not a directory"):
        Claim(RunDir(tmp_path / "file" / "8080")).acquire()


def test_down_clears_what_a_killed_supervisor_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIRROR_SD_RUN_DIR", str(tmp_path / "base"))
    run = RunDir.of_port(8080)
    run.path.mkdir(parents=True)
    run.supervisor_pid.write_text("1")
    background.down(8080)
    assert not run.path.exists()
    with pytest.raises(SetupError, match="no stack runs on port 8080"):
        background.down(8080)


# Before the start


def test_taken_port_is_told_with_its_holder() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(SetupError, match=rf"port {port} is taken by .*\(pid {os.getpid()}\)"):
            preflight.check_port("127.0.0.1", port)
    preflight.check_port("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "300.1.2.3", "203.0.113.7"])
def test_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(SetupError, match=host):
        preflight.check_port(host, 0)


def test_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "NEEDED_MB", 1 << 40)
    with pytest.raises(SetupError, match=f"{tmp_path} has .* MB free"):
        preflight.check_disk(tmp_path)


def test_unknown_model_is_refused_before_anything_starts() -> None:
    config = load(overrides=["model.path=/no/such/model"], environ={})
    with pytest.raises(SetupError, match="/no/such/model"):
        preflight.find_model(config, print)


# nginx


def test_nginx_that_is_not_there_is_told() -> None:
    with pytest.raises(SetupError, match="MIRROR_SD_NGINX: /no/nginx"):
        edge.find_nginx({"MIRROR_SD_NGINX": "/no/nginx"})


def fake_nginx(directory: Path, version: str) -> Path:
    path = directory / "nginx"
    path.write_text(f"#!/bin/sh\necho '{version}' >&2\n")
    path.chmod(0o755)
    return path


def test_nginx_without_lua_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "_MODULES", ("no_such_module.so",))
    binary = fake_nginx(tmp_path, "nginx version: nginx/1.22 --modules-path=/nowhere")
    with pytest.raises(SetupError, match="no Lua module"):
        edge.find_nginx({"MIRROR_SD_NGINX": str(binary)})


@pytest.mark.parametrize(
    "version", ["nginx version: openresty/1.27.1", "--add-module=../ngx_lua-0.10.27"]
)
def test_nginx_with_lua_built_in_loads_no_module(tmp_path: Path, version: str) -> None:
    binary = fake_nginx(tmp_path, version)
    assert edge.find_nginx({"MIRROR_SD_NGINX": str(binary)}).modules == ()


def test_rendered_configuration_is_one_that_nginx_accepts(run: RunDir) -> None:
    claim = Claim(run)
    claim.acquire()
    try:
        nginx = edge.find_nginx()
        config = load(overrides=["server.port=18099", "server.host='::1'"], environ={})
        log = run_directory.logs(run) / "nginx.log"
        text = edge.render(config, run, nginx, log)
        (run.nginx / "nginx.conf").write_text(text)
        spec = processes.nginx_spec(run, nginx)
        done = subprocess.run([*spec.argv, "-t"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + log.read_text()
        assert "listen [::1]:18099;" in text
        assert f"unix:{run.gateway_socket(1)}" in text
    finally:
        claim.release()


# Commands


def test_children_know_their_role_and_their_run_directory(run: RunDir) -> None:
    config = Config()
    specs = [
        processes.nginx_spec(run, edge.Nginx(Path("nginx"), ())),
        processes.gateway_spec(config, run, 1),
        processes.broker_spec(run),
        processes.pool_spec(run, "cpu"),
    ]
    roles = [spec.env["MIRROR_SD_ROLE"] for spec in specs]
    assert roles == ["nginx", "gateway", "broker", "pool"]
    for spec in specs:
        assert spec.env["MIRROR_SD_CONFIG_JSON"] == str(run.config_json)
        assert spec.env["PROMETHEUS_MULTIPROC_DIR"] == str(run.metrics)
        assert processes.log_of(spec).parent == run_directory.logs(run)
    assert specs[1].env["MIRROR_SD_GATEWAY_INDEX"] == "1"
    assert specs[3].env["MIRROR_SD_CLASS"] == "cpu"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8080"),
        ("0.0.0.0", "http://127.0.0.1:8080"),
        ("::1", "http://[::1]:8080"),
        ("llm.example", "http://llm.example:8080"),
    ],
)
def test_announced_url_can_be_opened_on_this_machine(host: str, url: str) -> None:
    assert foreground.url(load(overrides=[f"server.host='{host}'"], environ={})) == url


# Logs and metrics


def test_errors_of_any_process_are_found_once(tmp_path: Path) -> None:
    tail = LogTail(tmp_path)
    broker, nginx = tmp_path / "broker.log", tmp_path / "nginx.log"
    broker.write_text("2026-11-29 16:00:00.1 INFO broker[1] x: fine\n")
    assert tail.new_errors() == []
    bad = "2026-11-29 16:00:00.1 ERROR broker[1] x: broken"
    with broker.open("a") as log:
        log.write(f"{bad}\nan unfinished li")
    nginx.write_text("2026/11/29 16:00:00 [warn] 1#1: hm\n2026/11/29 16:00:00 [emerg] 1#1: no\n")
    assert tail.new_errors() == [
        ("broker", bad),
        ("nginx", "2026/11/29 16:00:00 [emerg] 1#1: no"),
    ]
    assert tail.new_errors() == []


def test_flood_of_errors_is_shortened(tmp_path: Path) -> None:
    (tmp_path / "w.log").write_text("2026-11-29 16:00:00.1 ERROR w[1] x: no\n" * 500)
    found = LogTail(tmp_path).new_errors()
    assert len(found) == 21
    assert "480 more lines" in found[-1][1]


def test_log_is_kept_to_a_size_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mirror_sd.supervisor.log_tail._LARGEST_BYTES", 1000)
    tail = LogTail(tmp_path)
    with (tmp_path / "w.log").open("ab", buffering=0) as log:
        for number in range(500):
            log.write(f"line {number}\n".encode())
            if number % 10 == 0:
                tail.new_errors()
        size = (tmp_path / "w.log").stat().st_size
    assert size < 1500
    assert (tmp_path / "w.old").exists()


def test_last_lines_of_a_log_are_quoted(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text("".join(f"{number}\n\n" for number in range(5000)))
    assert last_lines(tmp_path / "x.log", 2) == ["4998", "4999"]
    assert last_lines(tmp_path / "none.log", 2) == []


def test_gauges_of_dead_processes_are_forgotten(tmp_path: Path) -> None:
    with process(SLEEP) as dead:
        pass
    for pid in (dead.pid, os.getpid()):
        (tmp_path / f"gauge_livesum_{pid}.db").write_bytes(b"")
        (tmp_path / f"counter_{pid}.db").write_bytes(b"")
    assert live_gauges.forget_dead(tmp_path) == [dead.pid]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted(
        [f"counter_{dead.pid}.db", f"counter_{os.getpid()}.db", f"gauge_livesum_{os.getpid()}.db"]
    )


@pytest.mark.parametrize("as_json", [False, True])
def test_log_lines_are_plain_or_json(as_json: bool, capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        logs.configure("broker", as_json=as_json)
        logging.getLogger("mirror_sd.x").warning("request %s failed", "r-1")
    finally:
        root.handlers[:], root.level = handlers, level
        logging.captureWarnings(False)
    line = capfd.readouterr().err.strip()
    if as_json:
        entry = json.loads(line)
        assert (entry["level"], entry["role"], entry["message"]) == (
            "WARNING",
            "broker",
            "request r-1 failed",
        )
    else:
        assert line.endswith(f"WARNING broker[{os.getpid()}] mirror_sd.x: request r-1 failed")


def test_unknown_log_level_is_told() -> None:
    with pytest.raises(ConfigError, match="LOUD"):
        logs.configure("broker", level="loud")


# Readiness


class _Server(ThreadingHTTPServer):
    answers: dict[str, int]
    asked: list[str]


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def _answer(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(self.server.answers[self.path])
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = _answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def http_server(**answers: int) -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.asked = []
        server.answers = {"/health": 200, "/v1/completions": 200, **answers}
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_ready_is_a_generation_after_health() -> None:
    with http_server() as server:
        check = ReadinessCheck("127.0.0.1", server.server_port, "m")
        check.start()
        check.join(5)
        assert check.is_ready
        assert server.asked == ["GET /health", "POST /v1/completions"]


def test_stack_that_cannot_generate_is_not_ready_and_says_why() -> None:
    with http_server(**{"/v1/completions": 503}) as server:
        check = ReadinessCheck("127.0.0.1", server.server_port, "m")
        check.start()
        time.sleep(0.5)
        check.stop()
        check.join(5)
        assert not check.is_ready
        assert "POST /v1/completions: 503" in check.last_answer


# Status


def test_each_process_is_listed_once_with_its_role() -> None:
    fork = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"
    children = [
        Child(ChildSpec("g", [sys.executable, "-c", fork], {"MIRROR_SD_ROLE": "gateway"})),
        Child(ChildSpec("b", [sys.executable, "-c", SLEEP], {"MIRROR_SD_ROLE": "broker"})),
        Child(
            ChildSpec(
                "p",
                [sys.executable, "-c", fork],
                {"MIRROR_SD_ROLE": "pool", "MIRROR_SD_CLASS": "cpu"},
            )
        ),
    ]
    for child in children:
        child.start()
    try:
        deadline = time.monotonic() + 5
        pids = [child.pid for child in children]
        while True:
            table = [p for p in process_table.processes(os.getpid()) if p.role != "supervisor"]
            mine = [p for p in table if p.pid in pids or _parent(p.pid) in pids]
            if len(mine) == 5 or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        assert sorted((p.role, p.device_class) for p in mine) == [
            ("broker", None),
            ("gateway", None),
            ("gateway-master", None),
            ("pool", "cpu"),
            ("worker", "cpu"),
        ]
        assert len({p.pid for p in mine}) == 5
    finally:
        for child in children:
            child.kill()


def _parent(pid: int) -> int | None:
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return None


def test_load_is_unknown_while_no_gateway_answers(run: RunDir) -> None:
    run.path.mkdir(parents=True)
    run.gateway_socket(0).write_text("not a socket")
    assert process_table.load(run) == {
        "running": None,
        "waiting": None,
        "kv_blocks_used": None,
        "kv_blocks_free": None,
        "workers": None,
    }
