"""The extension built with ASan and UBSan, under its unit tests and under random calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build/native/sanitize" / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def library(name: str) -> str:
    done = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Runs a Python with the sanitizers' runtime."""
    if shutil.which("g++") is None or not Path(library("libasan.so")).is_absolute():
        pytest.skip("g++ with its sanitizers is not installed")
    module = "mirror_sd.backends.native.build_extension"
    subprocess.run([sys.executable, "-m", module, "--sanitize"], cwd=ROOT, check=True)
    return os.environ | {
        "CXX": "g++",
        # Both must be there before Python starts: it is not linked against C++ itself.
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps what it has until its end
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "MIRROR_SD_SANITIZED": str(BUILT),
    }


def run(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def test_the_sanitizers_notice_what_they_are_for(environment: dict[str, str]) -> None:
    code = (
        "from tests.native_fuzz import sanitized\n"
        "import ctypes\n"
        "ctypes.memset(ctypes.create_string_buffer(b'', 8), 0, 1 << 16)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "AddressSanitizer" in done.stderr


def test_the_unit_tests_of_sampling_pass(environment: dict[str, str]) -> None:
    plugin = ("-p", "tests.native_fuzz.sanitized", "-p", "no:cacheprovider")
    tests = "tests/unit/speculative/test_native_sampling.py"
    # Not those with hypothesis: random calls are made below, and here each costs far more.
    some = "bad_arguments or large_rows or judged or contract or published"
    out = run(environment, "-m", "pytest", *plugin, tests, "-k", some)
    assert " passed" in out


@pytest.mark.parametrize("part", ["sampling", "decoder", "draft"])
def test_random_calls_return_or_raise_what_they_promise(
    part: str, environment: dict[str, str]
) -> None:
    out = run(environment, "-m", f"tests.native_fuzz.{part}_fuzz", "60")
    assert out.startswith("seed ")
