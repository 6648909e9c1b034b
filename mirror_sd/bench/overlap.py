"""`mirror-sd bench overlap`: a target on one core, its drafter on another.

Plain decoding, drafting and verifying in turns (serial), and drafting while it is verified, one
prompt at a time. The drafter is the process that a stack starts; the target runs here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from mirror_sd import config as configuration
from mirror_sd import openmp
from mirror_sd.bench import machine, overlap_timeline, prompts
from mirror_sd.bench.options import (
    AsJson,
    Dataset,
    Limit,
    MaxTokens,
    Overrides,
    Rounds,
    check_plot,
    encode,
    numbers,
    show,
)
from mirror_sd.bench.overlap_timeline import Timeline
from mirror_sd.config import Config
from mirror_sd.errors import ConfigError, SetupError
from mirror_sd.messages import Chunk, Failed, Finished, SamplingParams, Submit
from mirror_sd.offline import load_tokenizer
from mirror_sd.run_dir import RunDir

_TARGET, _DRAFTER = "tpu", "cpu"
PLAIN, SERIAL, OVERLAPPED = "plain", "serial", "overlapped"
_CONNECT_S = 60.0


@dataclass(frozen=True, slots=True)
class Way:
    """How one run decodes. `length`: tokens of a proposal, None where it is learned."""

    name: str
    length: int | None = None


@dataclass(slots=True)
class Run:
    """Sums over the prompts of a run; `seconds` from each first token to the last."""

    tokens: int = 0
    seconds: float = 0.0
    answers: list[tuple[int, ...]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds


class Target:
    """The engine of the target, with its drafter connected; notes when it verifies."""

    def __init__(self, config: Config, run: RunDir) -> None:
        from mirror_sd.drafting.connection import connector
        from mirror_sd.engine import build_on
        from mirror_sd.engine_backend import create_backend

        self.timeline = Timeline()
        backend = create_backend(config, _TARGET, 1)
        forward = backend.forward

        def timed(batch: Any) -> Any:
            begin = time.monotonic()
            logits = forward(batch)
            self.timeline.verifies.append((begin, time.monotonic()))
            return logits

        backend.forward = timed  # type: ignore[method-assign]
        connect = connector(config, run, _TARGET, lambda proposal: self.timeline.note(proposal))
        self.engine = build_on(backend, config, _TARGET, connect)
        self._number = 0

    def connect(self, drafter: subprocess.Popen[bytes]) -> None:
        """Wait for the drafter. Raises `SetupError`."""
        deadline = time.monotonic() + _CONNECT_S
        while self.engine.remote is None or not self.engine.remote.drafters_ready:
            if drafter.poll() is not None or time.monotonic() > deadline:
                raise SetupError("the drafter did not start; its messages are above")
            self.engine.idle()
            time.sleep(0.05)

    def answer(self, prompt: tuple[int, ...], way: Way, limit: int, stop: Sequence[int]) -> Run:
        """One prompt's answer; the timeline is that of its decoding."""
        self._number += 1
        remote = self.engine.remote
        assert remote is not None
        remote.revise = lambda terms: dataclasses.replace(
            terms, overlaps=way.name == OVERLAPPED, length=way.length
        )
        params = SamplingParams(
            max_tokens=limit,
            seed=0,
            temperature=0.0,
            stop_token_ids=tuple(stop),
            speculation=way.name != PLAIN,
        )
        self.engine.add(
            Submit(
                request_id=str(self._number),
                model=self.engine.model_name,
                prompt=prompt,
                params=params,
            )
        )
        return self._decode(prompt)

    def _decode(self, prompt: tuple[int, ...]) -> Run:
        tokens, known_at = list(prompt), [0.0] * len(prompt)
        first = 0
        run = Run()
        while self.engine.has_work:
            for output in self.engine.step():
                match output:
                    case Chunk():
                        if not first:
                            self.timeline.verifies.clear()
                            first = len(output.tokens)
                        tokens.extend(output.tokens)
                        known_at += [time.monotonic()] * len(output.tokens)
                    case Finished(usage=usage):
                        run.drafted, run.accepted = usage.drafted_tokens, usage.accepted_tokens
                        run.rounds = usage.verify_rounds
                    case Failed():
                        raise SetupError(f"the target failed: {output.message}")
        self.timeline.close(tokens, known_at)
        run.answers = [tuple(tokens[len(prompt) :])]
        run.tokens = len(known_at) - len(prompt) - first
        run.seconds = known_at[-1] - known_at[len(prompt)] if run.tokens else 0.0
        return run


@contextlib.contextmanager
def drafting(config: Config, run: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    """The drafter's process, for as long as the block lasts."""
    from mirror_sd.supervisor.processes import drafter_spec

    run.config_json.write_text(config.model_dump_json(), encoding="utf-8")
    run.metrics.mkdir()
    spec = drafter_spec(run, _DRAFTER, 0)
    process = subprocess.Popen(
        spec.argv,
        env={**os.environ, **spec.env, **openmp.environment(1)},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(10)


def settings(target_core: int, drafter_core: int, overrides: Sequence[str] | None) -> Config:
    """The target on xla, the drafter on the CPU's own kernels, a core for each."""
    allowed = sorted(os.sched_getaffinity(0))
    for core in (target_core, drafter_core):
        if core not in allowed:
            raise ConfigError(f"core {core} is not usable here; {', '.join(map(str, allowed))} are")
    return configuration.load(
        overrides=[
            "pools.tpu.engine=xla",
            "pools.tpu.device=cpu",
            f"pools.tpu.cores=[{target_core}]",
            f"drafters.cpu.cores=[{drafter_core}]",
            "drafters.cpu.serves=[tpu]",
            "speculation.drafter=remote",
            "scheduler.max_batch_size.TPU=4",
            "engine.kv_cache_mb=256",
            "model.max_context=2048",
            *(overrides or ()),
        ]
    )


def measure(
    target: Target,
    ids: Sequence[tuple[int, ...]],
    stop: Sequence[int],
    *,
    max_tokens: int,
    lengths: Sequence[int],
    rounds: int,
) -> tuple[dict[str, Any], Timeline]:
    """The figures and the timeline of the last overlapped run."""
    ways = [Way(PLAIN), *(Way(SERIAL, length) for length in lengths), Way(OVERLAPPED)]
    for way in ways:  # what is learned of a way is learned before it is measured
        for prompt in ids[:1]:
            target.answer(prompt, way, max_tokens, stop)
    runs: dict[Way, list[Run]] = {way: [] for way in ways}
    kept, covered = Timeline(), []
    for _ in range(rounds):
        for way in ways:
            total = Run()
            target.timeline = Timeline()
            for prompt in ids:
                one = target.answer(prompt, way, max_tokens, stop)
                total.tokens += one.tokens
                total.seconds += one.seconds
                total.answers += one.answers
                total.drafted += one.drafted
                total.accepted += one.accepted
                total.rounds += one.rounds
                if way.name == OVERLAPPED:
                    covered.append(target.timeline)
                    kept, target.timeline = target.timeline, Timeline()
            runs[way].append(total)
    return _figures(runs, covered), kept


def _figures(runs: dict[Way, list[Run]], covered: Sequence[Timeline]) -> dict[str, Any]:
    speeds = {way: statistics.median(run.tok_s for run in its) for way, its in runs.items()}
    plain, overlapped = Way(PLAIN), Way(OVERLAPPED)
    serial = max((way for way in runs if way.name == SERIAL), key=lambda way: speeds[way])
    last = runs[overlapped][-1]
    expected = runs[plain][0].answers
    return {
        "plain_tok_s": round(speeds[plain], 1),
        "serial_tok_s": round(speeds[serial], 1),
        "overlapped_tok_s": round(speeds[overlapped], 1),
        "covered_share": round(overlap_timeline.covered_share(covered), 3),
        "over_serial": round(speeds[overlapped] / speeds[serial], 2),
        "over_plain": round(speeds[overlapped] / speeds[plain], 2),
        "identical_to_plain": all(run.answers == expected for its in runs.values() for run in its),
        "serial_length": serial.length,
        "serial_by_length": {
            str(way.length): round(speed, 1) for way, speed in speeds.items() if way.name == SERIAL
        },
        "acceptance": round(last.accepted / last.drafted, 3) if last.drafted else None,
        "accepted_per_verify": round(last.accepted / last.rounds, 2) if last.rounds else None,
        "verify_ms": _verify_ms(covered),
        "draft_ms": _draft_ms(covered),
        "tokens": last.tokens,
    }


def _verify_ms(covered: Sequence[Timeline]) -> float:
    count = sum(len(line.verifies) for line in covered)
    return round(1e3 * sum(line.verify_s for line in covered) / max(count, 1), 1)


def _draft_ms(covered: Sequence[Timeline]) -> float | None:
    spans = [end - begin for line in covered for begin, end in (*line.useful, *line.other)]
    return round(1e3 * statistics.median(spans), 1) if spans else None


def command(
    dataset: Dataset = None,
    limit: Limit = 4,
    max_tokens: MaxTokens = 64,
    target_core: Annotated[int, typer.Option(min=0, help="Core of the target.")] = 1,
    drafter_core: Annotated[int, typer.Option(min=0, help="Core of the drafter.")] = 0,
    lengths: Annotated[
        str, typer.Option(help="Comma list: tokens of a serial proposal; the best counts.")
    ] = "6,8,10,12",
    rounds: Rounds = 2,
    plot: Annotated[Path, typer.Option(help="Where the timeline is drawn, a PNG.")] = Path(
        "bench-overlap.png"
    ),
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Drafting on one class of devices while another verifies: tok/s plain, in turns, at once.

    `covered_share`: of the time of verifies, that during which the drafter made a token of the
    answer that the target did not have yet. docs/benchmarks.md explains every key.
    """
    check_plot(plot)
    proposals = numbers(lengths, "--lengths")
    config = settings(target_core, drafter_core, overrides)
    if (longest := config.speculation.max_tokens) < proposals[-1]:
        raise typer.BadParameter(
            f"{proposals[-1]} is above speculation.max_tokens, {longest}", param_hint="--lengths"
        )
    tokenizer = load_tokenizer(config)
    ids = encode(tokenizer, prompts.load(dataset, limit))
    described = machine.describe()
    with tempfile.TemporaryDirectory(prefix="msd-") as scratch:
        run = RunDir(Path(scratch))
        with drafting(config, run) as drafter:
            os.sched_setaffinity(0, {target_core})
            target = Target(config, run)
            target.connect(drafter)
            report, timeline = measure(
                target,
                ids,
                tokenizer.facts.eos_token_ids,
                max_tokens=max_tokens,
                lengths=proposals,
                rounds=rounds,
            )
    abilities = target.engine.capabilities
    title = (
        f"target {abilities.name} {abilities.precision} on core {target_core}, drafter on core"
        f" {drafter_core}: {100 * report['covered_share']:.0f} % of verifying is covered"
    )
    facts = {"target": f"{abilities.name} {abilities.precision}", "prompts": len(ids)}
    show({"machine": described, **facts, **report, "plot": str(plot)}, as_json)
    overlap_timeline.draw(timeline, plot, title=title)
