"""How the C++ part is built: what is compiled again, and what happens where it cannot be."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from mirror_sd.backends.native import build_extension
from mirror_sd.backends.native.build_extension import BuildError, Compiler, Unit

ROOT = Path(__file__).resolve().parents[2]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "answer.h").write_text("constexpr int answer = 42;\n")
    path = tmp_path / "a source.cpp"
    path.write_text('#include "answer.h"\nint f() { return answer; }\n')
    return path


@needs_compiler
def test_an_object_is_compiled_again_only_where_something_it_is_made_from_changed(
    source: Path, tmp_path: Path
) -> None:
    compiler = Compiler.find()

    def compiles(*arguments: str) -> bool:
        return build_extension._compile(compiler, Unit(source, "a.o", arguments), tmp_path)

    assert compiles()
    assert not compiles()
    os.utime(source)  # a checkout touches files without changing them
    assert not compiles()
    (tmp_path / "answer.h").write_text("constexpr int answer = 43;\n")
    assert compiles()
    assert compiles("-O1")
    assert not compiles("-O1")


@needs_compiler
def test_a_source_that_failed_is_tried_again(source: Path, tmp_path: Path) -> None:
    unit = Unit(source, "a.o", ())
    compiler = Compiler.find()
    good = source.read_text()
    build_extension._compile(compiler, unit, tmp_path)
    for _ in range(2):
        source.write_text("no C++")
        with pytest.raises(BuildError, match="no C"):
            build_extension._compile(compiler, unit, tmp_path)
    source.write_text(good)
    assert build_extension._compile(compiler, unit, tmp_path)


def test_without_a_compiler_the_command_says_so_and_writes_nothing(tmp_path: Path) -> None:
    target = tmp_path / "native.so"
    done = subprocess.run(
        [sys.executable, build_extension.__file__, "--output", str(target)],
        env=os.environ | {"CXX": str(tmp_path / "no-such-compiler")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no C++ compiler found" in done.stderr and "no-such-compiler" in done.stderr
    assert not target.exists()


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "true"])
def test_an_install_goes_on_where_the_build_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    """`true` is one that makes nothing and finds nothing wrong."""
    from setuptools import Distribution, Extension

    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(build_extension, "_objects_folder", lambda _: tmp_path / "objects")
    extension = Extension("mirror_sd._native", [], optional=True)
    command = build_extension.BuildExtension(Distribution({"ext_modules": [extension]}))
    command.build_lib, command.build_temp = str(tmp_path), str(tmp_path)
    command.ensure_finalized()
    told: list[str] = []
    monkeypatch.setattr(command, "warn", told.append)
    command.run()
    assert len(told) == 1 and "the torch engine serves instead" in told[0]
    assert not list(tmp_path.rglob("*.so"))


def test_the_sources_of_a_distribution_are_all_there() -> None:
    listed = {path.name for path in build_extension.sources()}
    assert {"bindings.cpp", "sampling.cpp", "isa_sampling.cpp", "elementary.h"} <= listed


def test_no_cpu_feature_is_asked_by_a_name_that_clang_14_does_not_know() -> None:
    """An unknown name ends a compilation; these are among those that it knows."""
    known = {"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"}
    asked = {
        name
        for path in build_extension.sources()
        for name in re.findall(r'__builtin_cpu_supports\("(\w+)"\)', path.read_text())
    }
    assert {"avx2", "avx512f"} <= asked <= known | {"avx512bf16"}


def test_no_function_of_one_instruction_set_can_be_linked_into_another() -> None:
    """Inline functions that each object defines are merged by the linker: the copy made for the
    newest CPU could be the one that all call."""
    tag = f"{sys.implementation.cache_tag}-{os.uname().machine}"
    objects = sorted((ROOT / "build/native" / tag).glob("isa_*.*.o"))
    if not objects or shutil.which("nm") is None:
        pytest.skip(f"nothing is built for {sysconfig.get_platform()} here, or nm is missing")
    owners: dict[str, set[str]] = {}
    for path in objects:
        done = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            kind, _, name = line[17:].partition(" ")
            if kind in "WVu":
                owners.setdefault(name, set()).add(path.name)
    shared = {name: files for name, files in owners.items() if len(files) > 1}
    assert shared == {}
