"""The command line as a person meets it: help, versions, errors; each a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mirror_sd import __version__
from mirror_sd.cli import app

ROOT = Path(__file__).resolve().parents[2]


def cli(
    *arguments: str, environ: dict[str, str] | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mirror_sd.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **(environ or {})},
        input=stdin,
    )


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ((), ("up", "down", "status", "generate", "model", "bench", "--version")),
        (("up",), ("--port", "--config", "--set", "--detach", "--log-json", "server.gateways=4")),
        (("down",), ("--port", "8080")),
        (("status",), ("--port", "--json", "--watch", "kv_blocks_used", "degrade_level")),
        (
            ("generate",),
            (
                "--max-tokens",
                "--temperature",
                "--top-p",
                "--top-k",
                "--seed",
                "--speculation",
                "--stats",
                "--model",
                "--precision",
                "--raw",
                "echo",
            ),
        ),
        (("model",), ("pull", "list")),
        (("key",), ("add", "list", "revoke")),
        (("policy",), ("show", "put")),
        (("route",), ("--prompt-tokens", "--qps", "--tier", "--json")),
        (("emulate",), ("--class", "--temperature", "--fault", "slow_start", "--reset")),
        (("key", "add"), ("--tenant", "--tier", "--tokens-per-minute", "server.keys_file", "acme")),
        (("model", "pull"), ("MIRROR_SD_CACHE", "smollm2-135m-instruct")),
    ],
)
def test_help_names_every_option_and_gives_an_example(
    command: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = cli(*command, "--help")
    assert done.returncode == 0, done.stderr
    for word in words:
        assert word in done.stdout


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, mirror_sd.cli; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout.split()
    heavy = {"torch", "transformers", "tokenizers", "numpy", "zmq", "pydantic", "psutil", "falcon"}
    assert heavy.isdisjoint(loaded)


def test_version_is_printed() -> None:
    assert cli("--version").stdout == f"mirror-sd {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("up", "--port", "0"),
        ("up", "--port", "many"),
        ("generate",),
        ("generate", "x", "--speculation", "perhaps"),
        ("generate", "x", "--temperature", "-1"),
        ("status", "--what"),
    ],
)
def test_wrong_usage_is_status_2(arguments: tuple[str, ...]) -> None:
    done = cli(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("up", "--set", "server.prot=1"), ("server.prot", "no such key")),
        (("up", "--config", "/nowhere.yaml"), ("/nowhere.yaml", "No such file")),
        (("down", "--port", "9"), ("no stack runs on port 9",)),
        (("status", "--port", "9"), ("no stack runs on port 9",)),
        (("weights", "--port", "9"), ("no stack runs on port 9",)),
        (("model", "pull", "gpt-5"), ("gpt-5", "smollm2-135m-instruct")),
        (("generate", "x", "--model", "/no/model"), ("/no/model",)),
        (("generate", "x", "--precision", "int1"), ("pools.cpu.precision", "int1", "fp32")),
    ],
)
def test_error_is_one_sentence_and_status_1(
    tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = cli(*arguments, environ={"MIRROR_SD_RUN_DIR": str(tmp_path / "run")})
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_models_are_listed_with_where_they_are(tmp_path: Path) -> None:
    done = cli("model", "list", environ={"MIRROR_SD_CACHE": str(tmp_path)})
    assert done.returncode == 0
    assert "smollm2-135m-instruct" in done.stdout
    assert "not pulled" in done.stdout


def test_help_is_there_at_once() -> None:
    begin = os.times()
    assert cli("--help").returncode == 0
    end = os.times()
    spent = end.children_user + end.children_system - begin.children_user - begin.children_system
    assert spent < 0.5, f"{spent:.2f} s of CPU"


@pytest.mark.parametrize("command", ["bench", "distil"])
@pytest.mark.parametrize(("status", "said"), [(0, ""), (1, ""), (130, "mirror-sd: interrupted\n")])
def test_what_a_measurement_or_a_training_ends_with_is_what_the_command_ends_with(
    monkeypatch: pytest.MonkeyPatch, command: str, status: int, said: str
) -> None:
    nested = typer.Typer()

    @nested.command()
    def leave() -> None:
        if status == 130:
            raise KeyboardInterrupt
        raise typer.Exit(status)

    monkeypatch.setattr("mirror_sd.bench.cli.app", nested)
    monkeypatch.setattr("mirror_sd.training.cli.app", nested)
    done = CliRunner().invoke(app, [command])
    assert done.exit_code == status
    assert done.stderr == said
