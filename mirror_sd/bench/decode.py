"""Decoding speed of our engine without HTTP, plain and speculative, in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from mirror_sd.bench.peer_process import PeerProcess, engine_command
from mirror_sd.bench.token_times import Answer, Rates, rates
from mirror_sd.engine import Engine
from mirror_sd.messages import Chunk, Failed, Finished, SamplingParams, SequenceUsage, Submit

Prompt = tuple[int, ...]
DRAFTERS = ("off", "lookup")


@dataclass(slots=True)
class Run:
    """Per prompt, in order: its tokens (a stop token left out), its times, its usage."""

    streams: int
    tokens: list[list[int]]
    starts: list[float]
    times: list[list[float]]
    usages: list[SequenceUsage] = field(default_factory=list)

    @property
    def answers(self) -> list[Answer]:
        return [Answer(s, tuple(t)) for s, t in zip(self.starts, self.times, strict=True)]

    @property
    def first_s(self) -> list[float]:
        """Seconds from handing a prompt over to its first token."""
        return [times[0] - start for start, times in zip(self.starts, self.times, strict=True)]

    def rates(self) -> Rates:
        return rates(self.answers, self.streams)

    def accepted_per_verify(self) -> float | None:
        """Tokens that a sequence gained by each forward it took part in, its prompt's left out:
        1 without drafts."""
        rounds = sum(usage.verify_rounds for usage in self.usages)
        return round(sum(map(len, self.times)) / rounds, 3) if rounds else None


def run_engine(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    speculation: bool,
    stop: tuple[int, ...],
    concurrency: int = 1,
    tag: str = "bench",
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Greedy answers to `prompts`, `concurrency` at a time; a next one starts when one ends."""
    params = SamplingParams(
        max_tokens=max_tokens, seed=0, temperature=0.0, stop_token_ids=stop, speculation=speculation
    )
    run = Run(concurrency, [[] for _ in prompts], [], [[] for _ in prompts])
    live = 0
    while len(run.usages) < len(prompts):
        while live < concurrency and len(run.starts) < len(prompts):
            index = len(run.starts)
            run.starts.append(clock())
            engine.add(
                Submit(
                    request_id=f"{tag}-{index}",
                    model=engine.model_name,
                    prompt=prompts[index],
                    params=params,
                )
            )
            live += 1
        outputs = engine.step()
        now = clock()
        for output in outputs:
            live -= _note(run, output, now)
    return run


def _note(run: Run, output: Chunk | Finished | Failed, now: float) -> bool:
    """Put down what a step gave; whether it ended its sequence."""
    index = int(output.request_id.rpartition("-")[2])
    if isinstance(output, Chunk):
        run.tokens[index].extend(output.tokens)
        run.times[index].extend([now] * len(output.tokens))
        return False
    if isinstance(output, Failed):
        raise RuntimeError(f"{output.request_id}: {output.message}")
    if output.reason == "stop":
        run.times[index].append(now)
    run.usages.append(output.usage)
    return True


@dataclass(frozen=True, slots=True)
class Task:
    """What `bench decode` measures: each drafter in each precision, in turn, `rounds` times."""

    prompts: Sequence[Prompt]
    stop: tuple[int, ...]
    pool: str
    overrides: Sequence[str]
    precisions: Sequence[str]
    drafters: Sequence[str]
    max_tokens: int
    concurrency: int
    rounds: int
    threads: int


def measure(task: Task) -> list[dict[str, Any]]:
    """A row for each run, in the order they were made.

    Each precision has a process of its own, so that `peak_rss_mb`, the most since its start, is its
    own. `identical_to_plain`: the tokens are those of the first run of that precision without
    drafts; None where there is none.
    """
    rows = []
    with ExitStack() as stack:
        engines = [
            stack.enter_context(PeerProcess(engine_command(), task.threads))
            for _ in task.precisions
        ]
        for process, precision in zip(engines, task.precisions, strict=True):
            _load(process, task, precision)
        for _ in range(task.rounds):
            for drafter in task.drafters:
                rows += [
                    {"drafter": drafter, **_decode(process, task, drafter)} for process in engines
                ]
    plain: dict[str, list[list[int]]] = {}
    for row in rows:
        if row["drafter"] == "off":
            plain.setdefault(row["precision"], row["answers"])
    for row in rows:
        tokens, base = row.pop("answers"), plain.get(row["precision"])
        row["identical_to_plain"] = None if base is None else tokens == base
    return rows


def _load(process: PeerProcess, task: Task, precision: str) -> None:
    process.call(
        "load",
        overrides=[f"pools.{task.pool}.precision={precision}", *task.overrides],
        threads=task.threads,
        streams=task.concurrency,
        stop=task.stop,
    )
    for drafter in task.drafters:
        is_on = drafter != "off"
        process.call("decode", prompts=task.prompts[:1], max_tokens=8, speculation=is_on)


def _decode(process: PeerProcess, task: Task, drafter: str) -> dict[str, Any]:
    row: dict[str, Any] = process.call(
        "decode",
        timeout_s=3600.0,
        prompts=task.prompts,
        max_tokens=task.max_tokens,
        speculation=drafter != "off",
    )
    return row
