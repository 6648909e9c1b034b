"""`bench decode` on the real default model, and the streams that it keeps going."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from mirror_sd.bench.cli import app
from mirror_sd.bench.decode import run_engine
from tests.unit.bench.test_bench import engine_on
from tests.unit.speculative.hash_target import HashTarget

FIELDS = {
    "drafter",
    "precision",
    "tok_s",
    "ms_per_token",
    "accepted_per_verify",
    "ttft_ms",
    "identical_to_plain",
    "peak_rss_mb",
}


@pytest.fixture(scope="module")
def report(default_model):
    options = ["--limit", "2", "--max-tokens", "12", "--rounds", "1", "--concurrency", "2"]
    result = CliRunner().invoke(
        app,
        ["decode", *options, "--drafters", "lookup,off", "--precision", "int8,bf16", "--json"],
        catch_exceptions=False,
    )
    return json.loads(result.stdout)


def test_every_run_has_the_same_fields(report):
    assert all(set(run) == FIELDS for run in report["runs"])
    assert [(run["drafter"], run["precision"]) for run in report["runs"]] == [
        ("lookup", "int8"),
        ("lookup", "bf16"),
        ("off", "int8"),
        ("off", "bf16"),
    ]
    assert report["machine"]["cpu"] and report["concurrency"] == 2


def test_drafts_change_no_token_and_figures_are_of_a_real_run(report):
    for run in report["runs"]:
        assert run["identical_to_plain"] is True
        assert run["tok_s"] > 0 and run["ms_per_token"] > 0 and run["ttft_ms"] > 0
        assert run["peak_rss_mb"] > 100
        if run["drafter"] == "off":
            assert run["accepted_per_verify"] == 1
        else:
            assert run["accepted_per_verify"] >= 1


def test_each_precision_has_its_own_peak_memory(report):
    peaks = {run["precision"]: run["peak_rss_mb"] for run in report["runs"]}
    assert peaks["int8"] < peaks["bf16"]


def test_a_prompt_starts_when_another_ends():
    most = 0

    class Watched(HashTarget):
        def forward(self, batch):
            nonlocal most
            most = max(most, len(batch.block_tables))
            return super().forward(batch)

    prompts = [(5 + i, 2, 3) for i in range(7)]
    clock = iter(range(10_000))
    run = run_engine(
        engine_on(Watched()),
        prompts,
        max_tokens=9,
        speculation=False,
        stop=tuple(range(0, 64, 16)),  # so that answers differ in length
        concurrency=3,
        clock=lambda: float(next(clock)),
    )
    assert most == 3
    ends = sorted(times[-1] for times in run.times)
    # The fourth prompt is handed over right after the first answer has ended, and so on.
    assert [start > end for start, end in zip(sorted(run.starts)[3:], ends, strict=False)] == (
        [True] * 4
    )
    assert sorted(run.starts)[3] < ends[1]


def test_a_stop_token_costs_time_and_counts_but_is_not_in_the_answer():
    plain = run_engine(
        engine_on(HashTarget()), [(1, 2, 3)], max_tokens=9, speculation=False, stop=()
    )
    stop = (plain.tokens[0][4],)
    cut = plain.tokens[0].index(stop[0])
    run = run_engine(
        engine_on(HashTarget()), [(1, 2, 3)], max_tokens=9, speculation=False, stop=stop
    )
    assert run.tokens[0] == plain.tokens[0][:cut]
    assert len(run.times[0]) == cut + 1
    assert run.accepted_per_verify() == 1
