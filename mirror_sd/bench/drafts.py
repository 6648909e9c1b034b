"""`mirror-sd bench decode`: what each source of drafts gains, in turn, A B A B.

Each precision has a process with one engine that has all sources; a request says which it drafts
from. The sweep has each fixed source and length in a process that knows nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from mirror_sd.bench import draft_figures
from mirror_sd.bench.decode import Prompt
from mirror_sd.bench.draft_figures import AUTO, OFF, Row
from mirror_sd.bench.near_duplicates import Clusters
from mirror_sd.bench.peer_process import PeerProcess, engine_command

SOURCES = ("lookup", "history", "head")
DRAFTERS = (OFF, *SOURCES, AUTO)
_RUN_TIMEOUT_S = 3600.0
_WARM_UP_TOKENS = 16
_PLAY_OFF_TURNS = 4


def fixed(source: str, length: int) -> list[str]:
    """Settings with which so many tokens are drafted from one source, whether it pays or not."""
    bounds = ("min_tokens", "initial_tokens", "max_tokens")
    return [
        f"speculation.drafter={source}",
        "speculation.length=window",
        *(f"speculation.{bound}={length}" for bound in bounds),
    ]


@dataclass(frozen=True, slots=True)
class Task:
    """What is measured: each of `drafters` in each precision, in turn, `rounds` times.

    `lengths`: those that the sweep tries with each source; none for no sweep. `clusters`: `prompts`
    are near-duplicates, asked one after the other.
    """

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
    temperature: float = 0.0
    warm: int = 1
    lengths: Sequence[int] = ()
    clusters: Clusters | None = None

    def facts(self) -> dict[str, Any]:
        """What a report says of how it was asked."""
        return {
            "threads": self.threads,
            "prompts": len(self.prompts),
            "max_tokens": self.max_tokens,
            "concurrency": self.concurrency,
            "temperature": self.temperature,
        }


def measure(task: Task, report: Callable[[str], None]) -> dict[str, Any]:
    """`runs`: a row for each run, in the order they were made; `drafters`: their means;
    `unavailable`: what the engine cannot draft from, and why; `sweep` where it was asked for.

    Each precision has a process of its own, so that `peak_rss_mb`, the most since its start, is its
    own. `identical_to_plain`: the tokens are those of the first run of that precision without
    drafts; None where there is none. Raises `PeerFailed`.
    """
    sitting = _Sitting(task, report)
    with ExitStack() as stack:
        for precision in task.precisions:
            sitting.open(stack.enter_context(_process(task)), precision)
        for turn in range(task.rounds):
            sitting.turn(turn)
        if task.lengths:
            sitting.play_off()
    draft_figures.compare([*sitting.rows, *sitting.cells])
    found = {"runs": sitting.rows, "drafters": draft_figures.by_drafter(sitting.rows)}
    if task.lengths:
        found["sweep"] = draft_figures.sweep(sitting.rows, sitting.cells, sitting.pairs)
    return found | {"unavailable": sitting.unavailable}


class _Sitting:
    """The processes of one measurement, and what they gave."""

    def __init__(self, task: Task, report: Callable[[str], None]) -> None:
        self.rows: list[Row] = []
        self.cells: list[Row] = []
        self.pairs: dict[str, list[tuple[float, float]]] = {}
        self.unavailable: list[dict[str, str]] = []
        self._task = task
        self._report = report
        self._ready: list[tuple[PeerProcess, str, list[str]]] = []

    def open(self, process: PeerProcess, precision: str) -> None:
        """Load an engine with all sources, and warm up those that it has."""
        task = self._task
        precision = _load(process, task, precision, ("speculation.drafter=auto",))
        missing = process.call("missing", drafters=[d for d in task.drafters if d != OFF])
        for drafter, reason in missing.items():
            self._report(f"{precision} {drafter} is unavailable: {reason}")
            self.unavailable.append({"precision": precision, "drafter": drafter, "reason": reason})
        able = [drafter for drafter in task.drafters if drafter not in missing]
        self._ready.append((process, precision, able))
        for drafter in able:
            _warm_up(process, task, drafter)

    def turn(self, turn: int) -> None:
        """Each drafter once, then each cell of the sweep."""
        for drafter in self._task.drafters:
            for process, _, able in self._ready:
                if drafter in able:
                    row = {"round": turn, "drafter": drafter} | _run(process, self._task, drafter)
                    self._note(row, drafter)
                    self.rows.append(row)
        for _, precision, able in self._ready:
            for source in SOURCES:
                for length in self._task.lengths if source in able else ():
                    self.cells.append(self._cell(turn, precision, source, length))

    def _cell(self, turn: int, precision: str, source: str, length: int) -> Row:
        """In a process that is gone afterwards: many at once would take many times the memory."""
        with self._fixed(precision, source, length) as process:
            row = _run(process, self._task, source)
        self._note(row, f"{source} {length}")
        return {"round": turn, "source": source, "length": length, **row}

    @contextmanager
    def _fixed(self, precision: str, source: str, length: int) -> Iterator[PeerProcess]:
        with _process(self._task) as process:
            _load(process, self._task, precision, fixed(source, length))
            _warm_up(process, self._task, source)
            yield process

    def play_off(self) -> None:
        """The chooser against the best of the sweep, turn about: the best of many noisy figures is
        the luckiest, and has to show it again."""
        for process, precision, able in self._ready:
            if AUTO not in able or not set(able) & set(SOURCES):
                continue
            source, length = draft_figures.best(precision, self.rows, self.cells)
            with ExitStack() as stack:
                rival = process
                if source != OFF:
                    rival = stack.enter_context(self._fixed(precision, source, length))
                for turn in range(max(self._task.rounds, _PLAY_OFF_TURNS)):
                    speeds = {}
                    sides = [(AUTO, process), (source, rival)]
                    for name, one in sides if turn % 2 else reversed(sides):
                        speeds[name] = _run(one, self._task, name)["tok_s"]
                    self._report(f"{precision} play-off: {speeds}")
                    pair = (speeds[AUTO], speeds[source])
                    self.pairs.setdefault(precision, []).append(pair)

    def _note(self, row: Row, name: str) -> None:
        self._report(
            f"{row['precision']} {name}: {row['tok_s']} tok/s,"
            f" {row['accepted_per_verify']} tokens a verify"
        )


def _process(task: Task) -> PeerProcess:
    return PeerProcess(engine_command(), task.threads)


def _load(process: PeerProcess, task: Task, precision: str, settings: Sequence[str]) -> str:
    loaded: str = process.call(
        "load",
        overrides=[*task.overrides, f"pools.{task.pool}.precision={precision}", *settings],
        threads=task.threads,
        streams=task.concurrency,
        stop=task.stop,
    )
    return loaded


def _warm_up(process: PeerProcess, task: Task, drafter: str) -> None:
    """Its first words, and for a chooser its first experience."""
    process.call(
        "decode",
        timeout_s=_RUN_TIMEOUT_S,
        prompts=task.prompts[-task.warm :],
        max_tokens=min(task.max_tokens, _WARM_UP_TOKENS),
        drafter=drafter,
        temperature=task.temperature,
    )


def _run(process: PeerProcess, task: Task, drafter: str) -> Row:
    asked: dict[str, Any] = {
        "prompts": task.prompts,
        "max_tokens": task.max_tokens,
        "drafter": drafter,
        "temperature": task.temperature,
    }
    name = "decode"
    if task.clusters is not None:
        name = "decode_clusters"
        asked |= {
            "kinds": task.clusters.kinds,
            "tenants": task.clusters.tenants,
            "hints": task.clusters.hints,
        }
    row: Row = process.call(name, timeout_s=_RUN_TIMEOUT_S, **asked)
    return row
