"""What `bench decode` refuses, leaves out, and measures where there is hardly anything."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from mirror_sd import config as configuration
from mirror_sd.bench import drafts
from mirror_sd.bench.cli import app
from mirror_sd.bench.options import fitting
from mirror_sd.errors import ConfigError
from mirror_sd.offline import load_tokenizer


def told_of(*options: str) -> str:
    """What `bench decode` says when it refuses to begin."""
    found = CliRunner().invoke(app, ["decode", *options])
    assert found.exit_code == 2, found.output
    return " ".join(found.output.replace("│", " ").split())


def test_a_sweep_without_a_source_is_refused():
    told = told_of("--sweep", "--drafters", "off,auto")
    assert "needs one of lookup, history, head in --drafters" in told


def test_near_duplicates_need_a_file_of_clusters():
    assert "takes a --dataset of clusters" in told_of("--near-duplicates")


def test_a_length_that_no_engine_can_draft_is_refused_before_anything_is_measured():
    told = told_of("--sweep", "--lengths", "4,64")
    assert "--lengths" in told and "less than or equal to 32" in told


def test_a_precision_that_is_none_is_refused():
    assert "comma list of auto, fp32, bf16, fp16, int8" in told_of("--precision", "int3")


def test_a_cell_of_a_sweep_has_its_own_bounds_whatever_is_set():
    class Process:
        def call(self, name, **arguments):
            self.overrides = arguments["overrides"]
            return "int8"

    process, mine = Process(), ["speculation.max_tokens=3", "speculation.drafter=auto"]
    task = drafts.Task([(1,)], (), "cpu", mine, ["int8"], ["off"], 4, 1, 1, 1)
    drafts._load(process, task, "int8", drafts.fixed("history", 8))
    made = configuration.load(overrides=process.overrides).speculation
    assert (made.drafter, made.min_tokens, made.max_tokens) == ("history", 8, 8)


def test_only_prompts_with_room_for_an_answer_are_asked(default_model):
    config = configuration.load(overrides=["model.max_context=64"])
    prompts = [(1,) * size for size in (10, 54, 55, 70, 3)]
    assert fitting(prompts, 10, config, load_tokenizer(config)) == [0, 1, 4]
    with pytest.raises(ConfigError, match="no prompt has at most 4 tokens"):
        fitting(prompts[:4], 60, config, load_tokenizer(config))


def test_answers_of_one_token_without_the_only_source_of_a_sweep_are_reported_and_drawn(
    default_model, tmp_path
):
    picture = tmp_path / "out.png"
    options = ["--limit", "1", "--max-tokens", "1", "--rounds", "1", "--json"]
    sweep = ["--sweep", "--drafters", "head,auto", "--set", "speculation.draft=none"]
    found = CliRunner().invoke(
        app, ["decode", *options, *sweep, "--plot", str(picture)], catch_exceptions=False
    )
    report = json.loads(found.stdout)
    assert report["sweep"] == []
    assert [absent["drafter"] for absent in report["unavailable"]] == ["head"]
    assert [run["tok_s"] for run in report["runs"]] == [None]
    assert picture.read_bytes().startswith(b"\x89PNG")
