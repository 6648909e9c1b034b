"""What the supervisor sees of its processes: logs, gauges, the process table."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from mirror_sd import logs
from mirror_sd.child import Child, ChildSpec
from mirror_sd.errors import ConfigError
from mirror_sd.run_dir import RunDir
from mirror_sd.supervisor import (
    live_gauges,
    process_table,
)
from mirror_sd.supervisor.log_tail import LogTail, last_lines
from tests.unit.run_processes import SLEEP, process, run

__all__ = ["run"]  # a fixture


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
        "kv_blocks_peak": None,
        "workers": None,
    }
