"""What one distillation does, as numbers: the same plan on the same model gives the same draft."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import sha256
from typing import Any

from mirror_sd.uir.draft_file import Precision

# Fixed by what the parameters are stored in; see docs/decisions/0013.
HALF_RATE = 1e-4
INT8_RATE = 5e-5


@dataclass(frozen=True, slots=True)
class DataPlan:
    """Which answers the target gives. Counts are conversations, `*_tokens` tokens.

    sampled_share: part of the answers drawn at `temperature`, the others are greedy.
    self_asked: questions that the target writes itself, after the bare head of a chat.
    held_out: conversations for the evaluation, of prompts that nothing is trained on.
    """

    answers: int = 4200
    self_asked: int = 1200
    held_out: int = 96
    answer_tokens: int = 256
    question_tokens: int = 96
    prompt_tokens: int = 768
    sampled_share: float = 0.4
    temperature: float = 0.7


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """How the head is fitted.

    unroll: steps on the head's own states in training (the training-time test of EAGLE-3).
    steps, mixed_steps: updates in fp32, and then in each precision; of about `batch_tokens`.
    first_share: of the updates in fp32, those that take the first step alone; they come first, and
        cost a third.
    head_share: of `rate`, for the rows of the head, which the target has trained already.
    hard_share: weight of the target's own token beside its distribution, 0..1.
    """

    taps: tuple[int, ...] = ()
    draft_vocab: int = 8192
    unroll: int = 3
    batch_tokens: int = 1024
    steps: int = 6000
    mixed_steps: int = 200
    first_share: float = 0.7
    warmup: int = 100
    rate: float = 1e-3
    head_share: float = 0.5
    weight_decay: float = 0.01
    clip: float = 1.0
    ema: float = 0.99
    hard_share: float = 0.2
    evaluate_every: int = 300
    checkpoint_every: int = 50


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole run. `chain`: tokens drafted for each verify in the evaluation."""

    seed: int = 0
    precisions: tuple[Precision, ...] = ("int8",)
    chain: int = 7
    data: DataPlan = field(default_factory=DataPlan)
    train: TrainPlan = field(default_factory=TrainPlan)

    def as_json(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return document


SMOKE = Plan(
    data=DataPlan(answers=40, self_asked=4, held_out=8, answer_tokens=96, question_tokens=32),
    train=TrainPlan(
        draft_vocab=2048,
        unroll=2,
        batch_tokens=1024,
        steps=36,
        mixed_steps=8,
        warmup=4,
        evaluate_every=18,
        checkpoint_every=18,
        ema=0.9,
    ),
)


def resized(plan: Plan, **sizes: Any) -> Plan:
    """The plan with those sizes that are given (not None), by the names of its fields."""
    given = {name: value for name, value in sizes.items() if value is not None}

    def of(part: Any) -> dict[str, Any]:
        return {f.name: given[f.name] for f in fields(part) if f.name in given}

    return replace(
        plan,
        **of(plan),
        data=replace(plan.data, **of(plan.data)),
        train=replace(plan.train, **of(plan.train)),
    )


def fingerprint(*parts: Any) -> str:
    """A short digest of values that JSON can hold: what a resumed run must agree on."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return sha256(text.encode()).hexdigest()[:16]
