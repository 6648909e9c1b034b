"""The rules for Prometheus: tested by promtool, in step with the probe's own and with the docs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ops.alerting import RULES

ROOT = Path(__file__).resolve().parents[3]
RULE_FILE = ROOT / "ops" / "alerts" / "mirror-sd.yml"
TEST_FILE = Path(__file__).parent / "alerts.test.yml"
PROMTOOL = shutil.which("promtool")
# Nobody but Prometheus can see these.
ONLY_PROMETHEUS = {"MirrorDown", "MirrorServerErrors", "MirrorQueueOld", "MirrorMetricsIncomplete"}


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(RULE_FILE.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def promtool(*arguments: str | Path) -> str:
    if PROMTOOL is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_alert_fires_and_stays_silent_on_the_right_series() -> None:
    assert "SUCCESS" in promtool("test", "rules", TEST_FILE)


def test_every_alert_is_tested_to_fire() -> None:
    tested = {
        case["alertname"]
        for test in yaml.safe_load(TEST_FILE.read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert tested == {rule["alert"] for rule in rules()}


def test_probe_and_prometheus_use_the_same_names() -> None:
    assert {rule["alert"] for rule in rules()} == set(RULES) | ONLY_PROMETHEUS


def test_every_rule_says_how_urgent_it_is_and_what_is_wrong() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "warn", "info"), rule["alert"]
        assert rule["annotations"]["summary"], rule["alert"]


def test_documentation_has_every_alert_with_what_to_do() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = text.split("\n## Alerts\n", 1)[1].split("\n## ", 1)[0]
    rows = {
        match[1]: [cell.strip() for cell in match[2].split("|")]
        for match in re.finditer(r"^\| `(Mirror\w+)` \|(.*)\|$", section, re.MULTILINE)
    }
    assert set(rows) == {rule["alert"] for rule in rules()}
    severities = {rule["alert"]: rule["labels"]["severity"] for rule in rules()}
    for name, cells in rows.items():
        assert cells[0] == severities[name], name
        assert len(cells) == 3 and all(cells), f"{name}: severity, meaning, what to do"
