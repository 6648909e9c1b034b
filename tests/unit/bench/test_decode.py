"""`bench decode` on the real default model, and the streams that it keeps going."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from mirror_sd import config as configuration
from mirror_sd.bench import decode_command, draft_figures, near_duplicates
from mirror_sd.bench.cli import app
from mirror_sd.bench.decode import greedy, run_engine
from mirror_sd.bench.options import table
from mirror_sd.bench.peer_engine import EngineSession
from mirror_sd.errors import ConfigError
from mirror_sd.offline import load_tokenizer
from tests.unit.bench.test_bench import engine_on
from tests.unit.speculative.hash_target import HashTarget

FIELDS = {
    "round",
    "drafter",
    "precision",
    "tok_s",
    "ms_per_token",
    "accepted_per_verify",
    "acceptance",
    "sources",
    "speedup",
    "decode_tok_s",
    "decode_speedup",
    "draft_ms",
    "verify_ms",
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


def documented() -> set[str]:
    text = (Path(__file__).resolve().parents[3] / "docs/benchmarks.md").read_text(encoding="utf-8")
    return set(re.findall(r"`(\w+)`", text))


def test_every_key_is_documented(report, near_duplicate_report):
    near, _ = near_duplicate_report
    [sweep] = near["sweep"]
    parts = [report, near, *report["runs"], *near["runs"], *near["drafters"], *near["unavailable"]]
    parts += [sweep, sweep["best"], *sweep["grid"], near["runs"][0]["kinds"]["digit_change"]]
    keys = {key for part in parts for key in part} - {"reason"}
    assert keys - documented() == set()


def test_drafts_change_no_token_and_figures_are_of_a_real_run(report):
    for run in report["runs"]:
        assert run["identical_to_plain"] is True
        assert run["tok_s"] > 0 and run["ms_per_token"] > 0 and run["ttft_ms"] > 0
        assert run["peak_rss_mb"] > 100
        if run["drafter"] == "off":
            assert run["accepted_per_verify"] == run["speedup"] == 1
            assert run["acceptance"] is None
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
        # So that answers differ in length.
        greedy(9, tuple(range(0, 64, 16)), speculation=False),
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
    plain = run_engine(engine_on(HashTarget()), [(1, 2, 3)], greedy(9, (), speculation=False))
    stop = (plain.tokens[0][4],)
    cut = plain.tokens[0].index(stop[0])
    run = run_engine(engine_on(HashTarget()), [(1, 2, 3)], greedy(9, stop, speculation=False))
    assert run.tokens[0] == plain.tokens[0][:cut]
    assert len(run.times[0]) == cut + 1
    assert run.accepted_per_verify() == 1


def test_only_steps_without_prompts_to_read_count_as_decoding():
    clock = iter(range(10_000))
    run = run_engine(
        engine_on(HashTarget()),
        [tuple(range(1, 40)), (5, 6)],  # the first takes three forwards to read
        greedy(6, (), speculation=False),
        concurrency=2,
        clock=lambda: float(next(clock)),
    )
    assert sum(map(len, run.tokens)) == 12
    # Until the first has its first token, the second gets up to three; then each step gives two.
    assert run.steps == 5 and run.step_tokens < 12 and run.step_s == 5.0
    assert run.decode_tok_s() == run.step_tokens / 5


def test_each_prompt_has_a_seed_of_its_own():
    params = msgspec.structs.replace(greedy(12, (), speculation=False), temperature=1.0)
    run = run_engine(engine_on(HashTarget()), [(1, 2, 3)] * 3, params, concurrency=3)
    assert len({tuple(tokens) for tokens in run.tokens}) == 3
    again = run_engine(engine_on(HashTarget()), [(1, 2, 3)] * 3, params)
    assert again.tokens == run.tokens


def test_a_hint_is_drafted_from():
    engine = engine_on(HashTarget(), min_tokens=4)  # drafts whether it pays or not
    params = greedy(20, (), speculation=True)
    first = run_engine(engine, [(1, 2, 3)], params, tag="a")
    second = run_engine(engine, [(1, 2, 3)], params, tag="b", hint=tuple(first.tokens[0]))
    assert second.tokens == first.tokens
    assert second.accepted_per_verify() > first.accepted_per_verify()


CLUSTERS = [
    ("base", "exact", "a"),
    ("v1", "digit_change", "a"),
    ("v2", "negation", "a"),
    ("v3", "paraphrase_small", "b"),
    ("v4", "whitespace_case", "a"),
]


@pytest.fixture
def clusters(tmp_path):
    path = tmp_path / "clusters.jsonl"
    rows = [
        {
            "cluster": cluster,
            "variant": variant,
            "kind": kind,
            "tenant": tenant,
            "messages": [
                {"role": "user", "content": f"Where is my order {50 + cluster}? It is {variant}."}
            ],
        }
        for cluster in (2, 1)
        for variant, kind, tenant in reversed(CLUSTERS)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_of_near_duplicates_the_base_comes_first_and_what_may_be_drafted_from_it(clusters):
    config = configuration.load()
    ids, found = near_duplicates.load(clusters, None, config, load_tokenizer(config), hinted=False)
    assert found.kinds == [None, "whitespace_case", "digit_change"] * 2
    assert set(found.tenants) == {"a"} and set(found.hints) == {None}
    assert len(ids) == len(set(ids)) == 6
    assert (
        len(near_duplicates.load(clusters, 1, config, load_tokenizer(config), hinted=False)[0]) == 3
    )


def test_the_merger_says_which_answer_is_hinted(clusters):
    config = configuration.load()
    _, found = near_duplicates.load(clusters, 1, config, load_tokenizer(config), hinted=True)
    assert found.hints[0] is None and found.hints[1] == 0 and found.hints[2] in (0, 1)


def test_a_file_without_variants_to_measure_is_named(tmp_path):
    path = tmp_path / "clusters.jsonl"
    path.write_text(
        '{"cluster": 1, "variant": "base", "kind": "exact", "tenant": "a", "messages": []}'
    )
    config = configuration.load()
    with pytest.raises(ConfigError, match="no variant of kind"):
        near_duplicates.load(path, None, config, load_tokenizer(config), hinted=False)


def row(round_: int, drafter: str, tok_s: float, **more: object) -> dict[str, object]:
    figures = dict.fromkeys(
        ("ms_per_token", "accepted_per_verify", "acceptance", "draft_ms", "verify_ms")
    )
    common = {"precision": "int8", "tok_s": tok_s, "decode_tok_s": tok_s, "answers": [[1]]}
    return {"round": round_, "drafter": drafter, **common, **figures, **more}


def test_speed_ups_are_over_the_same_turn_and_means_over_all():
    rows = [row(0, "off", 100.0), row(0, "auto", 150.0), row(1, "off", 200.0)]
    rows.append(row(1, "auto", 400.0, answers=[[2]]))
    draft_figures.compare(rows)
    assert [r["speedup"] for r in rows] == [1.0, 1.5, 1.0, 2.0]
    assert [r["identical_to_plain"] for r in rows] == [True, True, True, False]
    off, auto = draft_figures.by_drafter(rows)
    assert (off["tok_s"], auto["tok_s"], auto["speedup"]) == (150.0, 275.0, 1.75)
    assert auto["speedup_range"] == [1.5, 2.0] and auto["identical_to_plain"] is False


def test_without_a_plain_run_nothing_is_claimed():
    rows = [row(0, "auto", 150.0)]
    draft_figures.compare(rows)
    assert rows[0]["speedup"] is None and rows[0]["identical_to_plain"] is None
    [mean] = draft_figures.by_drafter(rows)
    assert mean["speedup"] is None and mean["identical_to_plain"] is None


def test_a_sweep_tells_how_far_the_chooser_is_from_the_best():
    rows = [row(0, "off", 100.0), row(0, "auto", 500.0)]
    cells = [
        {**row(turn, "", speed), "source": source, "length": length}
        for turn, source, length, speed in (
            (0, "lookup", 4, 90.0),
            (0, "head", 1, 210.0),
            (0, "head", 4, 200.0),
            (1, "head", 1, 130.0),
            (1, "head", 4, 180.0),
        )
    ]
    draft_figures.compare([*rows, *cells])
    assert draft_figures.best("int8", rows, cells) == ("head", 4)
    pairs = {"int8": [(190.0, 200.0), (99.0, 100.0), (120.0, 100.0)]}
    [found] = draft_figures.sweep(rows, cells, pairs)
    assert (found["best"]["source"], found["best"]["length"]) == ("head", 4)
    assert found["best"]["tok_s"] == 190.0
    assert found["by_turn"] == [0.95, 0.99, 1.2] and found["auto_over_best"] == 0.99
    assert [(cell["source"], cell["length"]) for cell in found["grid"]] == [
        ("off", 0),
        ("lookup", 4),
        ("head", 1),
        ("head", 4),
    ]


def test_no_draft_at_all_can_be_the_best():
    rows = [row(0, "off", 100.0), row(0, "auto", 98.0)]
    cells = [{**row(0, "", 90.0), "source": "lookup", "length": 4}]
    draft_figures.compare([*rows, *cells])
    assert draft_figures.best("int8", rows, cells) == ("off", 0)
    [found] = draft_figures.sweep(rows, cells, {})
    assert found["best"]["source"] == "off" and found["auto_over_best"] is None


def test_a_table_is_aligned_and_shows_what_is_missing():
    assert table([{"a": 1.5, "b": None}, {"a": 12, "b": "x"}], ("a", "b")) == (
        "  a  b\n1.5  -\n 12  x"
    )


@pytest.fixture(scope="module")
def near_duplicate_report(default_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("near")
    lines = [
        {"cluster": 1, "variant": variant, "kind": kind, "tenant": "a"}
        | {"messages": [{"role": "user", "content": f"Say the number {number} in words."}]}
        for variant, kind, number in (("base", "exact", 12), ("v1", "digit_change", 13))
    ]
    path = folder / "clusters.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    options = ["--near-duplicates", "--hints", "--temperature", "1", "--sweep", "--lengths", "2"]
    options += ["--set", "speculation.draft=none"]
    short = ["--max-tokens", "8", "--rounds", "1", "--drafters", "off,lookup,head,auto"]
    picture = folder / "out.png"
    result = CliRunner().invoke(
        app,
        ["decode", "--dataset", str(path), *options, *short, "--plot", str(picture), "--json"],
        catch_exceptions=False,
    )
    return json.loads(result.stdout), picture


@pytest.mark.parametrize(
    ("options", "drafters"),
    [([], ["off", "auto"]), (["--sweep"], ["off", "lookup", "history", "head", "auto"])],
)
def test_drafters_that_are_not_named_are_all_that_a_sweep_needs(
    default_model, monkeypatch, options, drafters
):
    tasks = []

    def measure(task, report):
        tasks.append(task)
        return {"runs": [], "drafters": [], "unavailable": [], "sweep": []}

    monkeypatch.setattr(decode_command.drafts, "measure", measure)
    found = CliRunner().invoke(app, ["decode", "--limit", "1", *options], catch_exceptions=False)
    assert found.exit_code == 0
    assert [task.drafters for task in tasks] == [drafters]


def test_sampled_near_duplicates_are_the_same_with_any_drafts(near_duplicate_report):
    report, _ = near_duplicate_report
    assert [run["drafter"] for run in report["runs"]] == ["off", "lookup", "auto"]
    for run in report["runs"]:
        assert run["identical_to_plain"] is True and set(run["kinds"]) == {"digit_change"}
    [sweep] = report["sweep"]
    assert [(c["source"], c["length"]) for c in sweep["grid"]] == [("off", 0), ("lookup", 2)]
    assert all(cell["identical_to_plain"] is True for cell in sweep["grid"])
    assert sweep["auto_over_best"] > 0 and len(sweep["by_turn"]) == 4


def test_a_source_that_is_not_there_is_reported_with_its_reason(near_duplicate_report):
    [absent] = near_duplicate_report[0]["unavailable"]
    assert (absent["precision"], absent["drafter"]) == ("int8", "head") and absent["reason"]


def test_a_draft_that_cannot_be_read_is_the_reason_told(default_model, tmp_path):
    damaged = tmp_path / "damaged.draft.safetensors"
    damaged.write_bytes(b"not a draft")
    session = EngineSession()
    settings = ["speculation.drafter=auto", f"speculation.draft={damaged}"]
    session.load([*settings, "engine.kv_cache_mb=64"], threads=1, streams=1, stop=[])
    missing = session.missing(["lookup", "history", "head", "auto"])
    assert set(missing) == {"head"} and "damaged.draft" in missing["head"]
    session.load(["speculation.enabled=false"], threads=1, streams=1, stop=[])
    assert session.missing(["lookup"]) == {"lookup": "speculation.enabled is false"}


def test_a_decode_report_becomes_a_picture(near_duplicate_report):
    _, picture = near_duplicate_report
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
