"""Which malloc the workers run on, with the real library where it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mirror_sd import allocator
from mirror_sd.config import PoolConfig
from mirror_sd.errors import ConfigError
from workers.pool import allocation

needs_jemalloc = pytest.mark.skipif(
    allocator.find_jemalloc({}) is None, reason="libjemalloc2 is not installed"
)


def library(folder: Path) -> Path:
    file = folder / "libjemalloc.so.2"
    file.touch()
    return file


def ask(env: dict[str, str]) -> str:
    code = "from mirror_sd import allocator; print(allocator.running(), allocator.peak_bytes())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout


@needs_jemalloc
def test_a_process_with_the_variables_runs_on_jemalloc():
    name, peak = ask(allocator.environment("jemalloc", {})).split()
    assert name == "jemalloc" and int(peak) > 2**22


def test_a_process_without_them_runs_on_glibc():
    assert ask(allocator.environment("glibc", {})).startswith("glibc ")


def test_auto_takes_jemalloc_where_it_is(tmp_path):
    assert allocator.environment("auto", {}, [tmp_path]) == {}
    file = library(tmp_path)
    found = allocator.environment("auto", {}, [tmp_path / "no", tmp_path])
    assert found["LD_PRELOAD"] == str(file) and "background_thread" in found["MALLOC_CONF"]


def test_what_was_preloaded_and_set_before_stays(tmp_path):
    file = library(tmp_path)
    environ = {"LD_PRELOAD": f"/a.so:{file}", "MALLOC_CONF": "narenas:1"}
    found = allocator.environment("auto", environ, [tmp_path])
    assert found == {"LD_PRELOAD": f"{file}:/a.so", "MALLOC_CONF": "narenas:1"}


def test_a_path_that_is_set_is_taken_or_refused(tmp_path):
    file = tmp_path / "own.so"
    variable = {allocator.PATH_VARIABLE: str(file)}
    with pytest.raises(ConfigError, match="no such file"):
        allocator.environment("auto", variable, [])
    file.touch()
    assert allocator.find_jemalloc(variable, []) == file


def test_jemalloc_that_is_asked_for_and_absent_is_told_with_what_to_install():
    with pytest.raises(ConfigError, match="libjemalloc2"):
        allocator.environment("jemalloc", {}, [])


def test_only_workers_that_compute_on_the_cpu_get_one(monkeypatch):
    monkeypatch.setattr(allocator, "find_jemalloc", lambda *_: Path("/j.so"))
    assert allocation("cpu", PoolConfig())["LD_PRELOAD"] == "/j.so"
    assert allocation("cpu", PoolConfig(allocator="glibc")) == {}
    assert allocation("cpu", PoolConfig(engine="emulated")) == {}
    assert allocation("gpu", PoolConfig()) == {}


def test_the_pool_names_the_setting_that_cannot_be_met(monkeypatch):
    monkeypatch.setattr(allocator, "find_jemalloc", lambda *_: None)
    assert allocation("cpu", PoolConfig()) == {}
    with pytest.raises(ConfigError, match=r"pools\.cpu\.allocator: jemalloc is not found"):
        allocation("cpu", PoolConfig(allocator="jemalloc"))


@pytest.mark.parametrize(("device_class", "engine"), [("tpu", "xla"), ("cpu", "emulated")])
def test_jemalloc_for_workers_that_do_not_get_it_is_refused(device_class, engine):
    with pytest.raises(ConfigError, match=rf"pools\.{device_class}\.allocator is jemalloc"):
        allocation(device_class, PoolConfig(allocator="jemalloc", engine=engine))
    assert allocation(device_class, PoolConfig(allocator="glibc", engine=engine)) == {}
