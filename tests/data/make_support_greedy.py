"""Write support_greedy.jsonl: what transformers answers, greedily, in fp32, to 32 support prompts.

    python tests/data/make_support_greedy.py WORKLOAD.jsonl MODEL.gguf

Nothing of Mirror-SD is used: transformers (with accelerate) reads the GGUF and `generate` decodes.
WORKLOAD.jsonl holds one `{"id", "lang", "messages"}` a line; the checked-in result was made from
the project's support workload (invented text, CC0-1.0) on 2026-11-29 with torch 2.13.0 and
transformers 5.24.0. `tests/system/test_greedy_equals_transformers.py` has a slow test that
computes the same again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PROMPTS = {"en": 20, "zh": 12}
MAX_CHARACTERS = 800
NEW_TOKENS = 64


def choose(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first prompts of each language that are short enough, in file order."""
    left = dict(PROMPTS)
    chosen = []
    for row in rows:
        length = sum(len(message["content"]) for message in row["messages"])
        if left.get(row["lang"], 0) > 0 and length <= MAX_CHARACTERS:
            left[row["lang"]] -= 1
            chosen.append({key: row[key] for key in ("id", "lang", "messages")})
    return chosen


def load(model: Path) -> tuple[Any, Any]:
    """(tokenizer, model) as transformers reads them from the GGUF."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": model.parent, "gguf_file": model.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # The file says tokenizer.ggml.pre = smollm (digits stand alone), which transformers ignores.
    tokenizer._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    return tokenizer, AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()


def answer(tokenizer: Any, model: Any, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Greedy completion of a chat: ids without the end token, their text, and why it ended."""
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    length = prompt["input_ids"].shape[1]
    ids = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[0, length:].tolist()
    stopped = ids[-1] == tokenizer.eos_token_id
    ids = ids[:-1] if stopped else ids
    return {
        "prompt_tokens": length,
        "tokens": ids,
        "text": tokenizer.decode(ids, skip_special_tokens=False),
        "finish_reason": "stop" if stopped else "length",
    }


def main() -> None:
    workload, gguf = Path(sys.argv[1]), Path(sys.argv[2])
    tokenizer, model = load(gguf)
    target = Path(__file__).with_name("support_greedy.jsonl")
    with target.open("w", encoding="utf-8") as out:
        for row in choose([json.loads(line) for line in workload.read_text().splitlines()]):
            row |= answer(tokenizer, model, row["messages"])
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
            print(row["id"], row["finish_reason"], len(row["tokens"]), flush=True)


if __name__ == "__main__":
    main()
