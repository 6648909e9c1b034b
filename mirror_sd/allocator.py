"""Which malloc a process runs on: jemalloc, preloaded before it starts, or the C library's own; and
how much memory it took.

A worker that lives for weeks allocates arrays of all sizes from several threads. glibc keeps what
was freed between two live pieces; jemalloc gives it back to the system after some seconds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from mirror_sd.errors import ConfigError

Choice = Literal["auto", "jemalloc", "glibc"]
# A path to the library where it lies elsewhere than the loader looks.
PATH_VARIABLE = "MIRROR_SD_JEMALLOC"
HOW_TO_INSTALL = (
    "install it (Debian: apt-get install libjemalloc2; Fedora: dnf install jemalloc) or set"
    f" {PATH_VARIABLE} to its path"
)
# Pages unused for 5 s go back, by a thread of jemalloc's own.
_OPTIONS = "background_thread:true,dirty_decay_ms:5000,muzzy_decay_ms:0"
_NAMES = ("libjemalloc.so.2", "libjemalloc.so")
_DIRECTORIES = tuple(
    Path(name)
    for name in (
        f"/usr/lib/{os.uname().machine}-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/lib",
    )
)


def find_jemalloc(
    environ: Mapping[str, str] = os.environ, directories: Sequence[Path] = _DIRECTORIES
) -> Path | None:
    """The library's file. Raises `ConfigError` where the variable names none."""
    named = environ.get(PATH_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise ConfigError(f"{PATH_VARIABLE}={named!r}: there is no such file")
        return Path(named)
    for directory in directories:
        for name in _NAMES:
            if (directory / name).is_file():
                return directory / name
    return None


def environment(
    choice: Choice,
    environ: Mapping[str, str] = os.environ,
    directories: Sequence[Path] = _DIRECTORIES,
) -> dict[str, str]:
    """Variables for a process that is about to be started; none for glibc's malloc.

    Raises `ConfigError` where jemalloc is asked for and is not there.
    """
    if choice == "glibc":
        return {}
    library = find_jemalloc(environ, directories)
    if library is None:
        if choice == "jemalloc":
            raise ConfigError(f"jemalloc is not found; {HOW_TO_INSTALL}")
        return {}
    others = [p for p in environ.get("LD_PRELOAD", "").split(":") if p and p != str(library)]
    return {
        "LD_PRELOAD": ":".join([str(library), *others]),
        "MALLOC_CONF": environ.get("MALLOC_CONF", _OPTIONS),
    }


def running(pid: int | None = None) -> str | None:
    """What a process, this one by default, allocates from: `jemalloc`, `tcmalloc`, `mimalloc` or,
    with none of them mapped, `glibc`. None where its maps cannot be read."""
    try:
        maps = Path(f"/proc/{pid or 'self'}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in maps.splitlines():
        name = line.rpartition("/")[2]
        for library in ("jemalloc", "tcmalloc", "mimalloc"):
            if name.startswith(f"lib{library}"):
                return library
    return "glibc"


def peak_bytes(pid: int | None = None) -> int | None:
    """The most memory that a process, this one by default, had resident since it was started; None
    where it cannot be read."""
    try:
        status = Path(f"/proc/{pid or 'self'}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
