"""The ROUGE-L part of `mirror-sd bench quality`: answers against those that a data set has.

transformers answers in fp32, our engine in each precision with each drafter, greedy, one prompt
after the other, each in a process of its own with the same number of threads.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mirror_sd.api.tokenizer import Tokenizer
from mirror_sd.bench import peer_lineup, rouge
from mirror_sd.bench.decode import Prompt
from mirror_sd.bench.draft_figures import OFF, Row
from mirror_sd.bench.peer_process import PeerProcess, engine_command, peer_command
from mirror_sd.bench.token_times import Answer, rates
from mirror_sd.model_store import ModelFiles

REFERENCE = "transformers-fp32"
# Of one run: at least, and for each of its prompts beside a second a token.
_RUN_TIMEOUT_S, _PROMPT_TIMEOUT_S = 3600.0, 60.0
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Task:
    """`references[i]` is what the data set answers to `prompts[i]`. Each precision is run with each
    of `drafters`, `off` first."""

    files: ModelFiles
    prompts: Sequence[Prompt]
    references: Sequence[str]
    stop: tuple[int, ...]
    pool: str
    overrides: Sequence[str]
    precisions: Sequence[str]
    drafters: Sequence[str]
    max_tokens: int
    threads: int

    @property
    def timeout_s(self) -> float:
        """The longest that a run may take."""
        return max(_RUN_TIMEOUT_S, len(self.prompts) * (_PROMPT_TIMEOUT_S + self.max_tokens))


def measure(task: Task, tokenizer: Tokenizer, report: Callable[[str], None]) -> dict[str, Any]:
    """`runs`: a row each for transformers in fp32 and ours; `speculative_equals_plain`: whether no
    token differs between the runs of a precision, None where none drafted. Raises `PeerFailed`."""
    model = peer_lineup.transformers_model(task.files, task.threads, report)
    rows, unavailable = [], []
    # Ours first: what its settings cannot have is then told before the slower library answers.
    for precision in task.precisions:
        report(f"{len(task.prompts)} answers by ours in {precision}")
        found, missing = _ours(task, precision)
        rows += found
        unavailable += missing
    report(f"{len(task.prompts)} answers by {REFERENCE}")
    rows.insert(0, _transformers(task, model))
    texts = [[_text(tokenizer, tokens, task.stop) for tokens in row.pop("answers")] for row in rows]
    scores = [rouge.rouge_l(task.references, answers) for answers in texts]
    for row, score, answers in zip(rows, scores, texts, strict=True):
        row |= _against(scores[0], score)
        row["identical_to_fp32"] = _share(texts[0], answers)
        report(f"{row['run']}: ROUGE-L {row['rouge_l']:.4f}, {row['tok_s']} tok/s")
    said = [row["identical_to_plain"] for row in rows if row["identical_to_plain"] is not None]
    return {
        "references": len(task.references),
        "runs": rows,
        "speculative_equals_plain": all(said) if said else None,
        "unavailable": unavailable,
    }


def _transformers(task: Task, model: Path) -> Row:
    with PeerProcess(peer_command(Path(sys.executable)), task.threads) as process:
        process.call(
            "load",
            family="transformers",
            model=str(model),
            dtype="float32",
            threads=task.threads,
            streams=1,
            stop=task.stop,
        )
        process.call("generate", prompts=task.prompts[:1], max_tokens=_WARM_UP_TOKENS)
        timelines = process.call(
            "generate", task.timeout_s, prompts=task.prompts, max_tokens=task.max_tokens
        )
        tokens = process.call("tokens")
        peak = process.call("peak_rss_mb")
    figures = rates([Answer(start, tuple(times)) for start, times in timelines], 1).row()
    return {
        "run": REFERENCE,
        "precision": "fp32",
        "drafter": OFF,
        **{key: figures[key] for key in ("tok_s", "ms_per_token", "ttft_ms")},
        "accepted_per_verify": None,
        "peak_rss_mb": peak,
        "identical_to_plain": None,
        "answers": tokens,
    }


def _ours(task: Task, precision: str) -> tuple[list[Row], list[dict[str, str]]]:
    """A row for each drafter that the engine has, and those that it has not."""
    rows: list[Row] = []
    with PeerProcess(engine_command(), task.threads) as process:
        loaded = process.call(
            "load",
            overrides=[
                *task.overrides,
                f"pools.{task.pool}.precision={precision}",
                "speculation.drafter=auto",
            ],
            threads=task.threads,
            streams=1,
            stop=task.stop,
        )
        drafters = [drafter for drafter in task.drafters if drafter != OFF]
        missing = process.call("missing", drafters=drafters)
        for drafter in [OFF, *(one for one in drafters if one not in missing)]:
            _answer(process, task, drafter, task.prompts[:1], _WARM_UP_TOKENS)
            row = _answer(process, task, drafter, task.prompts, task.max_tokens)
            if drafter == OFF:
                plain = row["answers"]
            name = f"{peer_lineup.OURS}-{loaded}" + ("" if drafter == OFF else f"-{drafter}")
            kept = ("tok_s", "ms_per_token", "ttft_ms", "accepted_per_verify", "peak_rss_mb")
            rows.append(
                {
                    "run": name,
                    "precision": loaded,
                    "drafter": drafter,
                    **{key: row[key] for key in kept},
                    "identical_to_plain": None if drafter == OFF else row["answers"] == plain,
                    "answers": row["answers"],
                }
            )
    absent = [{"precision": loaded, "drafter": name, "reason": missing[name]} for name in missing]
    return rows, absent


def _answer(
    process: PeerProcess, task: Task, drafter: str, prompts: Sequence[Prompt], max_tokens: int
) -> Row:
    row: Row = process.call(
        "decode", task.timeout_s, prompts=prompts, max_tokens=max_tokens, drafter=drafter
    )
    return row


def _text(tokenizer: Tokenizer, tokens: Sequence[int], stop: Sequence[int]) -> str:
    return tokenizer.decode([token for token in tokens if token not in stop]).strip()


def _against(expected: Sequence[float], scores: Sequence[float]) -> Row:
    """`rouge_l`: the mean. `difference`: from that of the first run; `relative_difference`: by it;
    `difference_error`: standard error of the difference, from answer to answer."""
    mean, base = statistics.fmean(scores), statistics.fmean(expected)
    gaps = [ours - theirs for ours, theirs in zip(scores, expected, strict=True)]
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else None
    return {
        "rouge_l": round(mean, 5),
        "difference": round(mean - base, 5),
        "relative_difference": round((mean - base) / base, 5) if base else None,
        "difference_error": None if error is None else round(error, 5),
    }


def _share(expected: Sequence[str], found: Sequence[str]) -> float:
    pairs = zip(expected, found, strict=True)
    return round(statistics.fmean(a == b for a, b in pairs), 4)
