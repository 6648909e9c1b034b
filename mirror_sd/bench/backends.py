"""How far each back end is from the fp32 reference, and whether speculation changes its answers.

The reference answers the prompts greedily; its answers and the logits behind them lie in a folder.
Each back end then, in a process of its own (`python -m mirror_sd.bench.backends`), reads the same
tokens, and answers the prompts itself: alone, alone with drafts, and several at once with drafts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mirror_sd import config as configuration
from mirror_sd import engine as engines
from mirror_sd import model_store
from mirror_sd.backends import registry
from mirror_sd.backends.protocol import Backend, Float32
from mirror_sd.bench import teacher_forcing
from mirror_sd.bench.decode import Prompt, greedy, run_engine
from mirror_sd.bench.peer_drivers.session import serve
from mirror_sd.bench.teacher_forcing import Passage
from mirror_sd.config import Config
from mirror_sd.engine import Engine
from mirror_sd.errors import ConfigError, ModelError

COMPANY = 8
DRAFT_TOKENS = 3
ANSWERS, LOGITS = "answers.json", "logits.npy"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the table. device: as `registry.create` takes it."""

    engine: str
    device: str
    precision: str


LINEUP = (
    *(Entry("native", "cpu", precision) for precision in ("fp32", "bf16", "int8")),
    *(Entry("torch", "cpu", precision) for precision in ("fp32", "bf16", "fp16")),
    *(Entry("torch", "cuda", precision) for precision in ("fp32", "bf16", "fp16")),
    Entry("torch", "xpu", "bf16"),
    Entry("torch", "hpu", "bf16"),
    *(Entry("xla", "cpu", precision) for precision in ("fp32", "bf16")),
    Entry("xla", "tpu", "bf16"),
    *(Entry("onnxruntime", "cpu", precision) for precision in ("fp32", "fp16", "bf16", "int8")),
    Entry("onnxruntime", "cuda", "fp16"),
    Entry("onnxruntime", "trt", "fp16"),
    Entry("onnxruntime", "openvino", "fp32"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What a back end gave. Of `positions`: max_logit_error; mean_kl, KL(reference || back end) in
    nats; top1, the share whose best token is the reference's. Of `prompts` answers: equal, those
    that are the reference's to the end; agreed_tokens, the share of tokens before the first other
    one; speculative_equal and company_equal, those that drafts, and drafts in company, leave as
    they are."""

    positions: int
    max_logit_error: float
    mean_kl: float
    top1: float
    prompts: int
    equal: int
    agreed_tokens: float
    speculative_equal: int
    company_equal: int
    drafted: int
    bit_stable: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Absent:
    """kind: absent for what is not installed or not there, failed for what broke."""

    kind: Literal["absent", "failed"]
    reason: str


def reference(
    folder: str,
    prompts: Sequence[Sequence[int]],
    stop: Sequence[int],
    max_tokens: int,
    threads: int,
    overrides: Sequence[str],
) -> int:
    """Runs in a child: put the reference's answers and their logits into the folder; how many
    positions there are."""
    config = configuration.load(overrides=overrides)
    backend = _create(config, Entry("reference", "cpu", "fp32"), threads)
    given = [tuple(prompt) for prompt in prompts]
    params = greedy(max_tokens, tuple(stop), speculation=False)
    engine = engines.build_on(backend, _speculative(config, None), "cpu")
    answers = run_engine(engine, given, params, tag="reference").tokens
    document = {"prompts": given, "answers": answers, "stop": list(stop), "max_tokens": max_tokens}
    (Path(folder) / ANSWERS).write_text(json.dumps(document), encoding="utf-8")
    logits = _logits(backend, engine, config, passages(given, answers))
    np.save(Path(folder) / LOGITS, logits)
    return len(logits)


def measure(
    folder: str, engine: str, device: str, precision: str, threads: int, overrides: Sequence[str]
) -> dict[str, Any]:
    """Runs in a child: a `Row`, or an `Absent` where the back end cannot be had here."""
    config = configuration.load(overrides=overrides)
    document = json.loads((Path(folder) / ANSWERS).read_text(encoding="utf-8"))
    prompts = [tuple(prompt) for prompt in document["prompts"]]
    answers = document["answers"]
    stop, max_tokens = tuple(document["stop"]), int(document["max_tokens"])
    try:
        backend = _create(config, Entry(engine, device, precision), threads)
    except ConfigError as error:
        return asdict(Absent("absent", error.message))
    facts = backend.capabilities
    if facts.name != engine:
        return asdict(Absent("absent", f"{facts.name} took its place"))
    built = engines.build_on(backend, _speculative(config, DRAFT_TOKENS), "cpu")
    runs = [
        run_engine(
            built,
            prompts,
            greedy(max_tokens, stop, speculation=speculation),
            concurrency=concurrency,
            tag=f"run{number}",
        )
        for number, (speculation, concurrency) in enumerate(
            ((False, 1), (True, 1), (True, COMPANY))
        )
    ]
    plain, alone, company = (run.tokens for run in runs)
    ours = _logits(backend, built, config, passages(prompts, answers))
    theirs = np.load(Path(folder) / LOGITS, mmap_mode="r")
    return asdict(
        Row(
            **compared(theirs, ours),
            **agreement(answers, plain),
            speculative_equal=_equal(plain, alone),
            company_equal=_equal(plain, company),
            drafted=sum(usage.drafted_tokens for run in runs for usage in run.usages),
            bit_stable=backend.capabilities.bit_stable,  # xla tests itself with the cache
            detail=facts.detail,
        )
    )


def passages(prompts: Sequence[Prompt], answers: Sequence[Sequence[int]]) -> list[Passage]:
    """Prompts with their answers, of which the answers' tokens are predicted."""
    return [
        Passage((*prompt, *answer), len(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
        if answer
    ]


def compared(reference: Float32, logits: Float32) -> dict[str, Any]:
    """The figures of `Row` over positions [R, vocabulary]. Raises `ModelError` for values that are
    not finite."""
    if not np.isfinite(logits).all():
        raise ModelError("the back end gave logits that are not finite")
    largest = divergence = 0.0
    agreed = 0
    for theirs, ours in zip(reference, logits, strict=True):
        largest = max(largest, float(np.abs(theirs - ours).max()))
        log_p = teacher_forcing.log_softmax(np.asarray(theirs)[None])
        log_q = teacher_forcing.log_softmax(ours[None])
        divergence += float((np.exp(log_p) * (log_p - log_q)).sum())
        agreed += int(theirs.argmax() == ours.argmax())
    count = len(logits)
    return {
        "positions": count,
        "max_logit_error": largest,
        "mean_kl": divergence / count,
        "top1": agreed / count,
    }


def agreement(answers: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The figures of `Row` over answers."""
    before = 0
    for expected, tokens in zip(answers, found, strict=True):
        pairs = list(zip(expected, tokens, strict=False))
        before += next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    total = sum(map(len, answers))
    return {
        "prompts": len(answers),
        "equal": _equal(answers, found),
        "agreed_tokens": before / total if total else 1.0,
    }


def _equal(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> int:
    return sum(list(a) == list(b) for a, b in zip(one, other, strict=True))


def _create(config: Config, entry: Entry, threads: int) -> Backend:
    return registry.create(
        entry.engine,
        model_store.resolve(config.model.path),
        device=entry.device,
        precision=entry.precision,
        threads=threads,
        max_context=config.model.max_context,
        kv="auto",
    )


def _speculative(config: Config, least: int | None) -> Config:
    """Drafting at least so many tokens, whether it pays or not; None: not at all."""
    changes: dict[str, Any] = {"enabled": False} if least is None else {"min_tokens": least}
    speculation = config.speculation.model_copy(update=changes)
    return config.model_copy(update={"speculation": speculation})


def _logits(backend: Backend, engine: Engine, config: Config, texts: Sequence[Passage]) -> Float32:
    """[R, vocabulary] of all predicted positions, in order, through the blocks that the engine,
    which is done, allocated."""
    stats = engine.stats()
    pieces = teacher_forcing.pieces(
        texts,
        num_blocks=stats.kv_blocks_used + stats.kv_blocks_free,
        block_size=config.engine.block_size,
    )
    found = []
    for piece in pieces:
        logits = backend.forward(piece.batch)
        if len(piece.targets):
            found.append(logits.copy())
    return np.concatenate(found)


if __name__ == "__main__":
    serve({"reference": reference, "measure": measure})
