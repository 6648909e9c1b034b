"""The tables of docs/operations.md say what the code says, and relative links lead somewhere.

python -m tests.unit.test_documentation     prints the tables as they should be
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client.metrics import MetricWrapperBase
from pydantic import BaseModel

from mirror_sd import errors, telemetry
from mirror_sd.config import Config, PoolConfig
from mirror_sd.config_drafters import DrafterConfig
from mirror_sd.supervisor import processes

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = ROOT / "docs" / "operations.md"
LUA = ROOT / "openresty" / "lua" / "mirror"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def setting_rows(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """A table row for each configuration key."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        kind = field.annotation
        if name == "pools":
            yield from setting_rows(PoolConfig, "pools.CLASS.")
        elif name == "drafters":
            yield from setting_rows(DrafterConfig, "drafters.CLASS.")
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from setting_rows(kind, f"{key}.")
        else:
            default = "" if field.default is None else f"`{field.default}`".replace("True", "true")
            text = field.description or "most sequences at once on a worker of this class"
            allowed = "".join(f" `{value}`" for value in get_args(kind) if isinstance(value, str))
            text = f"{text} (one of{allowed})" if allowed else text
            yield f"| `{key}` | {default} | {text} |"


def python_metric_rows() -> Iterator[str]:
    for metric in vars(telemetry).values():
        if isinstance(metric, MetricWrapperBase):
            [family] = metric.describe()
            name = family.name + ("_total" if family.type == "counter" else "")
            yield _metric_row(name, family.type, metric._labelnames, family.documentation)


def lua_metric_rows() -> Iterator[str]:
    text = (LUA / "metrics.lua").read_text(encoding="utf-8")
    family = re.compile(
        r'name = "(\w+)",\s*kind = "(\w+)",\s*help = "([^"]+)",\s*labels = \{([^}]*)\}'
    )
    for name, kind, documentation, labels in family.findall(text):
        yield _metric_row(name, kind, re.findall(r'"(\w+)"', labels), documentation)
    gauges = (LUA / "gauges.lua").read_text(encoding="utf-8")
    for name, documentation in re.findall(r'name = "(\w+)",\s*help = "([^"]+)"', gauges):
        label = {"mirror_edge_connections": ["state"], "mirror_edge_in_flight": ["gateway"]}
        labels = ["class"] if name.startswith("mirror_edge_class_") else label.get(name, [])
        yield _metric_row(name, "gauge", labels, documentation)


def _metric_row(name: str, kind: str, labels: tuple[str, ...] | list[str], text: str) -> str:
    shown = ", ".join(f"`{label}`" for label in labels)
    return f"| `{name}` | {kind} | {shown} | {text} |"


def table_after(heading: str) -> list[str]:
    """The body rows of the first table under a heading of docs/operations.md."""
    section = OPERATIONS.read_text(encoding="utf-8").split(f"\n## {heading}\n", 1)[1]
    section = section.split("\n## ", 1)[0]
    return [line for line in section.splitlines() if line.startswith("| `")]


def test_the_settings_table_is_the_configuration() -> None:
    assert table_after("Settings") == list(setting_rows())


def test_the_metrics_table_is_what_is_declared() -> None:
    assert len(list(lua_metric_rows())) >= 9
    assert table_after("Metrics") == [*lua_metric_rows(), *python_metric_rows()]


def test_every_kind_of_process_has_its_log_and_its_loss_documented() -> None:
    kinds = {name.removesuffix("_spec") for name in vars(processes) if name.endswith("_spec")}
    assert kinds >= {"gateway", "pool", "drafter"}
    text = OPERATIONS.read_text(encoding="utf-8")
    logs, deaths = (
        text.split(heading, 1)[1].split("\n## ", 1)[0]
        for heading in ("\n**Logs.**", "\n## When a process dies\n")
    )
    assert {
        kind for kind in kinds if not re.search(rf"^\| `{kind}[-.\w]*\.log`", logs, re.M)
    } == set()
    assert {kind for kind in kinds if f"\n| {kind} |" not in deaths} == set()


def test_every_error_code_of_the_wire_is_documented() -> None:
    api = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    codes = {
        kind.code
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, errors.MirrorError)
        and not issubclass(kind, errors.SetupError)
        and kind.code is not None
    }
    assert {code for code in codes if f"`{code}`" not in api} == set()


def test_every_error_of_the_edge_is_documented_with_its_status_and_type() -> None:
    contract = json.loads((ROOT / "tests" / "contracts" / "errors.json").read_text("utf-8"))
    # For a client that is gone, for the admin port, and for statuses that nothing here sends.
    unseen = {"client_closed", "invalid_admin_token"}
    unseen |= {"unauthorized", "forbidden", "unsupported_media_type"}
    sent = {
        (str(error["status"]), error["type"], error["code"])
        for error in (*contract["edge"], *contract["refusals"])
        if error["code"] not in unseen
    }
    sent.add(("in a stream", contract["event"]["type"], contract["event"]["code"]))
    api = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    documented = {
        (status, kind, code)
        for status, kind, codes in re.findall(r"^\| ([\w ]+) \| `(\w+)` \| ([^|]+) \|", api, re.M)
        for code in re.findall(r"`(\w+)`", codes)
    }
    assert sent - documented == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = [
        target.split("#")[0]
        for target in re.findall(r"\]\(([^)\s]+)\)", text)
        if not re.match(r"[a-z]+:|#", target)
    ]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_what_to_install_is_said_by_the_clone_not_by_a_name_of_a_registry() -> None:
    sources = [
        path for folder in ("mirror_sd", "workers") for path in (ROOT / folder).rglob("*.py")
    ]
    assert [path for path in sources if "mirror-sd[" in path.read_text(encoding="utf-8")] == []


if __name__ == "__main__":
    print("\n".join(setting_rows()))
    print()
    print("\n".join([*lua_metric_rows(), *python_metric_rows()]))
