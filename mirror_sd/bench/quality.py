"""The distributions of `mirror-sd bench quality`: what a precision costs, against fp32.

Distributions are compared under teacher forcing, on the reference's own greedy answers and on the
text of the conversations; answers are compared as each back end gives them, greedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mirror_sd import config as configuration
from mirror_sd import engine as engines
from mirror_sd.api.tokenizer import Tokenizer
from mirror_sd.backends.protocol import Backend
from mirror_sd.bench import prompts
from mirror_sd.bench.decode import Prompt, greedy, run_engine
from mirror_sd.bench.options import encode, fitting
from mirror_sd.bench.prompts import Messages
from mirror_sd.bench.teacher_forcing import Passage, score
from mirror_sd.config import Config
from mirror_sd.engine import Engine
from mirror_sd.engine_backend import create_backend
from mirror_sd.offline import load_tokenizer


@dataclass(frozen=True, slots=True)
class Subject:
    """A back end, and the engine that has allocated its KV cache: it answers first, and is not
    used again once passages were scored into its blocks."""

    backend: Backend
    engine: Engine

    @property
    def num_blocks(self) -> int:
        stats = self.engine.stats()
        return stats.kv_blocks_free + stats.kv_blocks_used


def report(
    overrides: Sequence[str],
    precisions: Sequence[str],
    chats: list[Messages],
    *,
    max_tokens: int,
    text_tokens: int,
) -> dict[str, Any]:
    """Measure the configured engine in each of `precisions` (none: the configured one).

    Of each conversation's own text, at most `text_tokens` tokens are read.
    """
    plain = configuration.load(overrides=overrides)
    pool = next(iter(plain.pools))
    tokenizer = load_tokenizer(plain)
    asked = encode(tokenizer, [prompts.asked(chat) for chat in chats])
    kept = fitting(asked, max_tokens, plain, tokenizer)
    settings = [
        {"engine": "torch", "precision": "fp32"},
        *({"precision": precision} for precision in precisions or [plain.pools[pool].precision]),
    ]
    configs = [_varied(overrides, pool, chosen) for chosen in settings]
    reference, *others = [_subject(config, pool) for config in configs]
    runs = measure(
        reference,
        others,
        [asked[place] for place in kept],
        [_text(tokenizer, chats[place])[:text_tokens] for place in kept],
        max_tokens=max_tokens,
        stop=tokenizer.facts.eos_token_ids,
        block_size=plain.engine.block_size,
    )
    return {
        "model": reference.engine.model_name,
        "conversations": len(kept),
        "left_out": len(chats) - len(kept),
        "reference": _described(reference),
        "runs": runs,
    }


def _varied(overrides: Sequence[str], pool: str, settings: dict[str, str]) -> Config:
    changes = [f"pools.{pool}.{key}={value}" for key, value in settings.items()]
    return configuration.load(overrides=[*overrides, *changes])


def _subject(config: Config, pool: str) -> Subject:
    backend = create_backend(config, pool)
    return Subject(backend, engines.build_on(backend, config, pool))


def _text(tokenizer: Tokenizer, chat: Messages) -> Prompt:
    return tuple(tokenizer.encode_prompt("\n\n".join(message["content"] for message in chat)))


def measure(
    reference: Subject,
    others: Sequence[Subject],
    asked: Sequence[Prompt],
    texts: Sequence[Prompt],
    *,
    max_tokens: int,
    stop: tuple[int, ...],
    block_size: int,
) -> list[dict[str, Any]]:
    """One row for each of `others`.

    `answers`: over the reference's own greedy answers to `asked`. `text`: over `texts`, tokens
    that somebody wrote. `rouge_l` and `identical_answers`: the back end's greedy answers against
    the reference's, means over the prompts.
    """
    expected = _answers(reference, asked, max_tokens, stop)
    found = [_answers(other, asked, max_tokens, stop) for other in others]
    said = [
        Passage((*prompt, *answer), len(prompt))
        for prompt, answer in zip(asked, expected, strict=True)
        if answer
    ]
    written = [Passage(text) for text in texts if len(text) > 1]
    backends = [other.backend for other in others]
    blocks = min(subject.num_blocks for subject in (reference, *others))
    cache = {"num_blocks": blocks, "block_size": block_size}
    on_answers = score(reference.backend, backends, said, **cache)
    on_text = score(reference.backend, backends, written, **cache)
    return [
        _described(other) | {"answers": a.row(), "text": t.row()} | _likeness(expected, answers)
        for other, a, t, answers in zip(others, on_answers, on_text, found, strict=True)
    ]


def _answers(
    subject: Subject, asked: Sequence[Prompt], max_tokens: int, stop: tuple[int, ...]
) -> list[list[int]]:
    engine = subject.engine
    return run_engine(
        engine,
        asked,
        greedy(max_tokens, stop, speculation=False),
        concurrency=engine.slots,
        tag="quality",
    ).tokens


def _described(subject: Subject) -> dict[str, Any]:
    facts = subject.backend.capabilities
    return {"engine": facts.name, "precision": facts.precision, "plan": facts.detail}


def _likeness(expected: list[list[int]], found: list[list[int]]) -> dict[str, Any]:
    pairs = list(zip(expected, found, strict=True))
    return {
        "rouge_l": float(np.mean([rouge_l(a, b) for a, b in pairs])),
        "identical_answers": float(np.mean([a == b for a, b in pairs])),
    }


def rouge_l(reference: Sequence[int], answer: Sequence[int]) -> float:
    """F-measure of the longest common subsequence, over tokens (Lin 2004, beta 1); 0 to 1."""
    if not reference and not answer:
        return 1.0
    lengths = [0] * (len(answer) + 1)
    for wanted in reference:
        diagonal = 0
        for place, token in enumerate(answer, start=1):
            above = lengths[place]
            lengths[place] = diagonal + 1 if token == wanted else max(above, lengths[place - 1])
            diagonal = above
    return 2 * lengths[-1] / (len(reference) + len(answer))
