"""`scheduler.split=measured`: the edge goes by what the devices measured, while they tell it."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.stack import MODEL, Stack, started, until

# A minute: `ops/test --slow -- tests/system/test_measured_split.py`.
pytestmark = pytest.mark.slow

# The policy that ships gives the CPU 0.7 of the short prompts; its steps take ten times as long.
PACES = {"cpu": 50, "gpu": 5}


@pytest.fixture(scope="module")
def split() -> Iterator[Stack]:
    items = ["scheduler.split=measured", "server.gateways=1"]
    for name, latency_ms in PACES.items():
        items += [
            f"pools.{name}.engine=emulated",
            f"pools.{name}.emulation.latency_ms={latency_ms}",
        ]
    with started(items) as stack:
        yield stack


def shares(stack: Stack) -> dict[str, float]:
    bands = stack.admin().get("/admin/state")["edge"]["effective_weights"]
    found: dict[str, float] = bands[0]["shares"]
    return found


def rule(stack: Stack) -> str:
    return str(stack.admin().get("/admin/state")["edge"]["effective_weights"][0]["rule"])


def served(stack: Stack, requests: int) -> Counter[tuple[str, str]]:
    """Class and rule of so many short requests."""

    def counts() -> Counter[tuple[str, str]]:
        return Counter(
            {
                (labels["class"], labels["rule"]): int(value)
                for name, labels, value in stack.samples()
                if name == "mirror_edge_routes_total"
            }
        )

    before = counts()
    with stack.http() as http:
        for number in range(requests):
            body: dict[str, Any] = {"model": MODEL, "prompt": f"No. {number}", "max_tokens": 1}
            answer = http.post("/v1/completions", json=body | {"temperature": 0})
            assert answer.status_code == 200, answer.text
    return counts() - before


def test_requests_go_where_the_measured_steps_are_shortest(split: Stack) -> None:
    until(lambda: rule(split) == "measured", 10, "measured shares")
    assert served(split, 10) == {("gpu", "measured"): 10}
    done = split.cli("route", "--prompt-tokens", "20", "--port", str(split.port))
    assert "Shares are those of the measured devices" in done.stdout


def test_a_class_that_becomes_slow_loses_its_share(split: Stack) -> None:
    arguments = ("emulate", "--port", str(split.port), "--class", "gpu", "--latency-factor", "20")
    assert split.cli(*arguments).returncode == 0
    # It is its next steps that tell; VIP or not, some request must go there.
    until(lambda: served(split, 1) and shares(split)["cpu"] > 0.9, 20, "the share of the CPU")
    plan = json.loads(split.cli("plan", "--port", str(split.port), "--json").stdout)
    steps = {item["device_class"]: item["curve"][0][1] for item in plan["devices"]}
    assert steps == pytest.approx({"cpu": 0.05, "gpu": 0.1})
    assert plan["plan"]["splits"][0]["shares"]["cpu"] == 1.0
    split.cli("emulate", "--port", str(split.port), "--class", "gpu", "--reset")


def test_the_plan_can_be_put_as_a_policy(split: Stack) -> None:
    done = split.cli("plan", "--port", str(split.port), "--policy")
    assert done.returncode == 0, done.stderr
    file = split.base / "policy.json"
    file.write_text(done.stdout)
    assert split.cli("policy", "put", str(file), "--port", str(split.port)).returncode == 0
    buckets = split.admin().get("/admin/policy")["prompt_buckets"]
    assert [bucket.get("below") for bucket in buckets] == [50, 500, 2000, None]


def test_without_the_probe_the_policy_holds(split: Stack) -> None:
    [pid] = split.pids("probe")
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: rule(split) == "policy", 10, "the policy's own shares")
        assert all(name == "policy" for _, name in served(split, 3))
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: rule(split) == "measured", 10, "measured shares again")
