"""Who may use a run directory, and what is left in it: real locks, files and processes."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from mirror_sd.errors import SetupError
from mirror_sd.run_dir import RunDir
from mirror_sd.supervisor import (
    background,
    run_directory,
)
from mirror_sd.supervisor.run_directory import Claim
from tests.unit.run_processes import SLEEP, process, run

__all__ = ["run"]  # a fixture


def test_claimed_directory_is_private_and_gone_after_release(run: RunDir) -> None:
    claim = Claim(run)
    claim.acquire()
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert int(run.supervisor_pid.read_text()) == os.getpid()
    assert run.metrics.is_dir() and run.nginx.is_dir() and run.tokenizer.is_dir()
    claim.release()
    assert not run.path.parent.exists()


def test_each_stack_has_an_admin_token_of_its_own_that_only_its_user_reads(run: RunDir) -> None:
    tokens = set()
    for _ in range(2):
        claim = Claim(run)
        claim.acquire()
        tokens.add(run_directory.write_admin_token(run))
        assert run.admin_token.stat().st_mode & 0o777 == 0o600
        assert run.admin_token.read_text() in tokens
        claim.release()
    assert len(tokens) == 2
    assert all(len(token) >= 43 for token in tokens)


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
        "from mirror_sd.run_dir import RunDir\n"
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
