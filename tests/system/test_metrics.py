"""`/metrics` and `/health` of a stack that has answered something."""

from __future__ import annotations

import shutil
import subprocess

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mirror_sd import allocator
from mirror_sd.backends.native.native_backend import chosen_isa
from tests.system.stack import MODEL, Stack, until

BODY = {
    "model": MODEL,
    "prompt": "one two three one two three one two three one two",
    "max_tokens": 24,
    "temperature": 0,
}


def family_names(text: str) -> set[str]:
    return {family.name for family in text_string_to_metric_families(text)}


def test_every_promised_family_is_there(stack: Stack, http: httpx.Client) -> None:
    assert http.post("/v1/completions", json=BODY).status_code == 200
    promised = {
        # requests by class, tier and status
        "mirror_edge_requests",
        "mirror_gateway_requests",
        # queue depth and age
        "mirror_broker_queue_depth",
        "mirror_broker_queue_oldest_age_seconds",
        # time to first token, between tokens
        "mirror_gateway_time_to_first_token_seconds",
        "mirror_gateway_inter_token_latency_seconds",
        "mirror_worker_batch_sequences",
        "mirror_worker_batch_tokens",
        "mirror_worker_drafted_tokens",
        "mirror_worker_accepted_tokens",
        "mirror_worker_accepted_length",
        "mirror_worker_kv_blocks_used",
        "mirror_worker_kv_blocks_free",
        "mirror_pool_worker_restarts",
    }
    assert promised - family_names(stack.metrics_text()) == set()


def test_the_figures_follow_a_request(stack: Stack, http: httpx.Client) -> None:
    watched = {
        "mirror_edge_requests_total": {"class": "cpu", "tier": "standard", "status": "200"},
        "mirror_gateway_requests_total": {"class": "cpu", "tier": "standard", "status": "200"},
        "mirror_gateway_time_to_first_token_seconds_count": {"class": "cpu", "tier": "standard"},
        "mirror_gateway_completion_tokens_total": {"class": "cpu"},
        "mirror_gateway_prompt_tokens_total": {"class": "cpu"},
        "mirror_worker_drafted_tokens_total": {"class": "cpu"},
        "mirror_worker_accepted_tokens_total": {"class": "cpu"},
        "mirror_worker_accepted_length_count": {"class": "cpu"},
        "mirror_worker_step_seconds_count": {"class": "cpu"},
    }
    before = {name: stack.total(name, **labels) for name, labels in watched.items()}
    usage = http.post("/v1/completions", json=BODY).json()["usage"]
    grown = {name: stack.total(name, **labels) - before[name] for name, labels in watched.items()}
    assert grown["mirror_edge_requests_total"] == 1
    assert grown["mirror_gateway_requests_total"] == 1
    assert grown["mirror_gateway_time_to_first_token_seconds_count"] == 1
    assert grown["mirror_gateway_completion_tokens_total"] == usage["completion_tokens"] == 24
    assert grown["mirror_gateway_prompt_tokens_total"] == usage["prompt_tokens"]
    # The prompt repeats itself, so lookup drafts and the target accepts.
    drafted = grown["mirror_worker_drafted_tokens_total"]
    assert 0 < grown["mirror_worker_accepted_tokens_total"] <= drafted
    assert 0 < grown["mirror_worker_accepted_length_count"] <= 24
    assert 0 < grown["mirror_worker_step_seconds_count"] <= 26


def test_a_refused_request_is_counted_by_its_status(stack: Stack, http: httpx.Client) -> None:
    before = stack.total("mirror_edge_requests_total", status="400")
    assert http.post("/v1/completions", json=BODY | {"temperature": 9}).status_code == 400
    assert stack.total("mirror_edge_requests_total", status="400") == before + 1


def test_free_and_used_blocks_add_up_and_idle_uses_none(stack: Stack) -> None:
    until(stack.idle, 2.0, "idle")
    assert stack.total("mirror_worker_kv_blocks_free") > 100


def test_the_malloc_and_the_peaks_of_each_worker_are_told(stack: Stack, http: httpx.Client) -> None:
    assert http.post("/v1/completions", json=BODY).status_code == 200
    until(lambda: stack.total("mirror_worker_kv_blocks_peak") > 0, 5.0, "a peak of blocks")
    [labels] = [
        labels for name, labels, _ in stack.samples() if name == "mirror_worker_allocator_info"
    ]
    there = "glibc" if allocator.find_jemalloc() is None else "jemalloc"
    assert labels == {"class": "cpu", "allocator": there}
    assert stack.total("mirror_worker_memory_peak_bytes") > 100 * 2**20
    until(lambda: stack.status()["kv_blocks_peak"] > 0, 5.0, "a peak of blocks in the status")
    [worker] = [item for item in stack.status()["processes"] if item["role"] == "worker"]
    assert worker["allocator"] == there and worker["peak_mb"] >= worker["rss_mb"] > 100


def test_the_engine_of_each_worker_is_told(stack: Stack) -> None:
    [labels] = [
        labels for name, labels, _ in stack.samples() if name == "mirror_worker_engine_info"
    ]
    assert labels == {
        "class": "cpu",
        "engine": "native",
        "precision": "int8",
        "isa": chosen_isa(),
        "bit_stable": "true",
    }


def test_help_and_type_stand_once_for_each_family(stack: Stack) -> None:
    lines = [line for line in stack.metrics_text().splitlines() if line.startswith("# TYPE ")]
    assert len(lines) == len({line.split()[2] for line in lines})


def test_promtool_finds_nothing_to_say(stack: Stack) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=stack.metrics_text(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_health_is_ok_while_everything_moves(http: httpx.Client) -> None:
    answer = http.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
