"""What each class of a configuration answers, from engines in this process alone, without a stack.

Reads `{"settings": [...], "classes": [...], "prompts": [...], "max_tokens": n, "banned": [...]}` on
standard input, writes `{class: [text, ...]}` of greedy answers.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from mirror_sd import engine, offline
from mirror_sd.config import load
from mirror_sd.engine import Engine
from mirror_sd.messages import Chunk, SamplingParams, Submit


def answers(
    engine: Engine, prompts: list[list[int]], max_tokens: int, banned: list[int]
) -> list[list[int]]:
    """The greedy tokens after each prompt, nothing drafted."""
    params = SamplingParams(
        max_tokens=max_tokens,
        seed=0,
        temperature=0.0,
        logit_bias=dict.fromkeys(banned, -100.0),
        speculation=False,
    )
    for index, prompt in enumerate(prompts):
        engine.add(
            Submit(
                request_id=str(index),
                model=engine.model_name,
                prompt=tuple(prompt),
                params=params,
            )
        )
    found: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            if isinstance(output, Chunk):
                found[int(output.request_id)].extend(output.tokens)
    return found


def main() -> None:
    wish: dict[str, Any] = json.load(sys.stdin)
    config = load(overrides=wish["settings"])
    tokenizer = offline.load_tokenizer(config)
    prompts = [tokenizer.encode_prompt(text) for text in wish["prompts"]]
    found = {}
    for name in wish["classes"]:
        built = engine.build(config, name, config.pools[name].threads)
        found[name] = [
            tokenizer.decode(tokens)
            for tokens in answers(built, prompts, wish["max_tokens"], wish["banned"])
        ]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
