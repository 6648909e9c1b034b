"""The systemd units are ones that systemd takes without a warning."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path

import pytest

from mirror_sd.config import load

ROOT = Path(__file__).resolve().parents[3]
UNITS = sorted((ROOT / "ops" / "systemd").glob("*.service"))


def adjusted(unit: Path, directory: Path) -> Path:
    """The unit as an operator of this clone would have it."""
    user = pwd.getpwuid(os.getuid()).pw_name
    text = (
        unit.read_text()
        .replace("/opt/mirror-sd", str(ROOT))
        .replace("User=mirror-sd", f"User={user}")
    )
    copy = directory / unit.name
    copy.write_text(text)
    return copy


def verify(unit: Path) -> str:
    binary = shutil.which("systemd-analyze")
    if binary is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run(
        [binary, "verify", "--man=no", unit], capture_output=True, text=True, timeout=60
    )
    # It ends with 0 for a key that it does not know, but says so.
    said = [line for line in (done.stdout + done.stderr).splitlines() if unit.name in line]
    return "\n".join(said) or ("" if done.returncode == 0 else done.stderr or "failed")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_takes_the_unit_without_a_warning(unit: Path, tmp_path: Path) -> None:
    assert verify(adjusted(unit, tmp_path)) == ""


def test_a_fault_in_a_unit_would_be_found(tmp_path: Path) -> None:
    copy = adjusted(UNITS[0], tmp_path)
    copy.write_text(copy.read_text().replace("KillMode=", "KilMode="))
    assert "KilMode" in verify(copy)


def settings(unit: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def test_systemd_waits_longer_than_the_stack_drains() -> None:
    [timeout_s] = settings(UNITS[0])["TimeoutStopSec"]
    assert float(timeout_s) >= load(environ={}).server.drain_s + 15


def test_settings_in_the_units_environment_exist() -> None:
    environ = dict(item.split("=", 1) for item in settings(UNITS[0])["Environment"])
    assert load(environ=environ).server.keys_file == "/var/lib/mirror-sd/keys.json"
