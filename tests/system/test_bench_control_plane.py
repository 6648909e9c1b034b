"""The benches of the control plane run at all, and say what they promise; not how fast it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.system.stack import Stack

ROLES = {"nginx", "gateway", "broker", "pool", "worker", "probe", "supervisor", "client"}


def bench(*arguments: str) -> dict[str, Any]:
    stack = Stack()
    try:
        done = stack.cli("bench", *arguments, "--json", timeout_s=200)
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report
    finally:
        stack.destroy()


def test_edge_bench_tells_rate_latency_and_cpu_time_of_each_process() -> None:
    report = bench("edge", "--seconds", "1", "--rate", "50", "--connections", "4")
    assert report["requests_per_s"] > 20
    assert 0 < report["added_p50_ms"] <= report["added_p99_ms"]
    assert set(report["cpu_ms_per_request"]) >= ROLES
    assert report["cpu_ms_per_request"]["gateway"] > 0
    assert report["engine"] == "emulated, 0 ms"


def test_routing_bench_tells_shares_throughput_and_waits_of_a_mode() -> None:
    report = bench(
        "routing",
        "--modes",
        "ours",
        "--seconds",
        "3",
        "--warm",
        "1",
        "--grace",
        "1",
        "--slowdown",
        "4",
    )
    assert report["capacity_tok_s"] == {"cpu": 16.7, "gpu": 400.0, "tpu": 1066.7}
    ours = report["ours"]
    # Too short to fill every place.
    assert 0.1 < ours["capacity_share"] < 1.1
    assert set(ours["shares"]) == {"cpu", "gpu", "tpu"}
    assert abs(sum(ours["shares"].values()) - 1) < 0.01
    assert ours["shares"]["tpu"] > ours["shares"]["cpu"]
    for key in ("p50_ms", "p99_ms"):
        assert set(ours[key]) == {"vip", "standard"}
    assert ours["failed"] == 0 and ours["requests"] > 50
    assert 0 < ours["longest_standard_wait_s"] < ours["wait_limit_s"]
    assert ours["vip_p99_ratio"] > 0


def test_unknown_mode_is_wrong_usage() -> None:
    stack = Stack()
    try:
        done = stack.cli("bench", "routing", "--modes", "mine")
        assert done.returncode == 2 and "round_robin" in done.stderr
    finally:
        stack.destroy()


def test_route_is_explained_without_a_stack_by_the_configured_policy(tmp_path: Path) -> None:
    stack = Stack()
    try:
        asked = ("route", "--prompt-tokens", "30", "--set", "pools.gpu.engine=emulated")
        words = stack.cli(*asked, "--qps", "10")
        assert words.returncode == 0, words.stderr
        assert words.stdout.startswith("goes to cpu (no stack runs")
        assert "cpu 70 %" in words.stdout and "below 50" in words.stdout
        vip = json.loads(stack.cli(*asked, "--tier", "vip", "--json").stdout)
        assert vip["class"] == "gpu" and vip["reasons"]
        policy = tmp_path / "policy.lua"
        policy.write_text("return { prompt_buckets = { { weights = { gpu = -1 } } } }")
        bad = stack.cli(*asked, "--set", f"server.policy_file={policy}")
        assert bad.returncode == 1
        assert len(bad.stderr.splitlines()) == 1
        assert "policy: line 1: prompt_buckets[1].weights.gpu is -1" in bad.stderr
    finally:
        stack.destroy()
