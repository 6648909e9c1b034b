"""The traffic of `bench routing` and what it makes of the answers."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import typer

from mirror_sd.bench import routing, traffic
from mirror_sd.bench.load import Exchange
from mirror_sd.bench.routing import Plan, _report, _Run
from mirror_sd.config import EmulationConfig
from workers import profile

PLAN = Plan(
    profiles=routing.read_profiles(routing.PROFILES, slowdown=2),
    seconds=10,
    warm_s=2,
    grace_s=5,
    overload=1.5,
    vip_share=0.2,
    dataset=None,
)


def test_capacity_is_that_of_all_slots_of_each_class() -> None:
    assert PLAN.capacity_tok_s() == {"cpu": 33.3, "gpu": 800.0, "tpu": 2133.3}


@pytest.mark.parametrize(
    "text",
    ["", "cpu=120", "gpu=0/8", "gpu=20/0", "npu=1/2,gpu=20/8", "gpu=x/8", "cpu=120/8", "gpu=20/8"],
)
def test_profile_that_says_nothing_is_wrong_usage(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        routing.read_profiles(text, 1)


def test_profiles_on_our_side_are_those_of_the_workers() -> None:
    for name, (latency_ms, batch) in routing.read_profiles(routing.PROFILES, 1).items():
        theirs = profile.load(name, EmulationConfig())
        assert (theirs.latency_ms, theirs.max_batch) == (latency_ms, batch)


def test_offered_tokens_are_the_overload_times_the_capacity() -> None:
    mix = traffic.Mix(PLAN.mix().rate, 0.2, 400, seed=1)
    requests = mix.requests()
    offered = sum(item.max_tokens for item in requests) / 400
    assert offered == pytest.approx(1.5 * sum(PLAN.capacity_tok_s().values()), rel=0.05)
    assert [item.at_s for item in requests] == sorted(item.at_s for item in requests)
    vip = [item for item in requests if item.tier == "vip"]
    assert len(vip) / len(requests) == pytest.approx(0.2, abs=0.02)
    assert {item.tenant for item in requests} == {"first", "second", "third", "fourth"}


def test_vip_requests_are_the_same_alone_and_in_the_crowd() -> None:
    def vip(share: float, rate: float) -> list[traffic.Request]:
        requests = traffic.Mix(rate, share, 20, seed=3).requests()
        return [item for item in requests if item.tier == "vip"]

    assert vip(0.1, 50) == vip(0.1, 50)
    assert [item.max_tokens for item in vip(0.5, 10)] == [r.max_tokens for r in vip(0.1, 50)]


def test_built_in_prompts_have_the_lengths_that_they_are_drawn_from() -> None:
    requests = traffic.Mix(100, 0.1, 20, seed=5).requests()
    words = [len(item.messages[0]["content"].split()) + 31 for item in requests]
    assert statistics.median(words) == pytest.approx(statistics.median(traffic.PROMPT_TOKENS), 0.1)
    assert max(words) <= 1297 and min(words) >= 32


def test_conversations_of_a_data_set_are_asked(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "one of mine"}]
    file.write_text(json.dumps({"messages": chat}))
    [first, *_] = traffic.Mix(50, 0.1, 2, seed=1, dataset=file).requests()
    assert first.messages == chat
    [arrival] = traffic.arrivals([first], 80, "m", {first.tenant: "the-key"})
    assert b"Bearer the-key" in arrival.payload and b"one of mine" in arrival.payload
    assert arrival.label == first.tier


def exchange(label: str, due: float, first: float, ended: float, tokens: int = 100) -> Exchange:
    tail = b'{"completion_tokens":%d}' % tokens
    texts = [(first, 1), (ended, 1)]
    return Exchange(label, due, due, status=200, ended=ended, texts=texts, tail=tail)


def test_report_counts_what_came_between_warm_up_and_the_end() -> None:
    alone = _Run([exchange("vip", 0, 0.5, 1.0)], begin=0, cut=1)
    refused = Exchange("standard", 5, 5, status=429, ended=5.01)
    waiting = Exchange("standard", 8.0, 8.0)
    broken = Exchange("standard", 8.0, 8.0, status=200, ended=9, tail=b'data: {"error": {}}')
    crowd = _Run(
        [
            exchange("vip", 100.0, 101.0, 101.5),  # all of it before the throughput counts
            exchange("standard", 101.0, 105.0, 111.0),  # its second half after the end
            exchange("standard", 103.0, 104.0, 105.0),
            *(e for e in (refused, waiting, broken)),
        ],
        begin=100.0,
        cut=115.0,
    )
    for item in (refused, waiting, broken):
        item.due += 100
    report = _report(alone, crowd, PLAN, {"cpu": 1.0})
    assert report["throughput_tok_s"] == pytest.approx((50 + 100) / 8, abs=0.1)
    assert report["vip_p99_ratio"] == 1.5
    assert (report["refused"], report["failed"], report["unfinished"]) == (1, 1, 1)
    # The one that has waited since 108 was cut at 115.
    assert report["longest_standard_wait_s"] == 7.0


@pytest.mark.parametrize("mode", routing.MODES)
def test_only_the_baselines_have_a_policy_of_their_own(mode: str, tmp_path: Path) -> None:
    settings = routing._settings(mode, PLAN, tmp_path)
    assert "pools.gpu.emulation.latency_ms=40.0" in settings
    assert "scheduler.max_batch_size.TPU=64" in settings
    has_policy = any(item.startswith("server.policy_file=") for item in settings)
    assert has_policy == (tmp_path / "policy.lua").exists() == (mode != "ours")
    assert ("probe.enabled=false" in settings) == (mode != "ours")
