"""A run directory and processes for it, for tests of the supervisor."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mirror_sd.run_dir import RunDir

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
