"""ROUGE-L of answers: known values, both ways of writing data sets, and the command's verdict."""

from __future__ import annotations

import json
import sys

import pytest
from rouge_score import tokenize
from typer.testing import CliRunner

from mirror_sd.bench import answer_quality, prompts, rouge
from mirror_sd.bench.cli import app
from mirror_sd.errors import ConfigError, SetupError
from tests.unit.bench.test_decode import documented

SHAREGPT = [
    {
        "id": "one",
        "conversations": [
            {"from": "human", "value": "Say yes."},
            {"from": "gpt", "value": "Yes."},
            {"from": "human", "value": "Say no."},
            {"from": "gpt", "value": "No."},
        ],
    },
    {"messages": [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "您好！"}]},
]


@pytest.fixture
def sharegpt(tmp_path):
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(SHAREGPT, ensure_ascii=False, indent=1), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "text", ["It's 4 cm wide, HP-40733!", "Don't\n\nDO that; x_y = 3.5e-7", "", " - "]
)
def test_english_is_split_as_the_package_splits_it(text):
    assert rouge.WordSplitter().tokenize(text) == tokenize.tokenize(text, None)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("我的包裹 HP-12", ["我", "的", "包", "裹", "hp", "12"]),
        ("カップ3個", ["カ", "ッ", "プ", "3", "個"]),
        ("배송", ["배", "송"]),
        ("Grüße, ёлка", ["grüße", "ёлка"]),
        ("𠀀a", ["𠀀", "a"]),
    ],
)
def test_scripts_without_spaces_are_split_by_character(text, tokens):
    assert rouge.WordSplitter().tokenize(text) == tokens


@pytest.mark.parametrize(
    ("reference", "answer", "value"),
    [
        ("the cat sat on the mat", "the cat sat on the mat", 1.0),
        ("the cat sat", "the dog sat", 2 / 3),
        ("退款会在五天内到账", "退款五天到账", 2 * 6 / (9 + 6)),
        ("yes", "no", 0.0),
        ("yes", "", 0.0),
    ],
)
def test_rouge_l_is_that_of_the_longest_common_subsequence(reference, answer, value):
    assert rouge.rouge_l([reference], [answer]) == [pytest.approx(value)]


def test_a_missing_package_is_told_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(SetupError, match=r"pip install -e '\.\[bench\]'"):
        rouge.rouge_l(["a"], ["a"])


def test_every_answer_of_a_data_set_is_a_reference_to_what_stands_before_it(sharegpt):
    chats = prompts.conversations(sharegpt)
    assert [[m["role"] for m in chat] for chat in chats] == [
        ["user", "assistant"] * 2,
        ["user", "assistant"],
    ]
    found = prompts.exchanges(chats)
    assert [(len(e.messages), e.reference) for e in found] == [
        (1, "Yes."),
        (3, "No."),
        (1, "您好！"),
    ]
    assert found[1].messages[-1] == {"role": "user", "content": "Say no."}


def test_prompts_end_with_what_is_asked(sharegpt):
    first, second = prompts.load(sharegpt)
    assert [m["content"] for m in first] == ["Say yes.", "Yes.", "Say no."]
    assert second == [{"role": "user", "content": "你好"}]
    assert prompts.load(sharegpt, 1) == [first]


def test_lines_may_hold_conversations_too(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(item) for item in SHAREGPT), encoding="utf-8")
    assert len(prompts.exchanges(prompts.conversations(path))) == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[{", "is not JSON"),
        ("[]", "has no conversation"),
        ("[1]", "conversation 1: a conversation is not an object"),
        ('[{"conversations": []}]', "conversation 1: neither"),
        ('[{"conversations": [1]}]', "a turn is not an object"),
        ('[{"conversations": [{"from": "cat", "value": "x"}]}]', "the role 'cat'"),
        ('[{"conversations": [{"from": ["a"], "value": "x"}]}]', "of a turn is not one of"),
        ('[{"conversations": [{"from": "gpt", "value": "x"}]}]', "1: nothing but answers"),
        ('[{"conversations": [{"from": "human"}]}]', "the text of a user turn is not text"),
    ],
)
def test_a_damaged_array_is_named_with_the_place(tmp_path, text, says):
    path = tmp_path / "data.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        prompts.load(path)


class Words:
    """Tokens are words."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def decode(self, tokens):
        return " ".join(self._words[token] for token in tokens)


def row(run, answers, identical):
    return {"run": run, "tok_s": 1.0, "identical_to_plain": identical, "answers": answers}


def quality_task(**more):
    fields = {"prompts": [(1,), (2,)], "references": ["a b", "c d"], "stop": (9,), "pool": "cpu"}
    fields |= {"overrides": (), "precisions": ["int8"], "drafters": ["off", "auto"]}
    return answer_quality.Task(files=None, max_tokens=4, threads=1, **fields | more)


def test_a_run_has_time_for_all_its_prompts():
    assert quality_task().timeout_s == 3600.0
    assert quality_task(prompts=[(1,)] * 1000).timeout_s == 64_000.0


def test_what_ours_cannot_do_is_told_before_the_slower_library_answers(monkeypatch):
    def refuse(*_):
        raise ConfigError("no such precision here")

    monkeypatch.setattr(answer_quality.peer_lineup, "transformers_model", lambda *_: None)
    monkeypatch.setattr(answer_quality, "_ours", refuse)
    monkeypatch.setattr(answer_quality, "_transformers", lambda *_: pytest.fail("too early"))
    with pytest.raises(ConfigError, match="no such precision"):
        answer_quality.measure(quality_task(), Words(), lambda line: None)


@pytest.mark.parametrize("same", [True, False, None])
def test_differences_are_from_fp32_and_a_changed_token_is_told(monkeypatch, same):
    plain = [[0, 1], [2, 4]]
    rows = [row("ours", plain, None), row("ours-auto", plain, same)]
    monkeypatch.setattr(answer_quality.peer_lineup, "transformers_model", lambda *_: None)
    expected = [[0, 1, 9], [2, 3]]
    monkeypatch.setattr(
        answer_quality, "_transformers", lambda *_: row("transformers-fp32", expected, None)
    )
    monkeypatch.setattr(answer_quality, "_ours", lambda *_: (rows, []))
    words = Words("a", "b", "c", "d", "x")
    found = answer_quality.measure(quality_task(), words, lambda line: None)
    assert found["speculative_equals_plain"] is same and found["references"] == 2
    fp32, ours, _ = found["runs"]
    assert (fp32["rouge_l"], fp32["difference"], fp32["identical_to_fp32"]) == (1.0, 0.0, 1.0)
    assert (ours["rouge_l"], ours["difference"]) == (0.75, -0.25)
    assert (ours["relative_difference"], ours["difference_error"]) == (-0.25, 0.25)
    assert ours["identical_to_fp32"] == 0.5 and "answers" not in ours


@pytest.mark.parametrize(
    ("is_same", "status", "said"),
    [(True, 0, "True"), (False, 1, "False"), (None, 0, "nothing was drafted")],
)
def test_the_command_fails_where_drafts_change_a_token(
    default_model, monkeypatch, sharegpt, is_same, status, said
):
    found = {"references": 3, "runs": [], "unavailable": [], "speculative_equals_plain": is_same}
    monkeypatch.setattr(answer_quality, "measure", lambda *_: found)
    result = CliRunner().invoke(app, ["quality", "--dataset", str(sharegpt), "--parts", "rouge"])
    assert result.exit_code == status and f"speculative = plain: {said}" in result.output


def test_an_exchange_longer_than_the_context_is_left_out_and_counted(
    default_model, monkeypatch, sharegpt
):
    tasks = []

    def measure(task, *_):
        tasks.append(task)
        return {"references": 1, "runs": [], "unavailable": [], "speculative_equals_plain": None}

    monkeypatch.setattr(answer_quality, "measure", measure)
    options = ["--parts", "rouge", "--max-tokens", "4", "--set", "model.max_context=48"]
    result = CliRunner().invoke(app, ["quality", "--dataset", str(sharegpt), *options, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rouge"]["left_out"] == 1
    assert tasks[0].references == ["Yes.", "您好！"]


@pytest.mark.parametrize("options", [["--parts", "rouge"], ["--plot", "out.png"]])
def test_without_answers_in_the_data_set_there_is_no_rouge(options):
    result = CliRunner().invoke(app, ["quality", *options])
    assert result.exit_code == 2


def test_real_answers_are_measured_beside_transformers(default_model, sharegpt, tmp_path):
    picture = tmp_path / "quality.png"
    options = ["--limit", "1", "--max-tokens", "6", "--parts", "rouge", "--precision", "fp32"]
    options += ["--drafters", "off,lookup,head", "--set", "speculation.draft=none"]
    result = CliRunner().invoke(
        app,
        ["quality", "--dataset", str(sharegpt), *options, "--plot", str(picture), "--json"],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    found = report["rouge"]
    assert "reference" not in report and found["references"] == 2
    assert [run["run"] for run in found["runs"]] == [
        "transformers-fp32",
        "mirror-sd-fp32",
        "mirror-sd-fp32-lookup",
    ]
    # In fp32 the engine answers as transformers does.
    assert [run["identical_to_fp32"] for run in found["runs"]] == [1.0] * 3
    assert [run["identical_to_plain"] for run in found["runs"]] == [None, None, True]
    assert all(run["tok_s"] > 0 and run["ms_per_token"] > 0 for run in found["runs"])
    assert found["speculative_equals_plain"] is True
    assert [absent["drafter"] for absent in found["unavailable"]] == ["head"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    keys = {key for part in (report, found, *found["runs"]) for key in part}
    assert keys - documented() == set()
