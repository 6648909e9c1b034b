"""Builds `mirror_sd._native`, the optional C++ part.

    python -m mirror_sd.backends.native.build_extension              rebuilds it in place
    python -m mirror_sd.backends.native.build_extension --sanitize   a build that checks itself

`pip` comes in by `BuildExtension`, the setuptools command of pyproject.toml; it loads this file
alone, so nothing of the package may be imported here. One object is kept for each source and set of
flags, with the hash of all it was made from; only those that changed are compiled again.

Sources named `isa_*.cpp` are compiled once for each instruction set, with its flags and
`MIRROR_ISA` its name; they must not instantiate templates that other sources instantiate too, or
the linker may keep the copy made for the newest CPU for all of them. The others learn by
`MIRROR_HAVE_<NAME>` which sets the compiler knew.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import filecmp
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = (ROOT / "mirror_sd/backends/native/src", ROOT / "mirror_sd/speculative/src")

_COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread")
# No contraction: a * b + c must round alike whichever instruction set a source is compiled for.
# Nobody looks at floating-point exceptions; leave to raise them lets selections vectorise.
# GCC 12 warns of its own AVX-512 header (bug 105593).
_OWN = (
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-warning-option",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
    "-Wno-psabi",
)
_OPTIMISED = ("-O3",)
_SANITIZED = (
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mprfchw")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_X86_SETS = {
    "avx512_vnni": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "portable": (),
}


class BuildError(RuntimeError):
    """The extension could not be built; the text says why."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One object file: `arguments` compile `source` to it."""

    source: Path
    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Compiler:
    command: tuple[str, ...]
    version: str

    @staticmethod
    def find() -> Compiler:
        """$CXX, else the first there is. Raises `BuildError`."""
        wanted = os.environ.get("CXX")
        for candidate in [wanted] if wanted else ["g++", "clang++", "c++"]:
            command = shlex.split(candidate)
            if command and shutil.which(command[0]):
                done = subprocess.run(
                    [*command, "--version"], capture_output=True, text=True, check=False
                )
                if done.returncode == 0:
                    return Compiler(tuple(command), done.stdout)
        raise BuildError(f"no C++ compiler found ({wanted or 'g++, clang++, c++'})")

    def accepts(self, flags: Sequence[str]) -> bool:
        command = [*self.command, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def run(self, arguments: Sequence[str], output: Path) -> None:
        """Make `output`. Raises `BuildError`."""
        command = [*self.command, *arguments, "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"failed: {shlex.join(command)}\n{done.stderr}")
        if done.stderr:
            print(done.stderr, file=sys.stderr)
        if not output.exists():
            raise BuildError(f"made no {output.name}: {shlex.join(command)}")


def sources() -> list[Path]:
    """All C++ sources and headers of the project."""
    return sorted(
        path for folder in FOLDERS for path in folder.glob("*") if path.suffix in (".cpp", ".h")
    )


def _instruction_sets(compiler: Compiler) -> dict[str, tuple[str, ...]]:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return {"portable": ()}
    with ThreadPoolExecutor() as pool:
        known = pool.map(compiler.accepts, _X86_SETS.values())
        return {
            name: flags for (name, flags), ok in zip(_X86_SETS.items(), known, strict=True) if ok
        }


def _units(compiler: Compiler, sanitize: bool) -> Iterator[Unit]:
    try:
        import nanobind
    except ImportError as error:
        raise BuildError(
            "nanobind is not installed; it is needed to build the extension"
        ) from error
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise BuildError("the headers of Python are not installed (python3-dev)")
    nanobind_source = Path(nanobind.source_dir())
    # As system headers, so that their warnings stay out and their files are not tracked.
    foreign = (
        *("-isystem", sysconfig.get_path("include")),
        *("-isystem", nanobind.include_dir()),
        *("-isystem", str(nanobind_source.parent / "ext/robin_map/include")),
        f"-DMIRROR_NANOBIND={nanobind.__version__}",
    )
    level = _SANITIZED if sanitize else _OPTIMISED
    sets = _instruction_sets(compiler)
    have = tuple(f"-DMIRROR_HAVE_{name.upper()}=1" for name in sets)
    own = (*_COMMON, *_OWN, *level, *(f"-I{folder}" for folder in FOLDERS))
    for source in sources():
        if source.suffix == ".h":
            continue
        if source.name.startswith("isa_"):
            for name, flags in sets.items():
                isa = (*own, *flags, f"-DMIRROR_ISA={name}")
                yield Unit(source, f"{source.stem}.{name}.o", isa)
        else:
            yield Unit(source, f"{source.stem}.o", (*own, *foreign, *have))
    quiet = (*_COMMON, *level, *foreign, "-DNDEBUG", "-fno-strict-aliasing", "-w")
    yield Unit(nanobind_source / "nb_combined.cpp", "nb_combined.o", quiet)


def build(target: Path, *, sanitize: bool = False) -> bool:
    """Make `target` (a shared object) up to date; False if it was. Raises `BuildError`."""
    compiler = Compiler.find()
    folder = _objects_folder(sanitize)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        units = list(_units(compiler, sanitize))
        objects = [folder / unit.name for unit in units]
        if len(set(objects)) < len(objects):
            raise BuildError("two sources have the same name")
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            compiled = list(pool.map(lambda unit: _compile(compiler, unit, folder), units))
        built = folder / "_native.so"
        if any(compiled) or not built.exists():
            built.unlink(missing_ok=True)
            flags = (*_COMMON, *(_SANITIZED if sanitize else _OPTIMISED))
            compiler.run([*flags, "-shared", *map(str, objects)], built)
        if target.exists() and filecmp.cmp(built, target, shallow=False):
            return False
        # A process may have the old file mapped: replace it, never write into it.
        fresh = target.with_name(f".{target.name}.{os.getpid()}")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built, fresh)
        fresh.replace(target)
        return True


def _objects_folder(sanitize: bool) -> Path:
    tag = f"{sys.implementation.cache_tag}-{platform.machine()}"
    return ROOT / "build/native" / (f"{tag}-sanitize" if sanitize else tag)


def _compile(compiler: Compiler, unit: Unit, folder: Path) -> bool:
    target = folder / unit.name
    depends, stamp = target.with_suffix(".d"), target.with_suffix(".key")
    identity = json.dumps([compiler.command, compiler.version, str(unit.source), unit.arguments])
    if target.exists() and stamp.exists() and stamp.read_text() == _key(identity, depends):
        return False
    for old in (stamp, target):
        old.unlink(missing_ok=True)
    compiler.run([*unit.arguments, "-MMD", "-MF", str(depends), "-c", str(unit.source)], target)
    stamp.write_text(_key(identity, depends))
    return True


def _key(identity: str, depends: Path) -> str:
    """Hash of what an object was made from; empty where a file of it is gone."""
    digest = hashlib.sha256(identity.encode())
    try:
        _, _, listed = depends.read_text().replace("\\\n", " ").partition(": ")
        for name in re.split(r"(?<!\\)\s+", listed.strip()):
            digest.update(Path(name.replace("\\ ", " ")).read_bytes())
    except FileNotFoundError:
        return ""
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def in_place() -> Path:
    """Where the extension lies in a source tree."""
    return ROOT / "mirror_sd" / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"


class BuildExtension(build_ext):
    """The setuptools command. A failure is told, and the installation goes on without."""

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(ROOT)) for path in sources()]

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        try:
            build(target)
        except BuildError as error:
            if self.editable_mode:
                in_place().unlink(missing_ok=True)  # it is of older sources
            self.warn(f"{error}\nThe native engine is left out; the torch engine serves instead.")


def main() -> int:
    parser = argparse.ArgumentParser(description="Build mirror_sd._native where its sources are.")
    parser.add_argument("--sanitize", action="store_true", help="with ASan and UBSan")
    parser.add_argument("--output", type=Path, help="the file to write")
    arguments = parser.parse_args()
    begin = time.monotonic()
    target = arguments.output or in_place()
    if arguments.sanitize and arguments.output is None:
        target = ROOT / "build/native/sanitize" / target.name
    try:
        changed = build(target, sanitize=arguments.sanitize)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    done = "built" if changed else "is up to date:"
    print(f"{done} {target} ({time.monotonic() - begin:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
