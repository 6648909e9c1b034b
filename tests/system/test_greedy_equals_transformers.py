"""Greedy answers of each engine in fp32, speculation on, are those of `transformers.generate`."""

from __future__ import annotations

import importlib.util
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from mirror_sd import model_store
from tests.system.stack import MODEL, started

DATA = Path(__file__).resolve().parents[1] / "data"
GOLDEN = [
    json.loads(line)
    for line in (DATA / "support_greedy.jsonl").read_text(encoding="utf-8").splitlines()
]
BROKEN = "\N{REPLACEMENT CHARACTER}"


def answer(client: openai.OpenAI, row: dict[str, Any]) -> dict[str, Any]:
    found = client.chat.completions.create(
        model=MODEL, messages=row["messages"], temperature=0, max_tokens=64
    )
    assert found.usage is not None
    return {
        "id": row["id"],
        "prompt_tokens": found.usage.prompt_tokens,
        "text": found.choices[0].message.content,
        "finish_reason": found.choices[0].finish_reason,
    }


def expected(row: dict[str, Any]) -> dict[str, Any]:
    shown = {key: row[key] for key in ("id", "prompt_tokens", "text", "finish_reason")}
    # transformers shows half a character at the end as U+FFFD; a gateway leaves it out.
    return shown | {"text": row["text"].rstrip(BROKEN)}


# torch is slower, and has not changed since it passed all of them.
@pytest.mark.parametrize(("engine", "count"), [("native", 32), ("torch", 4)])
def test_support_prompts_are_answered_as_transformers_answers_them(engine: str, count: int) -> None:
    rows = GOLDEN[:: len(GOLDEN) // count]
    assert len(rows) == count
    settings = [f"pools.cpu.engine={engine}", "pools.cpu.precision=fp32"]
    with started(settings) as stack, stack.client() as client, ThreadPoolExecutor(4) as threads:
        assert stack.total("mirror_worker_engine_info", engine=engine, precision="fp32") == 1
        answers = list(threads.map(lambda row: answer(client, row), rows))
        assert stack.total("mirror_worker_accepted_tokens_total") > 0
    assert answers == [expected(row) for row in rows]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_golden_file_is_what_transformers_answers_today() -> None:
    path = DATA / "make_support_greedy.py"
    spec = importlib.util.spec_from_file_location("make_support_greedy", path)
    assert spec is not None and spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    tokenizer, model = maker.load(model_store.resolve(MODEL).path)
    for row in GOLDEN:
        assert row | maker.answer(tokenizer, model, row["messages"]) == row
