"""What is checked and made before a stack starts, and when it is ready."""

from __future__ import annotations

import json
import os
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mirror_sd.api.tokenizer import Tokenizer
from mirror_sd.config import Config, ServerConfig, load
from mirror_sd.errors import ConfigError, ModelError, SetupError
from mirror_sd.keys import KeyFile
from mirror_sd.run_dir import RunDir
from mirror_sd.supervisor import (
    edge,
    foreground,
    preflight,
    processes,
    run_directory,
)
from mirror_sd.supervisor.readiness import ReadinessCheck
from mirror_sd.supervisor.run_directory import Claim


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "base" / "8080")


def test_taken_port_is_told_with_its_holder() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(SetupError, match=rf"port {port} is taken by .*\(pid {os.getpid()}\)"):
            preflight.check_port("127.0.0.1", port)
    preflight.check_port("127.0.0.1", port)


def test_admin_port_is_another_than_the_public_one_and_free_too() -> None:
    with (
        socket.socket() as holder,
        pytest.raises(SetupError, match=r"choose another by server\.ad"),
    ):
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        [free] = preflight.free_ports(1)
        preflight.check_ports(ServerConfig(port=free, admin_port=taken))
    with pytest.raises(SetupError, match=r"server\.admin_port: 8080"):
        preflight.check_ports(ServerConfig(port=8080, admin_port=8080))


def test_drafters_that_cannot_listen_are_told_before_anything_starts() -> None:
    def check(*drafters: str) -> None:
        settings = [f"drafters.{drafter}" for drafter in ("cpu.serves=[cpu]", *drafters)]
        preflight.check_drafters(load(overrides=settings, environ={}))

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(SetupError, match=rf"{port} is taken by .*drafters\.cpu\.address"):
            check(f"cpu.address=tcp://127.0.0.1:{port}")
    for host in ("203.0.113.7", "no.such.host.invalid"):
        with pytest.raises(SetupError, match=host):
            check(f"cpu.address=tcp://{host}:7100")
    [free] = preflight.free_ports(1)
    with pytest.raises(ConfigError, match=r"tpu\.address: .* that of drafters\.cpu\.address"):
        check(*(f"{name}.address=tcp://127.0.0.1:{free}" for name in ("cpu", "tpu")))
    with pytest.raises(ConfigError, match=r"that of server\.port"):
        check("cpu.address=tcp://127.0.0.1:8080")
    check(f"cpu.address=tcp://127.0.0.1:{free}", "tpu={}")


@pytest.mark.parametrize("host", ["no.such.host.invalid", "300.1.2.3", "203.0.113.7"])
def test_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(SetupError, match=host):
        preflight.check_port(host, 0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "203.0.113.7", "no.such.host.invalid"])
def test_address_that_others_reach_needs_a_key_that_is_valid(host: str, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    settings = [f"server.host='{host}'", f"server.keys_file={keys.path}"]
    config = load(overrides=settings, environ={})
    for _ in range(2):  # without any key, then with a revoked one
        with pytest.raises(SetupError, match="mirror-sd key add"):
            preflight.check_exposure(config)
        keys.revoke(keys.add("acme", "vip")[0].id)
    keys.add("acme", "vip")
    assert preflight.check_exposure(config)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_loopback_needs_no_key(host: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    config = load(overrides=[f"server.host='{host}'", f"server.keys_file={file}"], environ={})
    assert not preflight.check_exposure(config)
    file.write_text("{}")
    with pytest.raises(SetupError, match=str(file)):
        preflight.check_exposure(config)


def test_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "NEEDED_MB", 1 << 40)
    with pytest.raises(SetupError, match=f"{tmp_path} has .* MB free"):
        preflight.check_disk(tmp_path)


def test_unknown_model_is_refused_before_anything_starts() -> None:
    config = load(overrides=["model.path=/no/such/model"], environ={})
    with pytest.raises(SetupError, match="/no/such/model"):
        preflight.find_model(config, print)


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
        config = load(
            overrides=[
                "server.port=18099",
                "server.host='::1'",
                "server.request_timeout_s=3",
            ],
            environ={},
        )
        log = run_directory.logs(run) / "nginx.log"
        text = edge.render(config, run, nginx, log, "org/model-1.5B")
        (run.nginx / "nginx.conf").write_text(text)
        spec = processes.nginx_spec(run, nginx)
        done = subprocess.run([*spec.argv, "-t"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + log.read_text()
        assert "listen [::1]:18099;" in text
        assert "listen 127.0.0.1:19099;" in text
        assert "may_be_open = true" in text
        assert "models = [==[org/model-1.5B]==]" in text
        # Later than the gateway's own limit, which has the right error.
        assert "proxy_read_timeout 13s;" in text
        assert f"unix:{run.gateway_socket(1)}" in text
    finally:
        claim.release()


def test_name_of_a_model_cannot_leave_its_place_in_the_configuration(run: RunDir) -> None:
    nginx = edge.Nginx(Path("nginx"), ())
    for name in ("]==], x = [==[", "a,b", "a\nb", "a b"):
        text = edge.render(load(environ={}), run, nginx, Path("nginx.log"), name)
        assert "models = [==[]==]" in text


def test_edge_is_closed_without_keys_where_others_can_reach_it(run: RunDir) -> None:
    nginx = edge.Nginx(Path("nginx"), ())
    for host, opening in (("0.0.0.0", "false"), ("127.0.0.1", "true"), ("localhost", "true")):
        config = load(overrides=[f"server.host={host}"], environ={})
        text = edge.render(config, run, nginx, Path("nginx.log"))
        assert f"may_be_open = {opening}" in text
        # The admin server is nobody else's business either way.
        assert "listen 127.0.0.1:9080;" in text


def test_children_know_their_role_and_their_run_directory(run: RunDir) -> None:
    config = Config()
    specs = [
        processes.nginx_spec(run, edge.Nginx(Path("nginx"), ())),
        processes.gateway_spec(config, run, 1),
        processes.broker_spec(run),
        processes.pool_spec(run, "cpu"),
        processes.probe_spec(run),
    ]
    roles = [spec.env["MIRROR_SD_ROLE"] for spec in specs]
    assert roles == ["nginx", "gateway", "broker", "pool", "probe"]
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
        # nginx listens there for IPv6 alone.
        ("::", "http://[::1]:8080"),
        ("::1", "http://[::1]:8080"),
        ("llm.example", "http://llm.example:8080"),
    ],
)
def test_announced_url_can_be_opened_on_this_machine(host: str, url: str) -> None:
    assert foreground.url(load(overrides=[f"server.host='{host}'"], environ={})) == url


class _Server(ThreadingHTTPServer):
    answers: dict[str, int]
    asked: list[str]


class _Handler(BaseHTTPRequestHandler):
    server: _Server | _GatewaySocket

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


class _GatewaySocket(socketserver.UnixStreamServer):
    answers: dict[str, int]
    asked: list[str]

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        return self.socket.accept()[0], ("", 0)


def test_where_a_key_is_needed_the_generation_is_asked_of_a_gateway(tmp_path: Path) -> None:
    path = tmp_path / "gateway-0.sock"
    with (
        http_server(**{"/v1/completions": 401}) as server,
        _GatewaySocket(str(path), _Handler) as gateway,
    ):
        gateway.asked, gateway.answers = [], {"/v1/completions": 200}
        thread = threading.Thread(target=gateway.handle_request)
        thread.start()
        check = ReadinessCheck("127.0.0.1", server.server_port, "m", path)
        check.start()
        check.join(5)
        thread.join(5)
        assert check.is_ready
        assert gateway.asked == ["POST /v1/completions"]


class _StateHandler(_Handler):
    """A gateway whose broker has one more worker each time that it is asked."""

    def do_GET(self) -> None:
        assert isinstance(self.server, _GatewaySocket)
        self.server.asked.append(f"GET {self.path}")
        there = ["cpu", "gpu"][: len(self.server.asked) - 1]
        body = json.dumps({"workers": [{"device_class": name} for name in there]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_ready_waits_for_a_worker_of_each_class(tmp_path: Path) -> None:
    path = tmp_path / "gateway-0.sock"
    with http_server() as server, _GatewaySocket(str(path), _StateHandler) as gateway:
        gateway.asked = []
        thread = threading.Thread(target=gateway.serve_forever)
        thread.start()
        check = ReadinessCheck("127.0.0.1", server.server_port, "m", path, ("cpu", "gpu", "tpu"))
        check.start()
        time.sleep(0.8)
        assert not check.is_ready
        assert check.last_answer == "no worker yet: tpu"
        check.stop()
        check.join(5)
        check = ReadinessCheck("127.0.0.1", server.server_port, "m", path, ("cpu", "gpu"))
        check.start()
        check.join(5)
        gateway.shutdown()
        thread.join(5)
        assert check.is_ready
        assert server.asked[-1] == "POST /v1/completions"


def test_stack_that_cannot_generate_is_not_ready_and_says_why() -> None:
    with http_server(**{"/v1/completions": 503}) as server:
        check = ReadinessCheck("127.0.0.1", server.server_port, "m")
        check.start()
        time.sleep(0.5)
        check.stop()
        check.join(5)
        assert not check.is_ready
        assert "POST /v1/completions: 503" in check.last_answer


def test_a_stack_in_which_all_is_emulated_needs_no_model(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MIRROR_SD_CACHE", str(tmp_path / "empty"))
    emulated = load(overrides=["pools.cpu.engine=emulated"], environ={})
    assert foreground.lay_out_tokenizer(emulated, run) == "smollm2-135m-instruct"
    assert "a small tokenizer stands in" in caplog.text
    tokenizer = Tokenizer.from_directory(run.tokenizer)
    ids = tokenizer.encode_chat([("user", "where is my order? 你好")])
    assert "where is my order? 你好" in tokenizer.decode(ids)
    mixed = load(
        overrides=["pools.gpu.engine=emulated", f"model.path={tmp_path / 'none.gguf'}"], environ={}
    )
    with pytest.raises(ModelError):
        foreground.lay_out_tokenizer(mixed, run)
