"""`bench serve` against a running stack: figures of a real run, and the same work by the engine."""

from __future__ import annotations

import json

import pytest

from tests.system.stack import started

pytestmark = pytest.mark.system


def test_it_streams_through_the_stack_and_compares_with_the_engine() -> None:
    with started(["server.gateways=1"]) as stack:
        options = ["--concurrency", "3", "--limit", "4", "--max-tokens", "12", "--rounds", "1"]
        arguments = ["bench", "serve", "--port", str(stack.port), *options]
        done = stack.cli(*arguments, "--against-engine", "--json", timeout_s=120)
        assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    through, alone = report["runs"]
    assert (through["by"], alone["by"]) == ("stack", "engine")
    assert through["tokens"] == alone["tokens"] > 12
    assert through["tok_s"] > 0 and through["inter_token_ms_p50"] > 0 and through["ttft_ms"] > 0
    assert {"worker", "gateway", "broker", "nginx", "client"} <= set(through["cpu_s"])
    assert through["cpu_s"]["worker"] > 0
    assert report["ratio"]["by_turn"] == [report["ratio"]["of_engine"]]
    assert report["machine"]["cpu"]
