"""Processes that are asked in turn, and the ratios made of their answers; the peers are fakes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mirror_sd.bench import peer_lineup, peers
from mirror_sd.bench.cli import app
from mirror_sd.bench.machine import OtherLoad
from mirror_sd.bench.peer_lineup import OURS, Contestant
from mirror_sd.bench.peer_process import PeerFailed, PeerProcess, peer_command
from mirror_sd.errors import ConfigError
from mirror_sd.model_store import ModelFiles
from tests.unit.bench import fake_peer

LOAD: dict[str, Any] = {"pace_ms": 10.0, "streams": 1, "threads": 1, "stop": [0]}
TASK = peers.Task(
    prompts=[[1, 2, 3], [4, 5]],
    stop=(0,),
    max_tokens=11,
    streams=2,
    prefill=8,
    rounds=2,
    threads=1,
)


@pytest.fixture
def process() -> Iterator[PeerProcess]:
    with PeerProcess(fake_peer.command(), threads=1) as started:
        yield started


def contestant(name: str, pace_ms: float, **options: Any) -> Contestant:
    family = OURS if name.startswith(OURS) else name
    drafts = bool(options.pop("drafts", False))
    return Contestant(name, family, fake_peer.command(), {"pace_ms": pace_ms, **options}, drafts)


def state_of(pid: int) -> str:
    """The kernel's letter for what a process does: T when it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def sit(*contestants: Contestant, task: peers.Task = TASK) -> peers.Sitting:
    sitting = peers.Sitting(task, report=lambda line: None)
    sitting.one_stream(contestants)
    sitting.several_streams(contestants)
    return sitting


def test_what_a_library_prints_is_no_answer(process):
    process.call("load", **LOAD)
    [[start, times]] = process.call("generate", prompts=[[1, 2]], max_tokens=3)
    assert times == pytest.approx([start + 0.01, start + 0.02, start + 0.03])


def test_an_error_is_told_in_one_line_and_the_process_goes_on(process):
    with pytest.raises(PeerFailed, match=r"^ValueError: pace_ms is not above 0$"):
        process.call("load", **(LOAD | {"pace_ms": 0}))
    process.call("load", **LOAD)


def test_a_process_that_dies_leaves_its_last_words(process):
    process.call("load", **LOAD, dies_at=1)
    with pytest.raises(PeerFailed, match=r"ended \(SIGKILL\): dying"):
        process.call("generate", prompts=[[1]], max_tokens=1)
    with pytest.raises(PeerFailed, match="ended"):
        process.call("generate", prompts=[[1]], max_tokens=1)


def test_an_answer_that_does_not_come_is_an_error():
    with (
        PeerProcess(fake_peer.command(), threads=1) as process,
        pytest.raises(PeerFailed, match="no answer to 'spin' in time"),
    ):
        process.call("spin", 0.2, seconds=30)


def test_a_process_that_is_not_asked_does_not_run(process):
    process.call("spin", seconds=0.01)
    deadline = time.monotonic() + 10
    while state_of(process.pid) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state_of(process.pid) == "T"


def test_a_process_is_gone_when_its_context_is_left():
    with PeerProcess(fake_peer.command(), threads=1) as process:
        process.call("load", **LOAD)
        pid = process.pid
    assert not Path(f"/proc/{pid}").exists()


def test_its_peak_memory_is_its_own(process):
    ballast = b"x" * (300 << 20)
    with PeerProcess(fake_peer.command(), threads=1) as second:
        assert second.call("peak_rss_mb") < 200
    del ballast


def test_engines_take_turns_and_each_is_told_by_its_own_pace():
    sitting = sit(contestant("mirror-sd-a", 5.0), contestant("peer", 10.0))
    one = [(r["turn"], r["engine"]) for r in sitting.rows if r["mode"] == "one_stream"]
    assert one == [(0, "mirror-sd-a"), (0, "peer"), (1, "mirror-sd-a"), (1, "peer")]
    row = next(r for r in sitting.rows if r["mode"] == "one_stream")
    assert row["tok_s"] == pytest.approx(200, rel=0.01) and row["tokens"] == 22
    assert row["peak_rss_mb"] > 0 and len(row["read_gb_s"]) == 2 and min(row["read_gb_s"]) > 0
    assert row["other_cores"] >= 0

    compared = peers.compare(sitting.rows, ["mirror-sd-a"])
    assert set(compared["speeds"]) == {"one_stream", "streams", "streams_wall", "prefill"}
    for metric in ("one_stream", "streams", "prefill"):
        ratio = compared["ratios"][metric]["mirror-sd-a"]
        assert ratio["over_best"] == pytest.approx(2, rel=0.01)


def test_engines_that_draft_read_no_long_prompts_and_may_take_one_stream_only():
    sitting = sit(contestant("transformers", 5.0, drafts=True), contestant("openvino", 5.0))
    modes = {(r["mode"], r["engine"]) for r in sitting.rows}
    assert modes == {
        ("one_stream", "transformers"),
        ("one_stream", "openvino"),
        ("prefill", "openvino"),
        ("streams", "openvino"),
    }


def test_a_peer_that_fails_is_left_out_from_there_on():
    # The warm-ups are its first two calls, the first turn's prompts the third.
    failing = contestant("broken", 10.0, fails_at=3)
    sitting = sit(contestant("mirror-sd-a", 5.0), failing, task=replace(TASK, streams=1))
    assert {"peer": "broken", "reason": "RuntimeError: out of tokens"} in sitting.failed
    assert [r["engine"] for r in sitting.rows if r["mode"] == "one_stream"].count("broken") == 0


def test_that_our_own_engine_fails_is_an_error():
    with pytest.raises(PeerFailed, match="mirror-sd-a: RuntimeError: out of tokens"):
        sit(contestant("mirror-sd-a", 5.0, fails_at=3))


def test_ratios_are_of_means_and_show_the_extremes_of_the_turns():
    def row(engine: str, tok_s: float) -> dict[str, Any]:
        return {"mode": "one_stream", "engine": engine, "tok_s": tok_s}

    rows = [
        *(row("mirror-sd-a", 200), row("x", 100), row("y", 50)),
        *(row("mirror-sd-a", 400), row("x", 100), row("y", 200)),
    ]
    compared = peers.compare(rows, ["mirror-sd-a"])
    assert compared["speeds"] == {"one_stream": {"mirror-sd-a": 300, "x": 100, "y": 125}}
    assert compared["ratios"]["one_stream"]["mirror-sd-a"] == {
        "best_peer": "y",
        "over_best": 2.4,
        "over": {"x": 3.0, "y": 2.4},
        "extremes": {"x": [2.0, 4.0], "y": [2.0, 4.0]},
    }


def test_what_others_compute_beside_a_process_is_seen(process):
    end = time.monotonic() + 0.3
    with OtherLoad(process.pid) as others:
        while time.monotonic() < end:
            pass
    assert others.cores > 0.3


def test_long_prompts_have_the_asked_length_and_differ_in_every_turn():
    task = replace(TASK, prompts=[list(range(100)), list(range(100, 300))], prefill=40)
    seen = [tuple(p) for turn in range(3) for p in task.long_prompts(turn)]
    assert {len(prompt) for prompt in seen} == {40} and len(set(seen)) == len(seen)


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """An interpreter that sees the standard library alone."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    path.chmod(0o755)
    return path


def test_peers_that_an_interpreter_lacks_are_listed_with_the_reason(
    tmp_path, monkeypatch, bare_python
):
    monkeypatch.setenv("MIRROR_SD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text("{}")
    lineup = peer_lineup.peers(
        bare_python,
        ModelFiles("m", tmp_path, "safetensors"),
        wanted=[],
        context=256,
        threads=1,
        report=lambda line: None,
    )
    assert lineup.contestants == [] and lineup.versions == {}
    assert {row["peer"] for row in lineup.absent} == {
        "transformers-bf16",
        "transformers-bf16-lookup",
        "openvino-int8",
        "openvino-int8-lookup",
    }
    assert all("ModuleNotFoundError: No module named" in row["reason"] for row in lineup.absent)


@pytest.fixture
def gguf_lineup(tmp_path, monkeypatch):
    """Make the line-up of a GGUF file by fakes, and note what had to be prepared."""
    monkeypatch.setenv("MIRROR_SD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(peer_lineup, "peer_command", lambda python: fake_peer.command())
    monkeypatch.setattr(peer_lineup, "_file_type", lambda files: "q4_1")
    model = tmp_path / "m.gguf"
    model.write_bytes(b"weights")
    prepared: list[str] = []

    def make(*wanted: str) -> tuple[peer_lineup.Lineup, list[str]]:
        prepared.clear()
        lineup = peer_lineup.peers(
            Path("python"),
            ModelFiles("m", model, "gguf"),
            wanted=wanted,
            context=256,
            threads=1,
            report=prepared.append,
        )
        return lineup, [line.rpartition("/")[2] for line in prepared]

    return make


def test_each_form_of_a_model_is_made_once_and_kept(gguf_lineup):
    lineup, prepared = gguf_lineup()
    assert prepared == ["transformers", "q8_0.gguf", "bf16.gguf", "openvino"]
    models = {one.name: Path(one.options["model"]) for one in lineup.contestants}
    assert models["llamacpp-q4_1"].name == "m.gguf"
    assert models["llamacpp-q8_0"].read_text() == f"q8_0 of {models['llamacpp-q4_1']}"
    assert models["transformers-bf16"] == models["transformers-bf16-lookup"]
    assert lineup.versions["llamacpp"] == "llamacpp 1.0"
    _, prepared = gguf_lineup()
    assert prepared == ["openvino"]


def test_a_form_that_cannot_be_made_leaves_its_peers_out_and_nothing_behind(gguf_lineup, tmp_path):
    lineup, _ = gguf_lineup("openvino-int8", "llamacpp-bf16")
    assert [one.name for one in lineup.contestants] == ["llamacpp-bf16"]
    assert lineup.absent == [{"peer": "openvino-int8", "reason": "RuntimeError: the export failed"}]
    [cache] = (tmp_path / "cache" / "peers").iterdir()
    assert {path.name for path in cache.iterdir()} == {"transformers", "bf16.gguf"}


def test_forms_that_cannot_be_kept_leave_their_peers_out(gguf_lineup, tmp_path):
    (tmp_path / "cache").write_text("a file where the cache should be")
    lineup, prepared = gguf_lineup()
    assert [one.name for one in lineup.contestants] == ["llamacpp-q4_1"]
    assert all("cannot keep" in row["reason"] for row in lineup.absent)
    assert prepared == ["transformers", "q8_0.gguf", "bf16.gguf"]


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory) -> Path:
    import torch
    import transformers

    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
    )
    directory: Path = tmp_path_factory.mktemp("tiny")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(("streams", "lookup"), [(1, 0), (1, 3), (2, 0)])
def test_transformers_tells_a_time_for_each_token_of_each_prompt(tiny_directory, streams, lookup):
    stop = list(range(0, 40, 8))
    prompts = [[1, 2, 3, 1, 2], [4, 5], [6, 7, 9]]
    with PeerProcess(peer_command(Path(sys.executable)), threads=1) as process:
        process.call(
            "load",
            family="transformers",
            model=str(tiny_directory),
            threads=1,
            streams=streams,
            stop=stop,
            lookup=lookup,
        )
        timelines = process.call("generate", prompts=prompts, max_tokens=12)
    expected = greedy_lengths(tiny_directory, prompts, stop, 12)
    assert [len(times) for _, times in timelines] == expected
    assert all(sorted(times) == times and times[0] > start for start, times in timelines)
    assert len({start for start, _ in timelines}) == -(-len(prompts) // streams)


def greedy_lengths(
    directory: Path, prompts: list[list[int]], stop: list[int], limit: int
) -> list[int]:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    lengths = []
    for prompt in prompts:
        ids = list(prompt)
        while len(ids) - len(prompt) < limit and not (ids[-1] in stop and ids != prompt):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        lengths.append(len(ids) - len(prompt))
    return lengths


def test_an_interpreter_that_is_none_is_named(tmp_path):
    with (
        pytest.raises(ConfigError, match=r"cannot start .*/none"),
        PeerProcess(peer_command(tmp_path / "none"), threads=1),
    ):
        pass


def test_an_unknown_peer_is_refused_with_the_known_ones(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no peer 'vllm' .* transformers-bf16,"):
        peer_lineup.peers(
            Path(sys.executable),
            ModelFiles("m", tmp_path, "safetensors"),
            wanted=["vllm"],
            context=256,
            threads=1,
            report=lambda line: None,
        )


def test_the_peer_drivers_need_nothing_of_ours(bare_python):
    with PeerProcess(peer_command(bare_python), threads=1) as process:
        assert process.call("peak_rss_mb") > 0


@pytest.mark.parametrize("option", ["--precision", "--drafters"])
def test_an_unknown_word_is_bad_usage(option):
    assert CliRunner().invoke(app, ["peers", option, "int7"]).exit_code == 2


@pytest.mark.parametrize(("arguments", "threads"), [([], 3), (["--threads", "1"], 1)])
def test_all_engines_have_the_threads_asked_or_those_of_the_configuration(
    default_model, monkeypatch, arguments, threads
):
    given: list[int] = []
    monkeypatch.setattr(peers, "run", lambda task, *_, **__: given.append(task.threads) or {})
    settings = ["--json", "--limit", "1", "--set", "pools.cpu.threads=3"]
    result = CliRunner().invoke(app, ["peers", *settings, *arguments])
    assert (result.exit_code, given) == (0, [threads])
