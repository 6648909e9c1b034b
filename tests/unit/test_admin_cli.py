"""The commands that look into a stack's control plane, against a stand-in for its admin port."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mirror_sd import admin_cli, routing
from mirror_sd.config import load
from mirror_sd.errors import SetupError
from mirror_sd.run_dir import RunDir

PORT = 18111
TOKEN = "a-token"


class _Admin(ThreadingHTTPServer):
    answers: dict[str, tuple[int, Any]]
    asked: list[tuple[str, str, bytes, str | None]]


class _Handler(BaseHTTPRequestHandler):
    server: _Admin

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind = self.headers.get("Content-Type")
        self.server.asked.append((self.command, self.path, body, kind))
        status, document = self.server.answers[self.path.partition("?")[0]]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            status, document = 401, {"error": {"message": "bad token"}}
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = _answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def admin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Admin]:
    """The admin port of a stack whose run directory is there."""
    monkeypatch.setenv("MIRROR_SD_RUN_DIR", str(tmp_path))
    with _Admin(("127.0.0.1", 0), _Handler) as server:
        server.asked, server.answers = [], {}
        settings = [f"server.admin_port={server.server_port}", "pools.gpu.engine=emulated"]
        run = RunDir.of_port(PORT)
        run.path.mkdir()
        run.config_json.write_text(load(overrides=settings, environ={}).model_dump_json())
        run.admin_token.write_text(TOKEN + "\n")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def cli(*arguments: str) -> str:
    app = typer.Typer()
    admin_cli.register(app)
    done = CliRunner().invoke(app, [*arguments, "--port", str(PORT)])
    if isinstance(done.exception, SetupError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


DECISION = {
    "class": "gpu",
    "shares": {"cpu": 0.25, "gpu": 0.75},
    "reasons": ["a prompt of 30 tokens is below 50"],
}


def test_route_is_told_in_words_or_as_json(admin: _Admin) -> None:
    admin.answers["/admin/route"] = (200, DECISION)
    words = cli("route", "--prompt-tokens", "30", "--qps", "10", "--tier", "vip")
    assert words.splitlines() == [
        "goes to gpu",
        "shares: gpu 75 %, cpu 25 %",
        "- a prompt of 30 tokens is below 50",
    ]
    assert admin.asked[0][1] == "/admin/route?prompt_tokens=30&tier=vip&tenant=default&qps=10.0"
    assert json.loads(cli("route", "--prompt-tokens", "30", "--json")) == DECISION
    assert "qps" not in admin.asked[1][1]


def test_route_of_a_machine_without_a_stack_says_so() -> None:
    assert next(routing.in_words(DECISION, is_live=False)).startswith("goes to gpu (no stack runs")


def test_policy_is_put_as_json_or_as_lua(admin: _Admin, tmp_path: Path) -> None:
    admin.answers["/admin/policy"] = (200, {"fallback": {"cpu": 1}})
    shown = cli("policy", "show")
    assert json.loads(shown) == {"fallback": {"cpu": 1}}
    for name, kind in (("policy.json", "application/json"), ("policy.lua", "text/x-lua")):
        file = tmp_path / name
        file.write_text(shown)
        cli("policy", "put", str(file))
        assert admin.asked[-1] == ("PUT", "/admin/policy", shown.encode(), kind)


def test_refusal_of_the_admin_port_is_the_message_of_the_command(
    admin: _Admin, tmp_path: Path
) -> None:
    admin.answers["/admin/policy"] = (400, {"error": {"message": "policy: caps.gpu is -1"}})
    file = tmp_path / "policy.json"
    file.write_text("{}")
    with pytest.raises(SetupError, match=r"caps\.gpu is -1"):
        cli("policy", "put", str(file))
    with pytest.raises(SetupError, match="No such file"):
        cli("policy", "put", str(tmp_path / "none.json"))
    RunDir.of_port(PORT).admin_token.write_text("another")
    with pytest.raises(SetupError, match="bad token"):
        cli("policy", "show")


def test_weights_are_shown(admin: _Admin) -> None:
    admin.answers["/admin/weights"] = (200, {"classes": {"gpu": {"factor": 0.5}}})
    assert json.loads(cli("weights"))["classes"]["gpu"]["factor"] == 0.5


def test_what_is_set_of_an_emulated_class_stays_until_it_is_reset(admin: _Admin) -> None:
    path = RunDir.of_port(PORT).emulation("gpu")

    def emulate(*arguments: str) -> Any:
        cli("emulate", "--class", "gpu", *arguments)
        return json.loads(path.read_text())

    assert emulate("--temperature", "86") == {"temperature_c": 86.0}
    assert emulate("--fault", "hang", "--latency-factor", "2") == {
        "temperature_c": 86.0,
        "fault": "hang",
        "latency_factor": 2.0,
    }
    assert emulate("--fault", "none") == {"temperature_c": 86.0, "latency_factor": 2.0}
    assert emulate("--reset", "--utilisation", "0.9") == {"utilisation": 0.9}
    assert emulate("--reset") == {}
    assert [p.name for p in path.parent.glob("*emulation*")] == [path.name]


@pytest.mark.parametrize("text", ["5", "[1]", "null", "{"])
def test_damaged_control_file_is_told_and_written_anew_by_reset(admin: _Admin, text: str) -> None:
    path = RunDir.of_port(PORT).emulation("gpu")
    path.write_text(text)
    with pytest.raises(SetupError, match="write it anew by --reset"):
        cli("emulate", "--class", "gpu", "--temperature", "86")
    cli("emulate", "--class", "gpu", "--temperature", "86", "--reset")
    assert json.loads(path.read_text()) == {"temperature_c": 86.0}


def test_stack_that_was_killed_cannot_be_made_to_suffer(admin: _Admin) -> None:
    run = RunDir.of_port(PORT)
    settings = ["server.admin_port=1", "pools.gpu.engine=emulated"]
    run.config_json.write_text(load(overrides=settings, environ={}).model_dump_json())
    with pytest.raises(SetupError, match="does not answer"):
        cli("emulate", "--class", "gpu", "--temperature", "86")
    assert not run.emulation("gpu").exists()


def test_class_that_is_not_emulated_is_refused(admin: _Admin) -> None:
    with pytest.raises(SetupError, match="'cpu' is no emulated class of this stack"):
        cli("emulate", "--class", "cpu", "--temperature", "86")
    with pytest.raises(SetupError, match="temperature_c is nan"):
        cli("emulate", "--class", "gpu", "--temperature", "nan")


def test_port_without_a_stack_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRROR_SD_RUN_DIR", str(tmp_path))
    for command in (["weights"], ["policy", "show"], ["emulate", "--class", "gpu"]):
        with pytest.raises(SetupError, match=f"no stack runs on port {PORT}"):
            cli(*command)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"server": {"port": 0}}', '{"older": 1}'])
def test_damaged_configuration_of_a_stack_is_told(admin: _Admin, text: str) -> None:
    RunDir.of_port(PORT).config_json.write_text(text)
    with pytest.raises(SetupError, match="is damaged, or of another version"):
        cli("weights")


@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
def test_route_needs_no_stack_where_a_killed_one_left_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIRROR_SD_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("MIRROR_SD__SERVER__KEYS_FILE", str(tmp_path / "keys.json"))
    run = RunDir.of_port(PORT)
    run.path.mkdir()
    run.admin_token.write_text(TOKEN)
    run.config_json.write_text(load(overrides=["server.admin_port=1"]).model_dump_json())
    decision, is_live = routing.explain({"prompt_tokens": 30, "tier": "vip"}, PORT, None, ())
    assert decision["class"] == "cpu" and not is_live


@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
def test_route_without_a_stack_names_the_line_of_a_bad_policy(tmp_path: Path) -> None:
    policy = tmp_path / "policy.lua"
    policy.write_text("return {\n    colour = 1,\n}\n")
    overrides = [f"server.policy_file={policy}", f"server.keys_file={tmp_path / 'keys.json'}"]
    with pytest.raises(SetupError, match=r"does not start: policy: line 2: colour: there is no"):
        routing.explain({"prompt_tokens": 30, "tier": "vip"}, PORT, None, overrides)
