"""The dashboards: what they ask for exists, with those labels, and is PromQL."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.ops.test_alert_rules import ROOT, rules
from tests.unit.test_documentation import lua_metric_rows, python_metric_rows

DASHBOARDS = sorted((ROOT / "ops" / "dashboards").glob("*.json"))
# Prometheus adds these.
_SCRAPED = {"instance", "job"}


def declared() -> dict[str, set[str]]:
    """The labels of each series that a scrape has."""
    series: dict[str, set[str]] = {}
    for row in (*lua_metric_rows(), *python_metric_rows()):
        name, kind, labels = row.split("|")[1:4]
        known = set(re.findall(r"`(\w+)`", labels)) | _SCRAPED
        metric = name.strip(" `")
        if kind.strip() == "histogram":
            series[f"{metric}_bucket"] = known | {"le"}
            series[f"{metric}_sum"] = series[f"{metric}_count"] = known
        else:
            series[metric] = known
    return series


def dashboard(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def expressions(path: Path) -> Iterator[tuple[str, str]]:
    """(panel, PromQL)"""
    for panel in dashboard(path)["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def faults(expression: str, series: dict[str, set[str]]) -> list[str]:
    """Metrics that are not declared, and labels that none of its metrics has."""
    names = set(re.findall(r"\bmirror_\w+", expression))
    unknown = sorted(names - set(series))
    if unknown:
        return [f"no metric {name}" for name in unknown]
    found = []
    for name, matchers in re.findall(r"\b(mirror_\w+)\{([^}]*)\}", expression):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        found += [f"{name} has no label {label}" for label in sorted(labels - series[name])]
    for group in re.findall(r"by \(([^)]*)\)", expression):
        labels = {label.strip() for label in group.split(",")}
        for name in names:
            found += [f"{name} has no label {label}" for label in sorted(labels - series[name])]
    return found


def test_there_are_dashboards_of_the_service_and_of_the_devices() -> None:
    assert [path.stem for path in DASHBOARDS] == ["mirror-sd-devices", "mirror-sd-service"]
    for path in DASHBOARDS:
        assert dashboard(path)["uid"] == path.stem
        titles = [panel["title"] for panel in dashboard(path)["panels"]]
        assert len(titles) == len(set(titles)) >= 10


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_metric_and_label_of_a_dashboard_is_declared(path: Path) -> None:
    series = declared()
    found = {(title, fault) for title, text in expressions(path) for fault in faults(text, series)}
    assert found == set()


def test_every_metric_and_label_of_an_alert_is_declared() -> None:
    series = declared()
    assert [(r["alert"], f) for r in rules() for f in faults(r["expr"], series)] == []


@pytest.mark.parametrize(
    "expression",
    [
        "mirror_no_such_total",
        "rate(mirror_edge_request_seconds[5m])",
        'mirror_broker_workers{tier="vip"}',
        "sum by (status) (mirror_broker_workers)",
    ],
)
def test_the_checker_catches_a_fault(expression: str) -> None:
    assert faults(expression, declared()) != []


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_expression_is_promql(path: Path, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    texts = [text.replace("$__rate_interval", "1m") for _, text in expressions(path)]
    assert len(texts) > 10
    recorded = [
        {"record": f"panel:{index}", "expr": text.replace("$instance", ".*")}
        for index, text in enumerate(texts)
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    done = subprocess.run(
        [promtool, "check", "rules", file], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard(path)["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        assert grid["x"] + grid["w"] <= 24
        taken |= cells
