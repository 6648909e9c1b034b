"""Our engine beside others on the same prompts: in turn, A B A B, each in its own process.

In each of three measurements (one stream, several streams, reading a long prompt) all engines are
loaded and warmed first; each turn asks them one after another while the others are stopped.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mirror_sd.bench import machine, peer_lineup
from mirror_sd.bench.machine import OtherLoad
from mirror_sd.bench.peer_lineup import OURS, Contestant
from mirror_sd.bench.peer_process import PeerFailed, PeerProcess
from mirror_sd.bench.token_times import Answer, rates
from mirror_sd.model_store import ModelFiles

TURN_TIMEOUT_S = 3600.0
WARM_UP_TOKENS = 16
# Long prompts read in a turn; their median counts.
PREFILL_PROMPTS = 3

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """What every engine is asked; `prefill` is the length of the long prompts, 0 for none."""

    prompts: Sequence[Sequence[int]]
    stop: tuple[int, ...]
    max_tokens: int
    streams: int
    prefill: int
    rounds: int
    threads: int

    @property
    def context(self) -> int:
        """Tokens that one sequence may take, a multiple of 256."""
        longest = max(map(len, self.prompts)) + self.max_tokens
        return -(-max(longest, self.prefill + 1) // 256) * 256

    def long_prompts(self, turn: int) -> list[list[int]]:
        """Prompts of `prefill` tokens, others in each turn."""
        text = [token for prompt in self.prompts for token in prompt]
        starts = [(turn * PREFILL_PROMPTS + i) * 37 for i in range(PREFILL_PROMPTS)]
        return [[text[(start + i) % len(text)] for i in range(self.prefill)] for start in starts]


class Sitting:
    """Measures a line-up; `rows` and `failed` grow while it does."""

    def __init__(self, task: Task, report: Callable[[str], None]) -> None:
        self.rows: list[Row] = []
        self.failed: list[dict[str, str]] = []
        self._task = task
        self._report = report

    def one_stream(self, contestants: Sequence[Contestant]) -> None:
        """Rows of the modes `one_stream` and, for those that do not draft, `prefill`."""
        self._measure(contestants, 1)

    def several_streams(self, contestants: Sequence[Contestant]) -> None:
        """Rows of the mode `streams`."""
        able = [c for c in contestants if c.takes_several]
        self._measure(able, self._task.streams)

    def _measure(self, contestants: Sequence[Contestant], streams: int) -> None:
        with ExitStack() as stack:
            ready: list[tuple[Contestant, PeerProcess]] = []
            for one in contestants:
                process = stack.enter_context(PeerProcess(one.command, self._task.threads))
                if self._try(one, partial(self._load, process, one, streams)):
                    ready.append((one, process))
            for turn in range(self._task.rounds):
                ready = [
                    (one, process)
                    for one, process in ready
                    if self._try(one, partial(self._turn, process, one, streams, turn))
                ]

    def _try(self, one: Contestant, action: Callable[[], None]) -> bool:
        """A peer that fails is left out from there on; that our own engine fails is an error."""
        try:
            action()
        except PeerFailed as error:
            if one.family == OURS:
                raise PeerFailed(f"{one.name}: {error.message}") from error
            self._report(f"{one.name}: {error.message}")
            self.failed.append({"peer": one.name, "reason": error.message})
            return False
        return True

    def _load(self, process: PeerProcess, one: Contestant, streams: int) -> None:
        self._report(f"loading {one.name} for {streams} at once")
        task = self._task
        process.call("load", threads=task.threads, streams=streams, stop=task.stop, **one.options)
        prompts = [list(task.prompts[i % len(task.prompts)]) for i in range(streams)]
        process.call("generate", prompts=prompts, max_tokens=WARM_UP_TOKENS)
        if self._reads_long(one, streams):
            process.call("generate", prompts=task.long_prompts(task.rounds)[:1], max_tokens=1)

    def _reads_long(self, one: Contestant, streams: int) -> bool:
        return streams == 1 and not one.drafts and self._task.prefill > 0

    def _turn(self, process: PeerProcess, one: Contestant, streams: int, turn: int) -> None:
        task = self._task
        mode = "one_stream" if streams == 1 else "streams"
        self._ask(process, one, mode, turn, streams, task.prompts, task.max_tokens)
        if self._reads_long(one, streams):
            self._ask(process, one, "prefill", turn, 1, task.long_prompts(turn), 1)

    def _ask(
        self,
        process: PeerProcess,
        one: Contestant,
        mode: str,
        turn: int,
        streams: int,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
    ) -> None:
        before = machine.read_bandwidth(self._task.threads)
        with OtherLoad(process.pid) as others:
            timelines = process.call(
                "generate", TURN_TIMEOUT_S, prompts=prompts, max_tokens=max_tokens
            )
        after = machine.read_bandwidth(self._task.threads)
        answers = [Answer(start, tuple(times)) for start, times in timelines]
        if not answers or not all(answer.times for answer in answers):
            raise PeerFailed("a prompt got no token")
        figures = rates(answers, streams).row()
        if mode == "prefill":
            figures = _reading(answers, self._task.prefill)
        row = {"mode": mode, "turn": turn, "engine": one.name, **figures}
        row["peak_rss_mb"] = process.call("peak_rss_mb")
        row["read_gb_s"] = [before, after]
        row["other_cores"] = others.cores
        self.rows.append(row)
        self._report(f"{mode} {one.name}: {row['tok_s']} tok/s, others {others.cores} cores")


def _reading(answers: Sequence[Answer], length: int) -> Row:
    """`tok_s` of a long prompt: its tokens by the time to the first of the answer."""
    first_s = statistics.median(answer.times[0] - answer.start for answer in answers)
    return {"tok_s": round(length / first_s, 1), "ttft_ms": round(1e3 * first_s, 2)}


def run(
    task: Task,
    own: Sequence[Contestant],
    files: ModelFiles,
    *,
    python: Path,
    wanted: Sequence[str],
    is_single: bool,
    report: Callable[[str], None],
) -> Row:
    """The whole report of `bench peers`; `report` is given lines of progress."""
    line_up = peer_lineup.peers(
        python, files, wanted=wanted, context=task.context, threads=task.threads, report=report
    )
    if not line_up.contestants:
        report("no peer can be measured, only our own engine; `absent` says why for each")
    contestants = [*own, *line_up.contestants]
    sitting = Sitting(task, report)
    described = machine.describe()
    if is_single:
        sitting.one_stream(contestants)
    if task.streams > 1:
        sitting.several_streams(contestants)
    return {
        "machine": described,
        "model": files.name,
        "threads": task.threads,
        "prompts": len(task.prompts),
        "max_tokens": task.max_tokens,
        "streams": task.streams,
        "prefill_tokens": task.prefill,
        "versions": line_up.versions,
        "absent": line_up.absent + sitting.failed,
        **compare(sitting.rows, [one.name for one in own]),
        "rows": sitting.rows,
    }


# Metric: the mode of its rows, and which of their figures.
METRICS = {
    "one_stream": ("one_stream", "tok_s"),
    "streams": ("streams", "tok_s"),
    "streams_wall": ("streams", "wall_tok_s"),
    "prefill": ("prefill", "tok_s"),
}


def compare(rows: Sequence[Row], own: Sequence[str]) -> dict[str, Any]:
    """`speeds`: mean tok/s of each engine by metric. `ratios`: for each of our engines, named in
    `own`, its speed over each peer's, the extremes over the turns, and the fastest peer."""
    speeds: dict[str, dict[str, float]] = {}
    ratios: dict[str, dict[str, Any]] = {}
    for metric, (mode, figure) in METRICS.items():
        turns: dict[str, list[float]] = {}
        for row in rows:
            if row["mode"] == mode and row[figure]:
                turns.setdefault(row["engine"], []).append(row[figure])
        if not turns:
            continue
        means = {name: statistics.fmean(values) for name, values in turns.items()}
        speeds[metric] = {name: round(mean, 1) for name, mean in means.items()}
        theirs = {name: mean for name, mean in means.items() if name not in own}
        ratios[metric] = {
            name: _over(turns[name], {peer: turns[peer] for peer in theirs})
            for name in own
            if name in means and theirs
        }
    return {"speeds": speeds, "ratios": ratios}


def _over(ours: Sequence[float], theirs: dict[str, list[float]]) -> Row:
    mean = statistics.fmean(ours)
    means = {peer: statistics.fmean(values) for peer, values in theirs.items()}
    best = max(means, key=means.__getitem__)
    by_turn = {
        peer: [a / b for a, b in zip(ours, values, strict=False)] for peer, values in theirs.items()
    }
    return {
        "best_peer": best,
        "over_best": round(mean / means[best], 3),
        "over": {peer: round(mean / value, 3) for peer, value in means.items()},
        "extremes": {
            peer: [round(min(values), 3), round(max(values), 3)] for peer, values in by_turn.items()
        },
    }
