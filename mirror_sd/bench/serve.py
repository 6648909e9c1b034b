"""`mirror-sd bench serve`: chats streamed through a running stack, and what they cost.

With `--against-engine` the same prompts are also answered by an engine without HTTP, in a process
of its own with the stack's settings, turn about with the stack, which is idle meanwhile.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from mirror_sd.api.tokenizer import Tokenizer
from mirror_sd.bench import machine, prompts
from mirror_sd.bench.options import AsJson, Dataset, Limit, MaxTokens, Rounds, encode, show
from mirror_sd.bench.peer_process import PeerProcess, engine_command
from mirror_sd.bench.prompts import Messages
from mirror_sd.bench.serve_load import Reply, chat_body, stream
from mirror_sd.bench.serve_stack import RunningStack, measured
from mirror_sd.bench.token_times import rates
from mirror_sd.model_store import resolve
from mirror_sd.offline import load_tokenizer


def command(
    port: Annotated[int, typer.Option(help="Port of a running stack on this machine.")] = 8080,
    dataset: Dataset = None,
    limit: Limit = None,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Clients; each asks again when its answer has ended.")
    ] = 16,
    max_tokens: MaxTokens = 128,
    drafts: Annotated[
        bool, typer.Option("--drafts/--no-drafts", help="Whether to speculate.")
    ] = True,
    against_engine: Annotated[
        bool, typer.Option("--against-engine", help="Also without HTTP, in turn; the ratio.")
    ] = False,
    rounds: Rounds = 2,
    as_json: AsJson = False,
) -> None:
    """Speed and cost of streaming through a running stack, by clients that cost little.

    `tok_s` is that of `bench decode`: the tokens of all clients from the moment at which each has
    its first one. `us_per_token` is CPU time of each kind of process by tokens; `serving_us` is
    all of it but the worker's.
    """
    chats = prompts.load(dataset, limit)
    stack = RunningStack(port)
    bench = ServeBench(stack, port, chats, concurrency, max_tokens, drafts)
    runs: list[dict[str, Any]] = []
    with ExitStack() as exit_stack:
        engine = exit_stack.enter_context(bench.engine()) if against_engine else None
        bench.warm_up(engine)
        for turn in range(rounds):
            runs.append(bench.serve(turn))
            if engine is not None:
                runs.append(bench.decode(engine, turn))
    facts = {"concurrency": concurrency, "max_tokens": max_tokens, "prompts": len(chats)}
    show({"machine": machine.describe(), **facts, "runs": runs, **ratios(runs)}, as_json)


class ServeBench:
    """Measures one stack; a turn's prompts are its own, so that none is found in the cache."""

    def __init__(
        self,
        stack: RunningStack,
        port: int,
        chats: Sequence[Messages],
        clients: int,
        max_tokens: int,
        drafts: bool,
    ) -> None:
        config = stack.config
        self._stack = stack
        self._port = port
        self._chats = chats
        self._clients = clients
        self._max_tokens = max_tokens
        self._drafts = drafts
        self._model = config.model.served_name or resolve(config.model.path).name
        self._tokenizer: Tokenizer = load_tokenizer(config)
        self._begun_at = time.time_ns()

    def engine(self) -> PeerProcess:
        """A process for an engine with the stack's settings; `warm_up` loads it."""
        return PeerProcess(engine_command(), self._stack.threads)

    def warm_up(self, engine: PeerProcess | None) -> None:
        """A few tokens on every connection and in the engine."""
        self._stream(self._tagged("warm"), max_tokens=4)
        if engine is not None:
            stop = self._tokenizer.facts.eos_token_ids
            engine.call(
                "load",
                overrides=self._stack.overrides(),
                threads=self._stack.threads,
                streams=self._clients,
                stop=stop,
            )
            self._run_engine(engine, self._tagged("warm")[:1], max_tokens=4)

    def serve(self, turn: int) -> dict[str, Any]:
        """A turn through the stack."""
        with measured(self._stack) as use:
            replies = self._stream(self._tagged(str(turn)), self._max_tokens)
        found = rates([reply.answer for reply in replies], self._clients)
        gaps = sorted(1e3 * gap for reply in replies for gap in _gaps(reply))
        return {
            "by": "stack",
            **found.row(),
            "inter_token_ms_p50": _quantile(gaps, 0.5),
            "inter_token_ms_p99": _quantile(gaps, 0.99),
            **use.row(found.tokens),
        }

    def decode(self, engine: PeerProcess, turn: int) -> dict[str, Any]:
        """The same turn by the engine alone."""
        with machine.OtherLoad(engine.pid) as others:
            row = self._run_engine(engine, self._tagged(str(turn)), self._max_tokens)
        tokens = sum(map(len, row["answers"]))
        kept = {name: row[name] for name in ("precision", "tok_s", "ms_per_token", "ttft_ms")}
        return {"by": "engine", **kept, "tokens": tokens, "other_load": others.cores}

    def _tagged(self, tag: str) -> list[Messages]:
        notes = [f"[{self._begun_at}-{tag}-{index}]" for index in range(len(self._chats))]
        return [
            [{"role": "system", "content": note}, *chat]
            for note, chat in zip(notes, self._chats, strict=True)
        ]

    def _stream(self, chats: Sequence[Messages], max_tokens: int) -> list[Reply]:
        bodies = [
            chat_body(self._model, chat, max_tokens=max_tokens, speculation=self._drafts)
            for chat in chats
        ]
        return stream(self._port, bodies, self._clients)

    def _run_engine(
        self, engine: PeerProcess, chats: Sequence[Messages], max_tokens: int
    ) -> dict[str, Any]:
        row: dict[str, Any] = engine.call(
            "decode",
            timeout_s=3600.0,
            prompts=encode(self._tokenizer, list(chats)),
            max_tokens=max_tokens,
            drafter="auto" if self._drafts else "off",
        )
        return row


def ratios(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Speed through the stack by that of the engine: of each turn, and of all."""
    stack = [run["tok_s"] for run in runs if run["by"] == "stack"]
    engine = [run["tok_s"] for run in runs if run["by"] == "engine"]
    if not engine:
        return {}
    turns = [round(a / b, 3) for a, b in zip(stack, engine, strict=True)]
    return {"ratio": {"of_engine": round(sum(stack) / sum(engine), 3), "by_turn": turns}}


def _gaps(reply: Reply) -> list[float]:
    pairs = zip(reply.event_times, reply.event_times[1:], strict=False)
    return [later - earlier for earlier, later in pairs]


def _quantile(values: Sequence[float], share: float) -> float | None:
    """Of sorted values; None of none."""
    if not values:
        return None
    if share == 0.5:
        return round(statistics.median(values), 2)
    return round(values[min(int(share * len(values)), len(values) - 1)], 2)
