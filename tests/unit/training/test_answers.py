"""Which prompts the target answers, and which answers a run that goes on takes over."""

from __future__ import annotations

import time
from pathlib import Path
from typing import cast

import pytest

from mirror_sd import config as configuration
from mirror_sd import model_store
from mirror_sd.api.tokenizer import ModelFacts, Tokenizer
from mirror_sd.config import EngineConfig
from mirror_sd.config_speculation import SpeculationConfig
from mirror_sd.engine import Engine
from mirror_sd.errors import ConfigError
from mirror_sd.training import answers, corpus
from mirror_sd.training.answers import Task
from mirror_sd.training.corpus import Target
from mirror_sd.training.plan import DataPlan
from mirror_sd.training.prompts import Conversation
from tests.unit.speculative.hash_target import HashTarget

MODEL = "smollm2-135m-instruct"
is_pulled = any(m.name == MODEL and m.path is not None for m in model_store.available())
PLAN = DataPlan(answers=4, self_asked=0, held_out=1, answer_tokens=8, prompt_tokens=10)


class Letters:
    """Tokens are letters."""

    facts = ModelFacts("m", max_context=64, vocab_size=128, eos_token_ids=())

    def encode_chat(self, turns: list[tuple[str, str]]) -> list[int]:
        return [ord(letter) for _, text in turns for letter in text]


def _tasks(plan: DataPlan, *texts: str) -> tuple[list[Task], list[str]]:
    """Of a conversation for each text, and what was said."""
    said: list[str] = []
    asked = [
        Conversation(({"role": "user", "content": text},), "en", "own", f"chat {index:02}")
        for index, text in enumerate(texts)
    ]
    return answers.tasks(cast(Tokenizer, Letters()), asked, [], plan, 0, said.append), said


def test_a_prompt_that_is_too_long_is_told_and_another_takes_its_place() -> None:
    texts = ["long" * 5] * 8 + [str(index) for index in range(16)]
    wanted, said = _tasks(PLAN, *texts)
    trained = [task.prompt for task in wanted if not task.is_held_out]
    assert len(set(trained)) == PLAN.answers
    (line,) = said
    left_out, _, read = line.removeprefix("left out: ").partition(" prompts")[0].split()[0:3]
    assert 6 <= int(left_out) <= 8 and int(left_out) + 4 <= int(read) <= len(texts)
    assert line.endswith("of more than 10 tokens (--prompt-tokens)")


@pytest.mark.parametrize(
    ("plan", "limit"),
    [
        (PLAN, r"10 tokens \(--prompt-tokens\)"),
        (
            DataPlan(answers=4, held_out=1, answer_tokens=60),
            r"3 tokens \(the context of 64 less --answer-tokens 60\)",
        ),
    ],
)
def test_what_limits_the_prompts_is_named_where_none_is_left(plan: DataPlan, limit: str) -> None:
    with pytest.raises(ConfigError, match=rf"no prompt to train on of at most {limit}"):
        _tasks(plan, *["long" * 5] * 8)


def test_of_a_long_file_those_are_taken_that_the_seed_draws(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    lines = [f'{{"messages": [{{"role": "user", "content": "{n}"}}]}}' for n in range(40)]
    file.write_text("\n".join(lines), encoding="utf-8")

    def order(seed: int) -> list[int]:
        return [int(prompt.messages[0]["content"]) for prompt in corpus._asked(file, seed)]

    assert order(0) == order(0) != order(1)
    assert sorted(order(0)) == sorted(order(1)) == list(range(40))


def test_the_time_of_a_run_that_was_broken_off_counts(tmp_path: Path) -> None:
    file = tmp_path / "seconds"
    with pytest.raises(KeyboardInterrupt), corpus._counted(file):
        time.sleep(0.05)
        raise KeyboardInterrupt
    before = corpus._spent(file)
    with corpus._counted(file):
        time.sleep(0.05)
    assert before >= 0.05 and corpus._spent(file) >= before + 0.05


def _engine(memory: int) -> Engine:
    return Engine(
        HashTarget(vocab=128, memory=memory),
        EngineConfig(block_size=4, kv_cache_mb=64),
        SpeculationConfig(),
        model_name="m",
        device_class="cpu",
        slots=2,
    )


def test_answers_of_another_model_are_made_anew(tmp_path: Path) -> None:
    wanted = [Task((1, 2, index), "en", "o", False, 0.0, 0, 8) for index in range(3)]
    file = tmp_path / "answers.jsonl"
    told: list[int] = []
    first = answers.answer(_engine(4), "one", wanted, (), file, told.append)
    assert answers.answer(_engine(3), "one", wanted, (), file, told.append) == first
    other = answers.answer(_engine(3), "other", wanted, (), file, told.append)
    assert other == answers.answer(_engine(3), "o", wanted, (), tmp_path / "x", told.append)
    assert other != first


def test_a_finetune_has_another_mark_than_its_parent(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(5_000_000))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    parent = corpus._contents(tmp_path)
    assert corpus._contents(tmp_path) == parent
    with file.open("r+b") as content:
        content.seek(4_999_999)
        content.write(b"1")
    assert corpus._contents(tmp_path) != parent
    file.write_bytes(b"1" * 5_000_000)
    assert corpus._contents(file) != corpus._contents(tmp_path)


@pytest.mark.skipif(not is_pulled, reason=f"{MODEL} is not pulled")
def test_a_target_is_named_by_its_files_and_marked_by_its_precision(tmp_path: Path) -> None:
    named, rounded = (
        Target.of(configuration.load(overrides=overrides), tmp_path)
        for overrides in (["model.served_name=org/chat"], ["pools.cpu.precision=fp32"])
    )
    assert named.name == rounded.name == MODEL
    assert named.mark != rounded.mark
