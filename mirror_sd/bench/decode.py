"""Decoding of our engine without HTTP: prompts in, tokens with their times out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from mirror_sd.bench.token_times import Answer, Rates, rates
from mirror_sd.engine import Engine
from mirror_sd.messages import Chunk, Failed, Finished, SamplingParams, SequenceUsage, Submit

Prompt = tuple[int, ...]


@dataclass(slots=True)
class Run:
    """Per prompt, in order: its tokens (a stop token left out), its times. Their usages, as they
    ended. Of the `steps` in which all wrote and no prompt was read: their tokens, the seconds of
    all, and of drafting in them."""

    streams: int
    tokens: list[list[int]] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)
    usages: list[SequenceUsage] = field(default_factory=list)
    steps: int = 0
    step_tokens: int = 0
    step_s: float = 0.0
    draft_s: float = 0.0

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

    def acceptance(self) -> float | None:
        """Share of the drafted tokens that were right; None where none was drafted."""
        drafted = sum(usage.drafted_tokens for usage in self.usages)
        accepted = sum(usage.accepted_tokens for usage in self.usages)
        return round(accepted / drafted, 3) if drafted else None

    def decode_tok_s(self) -> float | None:
        """Tokens a second of the steps that only wrote; None where there is no such step."""
        return round(self.step_tokens / self.step_s, 1) if self.steps else None

    def step_ms(self) -> tuple[float | None, float | None]:
        """Milliseconds of a step spent on drafting, and on all else: the forward, the choice of
        tokens. None where no step only wrote."""
        if not self.steps:
            return None, None
        rest_s = self.step_s - self.draft_s
        return round(1e3 * self.draft_s / self.steps, 3), round(1e3 * rest_s / self.steps, 3)

    def sources(self) -> dict[str, tuple[int, int]]:
        """Tokens that each source drafted, and of them accepted."""
        found: dict[str, tuple[int, int]] = {}
        for usage in self.usages:
            for name, (drafted, accepted) in usage.draft_sources.items():
                before = found.get(name, (0, 0))
                found[name] = (before[0] + drafted, before[1] + accepted)
        return found


def joined(runs: Iterable[Run]) -> Run:
    """Runs that were made one after the other, of one stream each, as one."""
    whole = Run(1)
    for run in runs:
        for name in ("tokens", "starts", "times", "usages"):
            getattr(whole, name).extend(getattr(run, name))
        whole.steps += run.steps
        whole.step_tokens += run.step_tokens
        whole.step_s += run.step_s
        whole.draft_s += run.draft_s
    return whole


def greedy(max_tokens: int, stop: tuple[int, ...], *, speculation: bool) -> SamplingParams:
    """Params of a greedy answer."""
    return SamplingParams(
        max_tokens=max_tokens, seed=0, temperature=0.0, stop_token_ids=stop, speculation=speculation
    )


def run_engine(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    concurrency: int = 1,
    tag: str = "bench",
    tenant: str = "default",
    hint: tuple[int, ...] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Answers to `prompts`, `concurrency` at a time; a next one starts when one ends.

    Prompt i is answered with seed `params.seed` + i. `hint` is an answer that all of theirs may
    resemble.
    """
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
                    params=msgspec.structs.replace(params, seed=params.seed + index),
                    tenant=tenant,
                )
            )
            if hint:
                engine.hint(f"{tag}-{index}", 0, hint)
            live += 1
        only_writes = all(run.times[: len(run.starts)])
        before_s, begin = engine.stats().draft_s, clock()
        outputs = engine.step()
        now = clock()
        if only_writes:
            run.steps += 1
            run.step_s += now - begin
            run.draft_s += engine.stats().draft_s - before_s
            run.step_tokens += sum(_tokens(output) for output in outputs)
        for output in outputs:
            live -= _note(run, output, now)
    return run


def _tokens(output: Chunk | Finished | Failed) -> int:
    """How many tokens it brings; a stop token is one."""
    if isinstance(output, Chunk):
        return len(output.tokens)
    return int(isinstance(output, Finished) and output.reason == "stop")


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
