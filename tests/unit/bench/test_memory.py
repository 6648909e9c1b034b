"""What a worker may take, and the real engine weighed with few short streams."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from mirror_sd import allocator
from mirror_sd.bench import kv_growth
from mirror_sd.bench.cli import app
from mirror_sd.bench.memory import _grow, _verify_drafts, limit_mb
from mirror_sd.config import EngineConfig
from mirror_sd.config_speculation import SpeculationConfig
from mirror_sd.engine import Engine
from tests.unit.speculative.hash_target import HashTarget


def engine_on(target: HashTarget, slots: int = 4) -> Engine:
    return Engine(
        target,
        EngineConfig(block_size=4, kv_cache_mb=512, prefill_chunk=16),
        SpeculationConfig(),
        model_name="m",
        device_class="cpu",
        slots=slots,
    )


def test_the_limit_is_what_must_be_held_and_a_third_and_an_allowance():
    assert limit_mb(200, 100) == pytest.approx(1.3 * 300 + 150)


def test_all_streams_reach_their_length_at_once_and_share_no_block():
    target = HashTarget(vocab=5000)
    engine = engine_on(target)
    _grow(engine, streams=4, length=64)
    owners = (target.slots >= 0).all(axis=1).sum()
    assert owners >= 4 * 64 // 4
    assert not engine.has_work
    engine.check_integrity()


def test_drafts_of_many_streams_are_verified_in_one_forward():
    rows = []

    class Watched(HashTarget):
        def forward(self, batch):
            rows.append(len(batch.logit_rows))
            return super().forward(batch)

    # One token decides the next, so that texts soon run in circles.
    _verify_drafts(engine_on(Watched(vocab=200, memory=1)), streams=4)
    assert max(rows) > 4


@pytest.fixture(scope="module")
def weighed(default_model):
    sizes = ["--concurrency", "2", "--length", "96", "--rounds", "1"]
    result = CliRunner().invoke(app, ["memory", *sizes, "--json"], catch_exceptions=False)
    return json.loads(result.stdout)


def test_the_default_engine_is_weighed(weighed):
    assert weighed["engine"] == "native" and weighed["precision"] == "int8"
    assert weighed["kv_mb"] == pytest.approx(2 * 96 * 30 * 2 * 192 * 2 / 2**20, rel=0.01)
    assert 130 < weighed["weights_mb"] < 170
    assert weighed["peak_rss_mb"] >= weighed["loaded_rss_mb"] > weighed["weights_mb"]
    assert weighed["limit_mb"] == pytest.approx(
        limit_mb(weighed["weights_mb"], weighed["kv_mb"]), abs=0.2
    )


def test_growth_is_measured_on_each_malloc_that_is_there(weighed):
    there = ["glibc"] if allocator.find_jemalloc() is None else ["glibc", "jemalloc"]
    assert [row["allocator"] for row in weighed["growth"]] == there
    assert weighed["allocator"] == there[-1]
    assert ("jemalloc" in weighed) == (len(there) == 1)
    assert weighed["allocation_speedup"] == min(
        row["allocation_speedup"] for row in weighed["growth"]
    )
    for row in weighed["growth"]:
        assert row["paged_seconds"] > 0
        # 30 layers, keys and values of 3 heads of 64, fp32.
        assert row["paged_peak_mb"] == pytest.approx(96 * 30 * 2 * 192 * 4 / 2**20, rel=0.5)


def test_a_cache_that_is_held_while_it_is_copied_takes_twice_the_memory():
    asked = {"length": 512, "layers": 16, "heads": 4, "width": 64}
    made = {
        way: kv_growth._in_a_process("glibc", 1, {"way": way, **asked})
        for way in ("paged", "concatenated")
    }
    cache_mb = 512 * 16 * 2 * 4 * 64 * 4 / 2**20
    assert made["paged"]["peak_mb"] == pytest.approx(cache_mb, rel=0.3)
    assert made["concatenated"]["peak_mb"] > 1.5 * made["paged"]["peak_mb"]
    assert made["concatenated"]["seconds"] > made["paged"]["seconds"]


def test_a_child_gets_the_malloc_that_is_asked_for_whatever_its_parent_has(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/elsewhere/libjemalloc.so.2")
    monkeypatch.setenv("MALLOC_CONF", "narenas:1")
    assert kv_growth.variables("glibc") == {"LD_PRELOAD": "", "MALLOC_CONF": ""}


@pytest.mark.parametrize("key", ["engine.kv_cache_mb=8", "scheduler.max_batch_size.CPU=1"])
def test_streams_that_do_not_fit_are_refused(default_model, key):
    result = CliRunner().invoke(
        app, ["memory", "--concurrency", "2", "--length", "1024", "--set", key]
    )
    assert "raise scheduler.max_batch_size or engine.kv_cache_mb" in str(result.exception)


def test_streams_beyond_the_context_are_refused(default_model):
    result = CliRunner().invoke(app, ["memory", "--concurrency", "1", "--length", "8193"])
    assert "context is 8192 tokens, 8193 are asked" in str(result.exception)
    assert "ConfigError" not in str(result.exception)
