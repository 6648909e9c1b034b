"""The pace of running streams while a long prompt is read beside them.

Three runs, each in a process of its own (`python -m mirror_sd.bench.segments`): the prompt read in
segments, in whole chunks, and not at all. The streams' tokens are the same in all three, which is
checked; times are compared with those of the same tokens in the run without the prompt.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer

from mirror_sd import config as configuration
from mirror_sd import engine as engines
from mirror_sd.bench import machine, prompts
from mirror_sd.bench.options import AsJson, Overrides, Threads, encode, show, thread_count
from mirror_sd.bench.peer_drivers.session import serve
from mirror_sd.bench.peer_process import PeerProcess
from mirror_sd.engine import Engine
from mirror_sd.errors import ConfigError, InternalError
from mirror_sd.messages import Chunk, Failed, SamplingParams, Submit
from mirror_sd.offline import load_tokenizer

# Tokens that each stream has before the prompt comes.
WARM_TOKENS = 48
LONG = "long"
_NEVER = 10**9
_RUN_TIMEOUT_S = 1800.0


@dataclass(slots=True)
class Stream:
    """`arrivals`: the moment and the number of tokens of each chunk."""

    arrivals: list[tuple[float, int]]
    tokens: list[int]

    def gaps(self, begin: int, end: int) -> tuple[list[float], list[float]]:
        """Of the tokens `begin .. end`: the time before each, shared by those that came together;
        and the times between chunks. Seconds."""
        each: list[float] = []
        chunks: list[float] = []
        index, before = 0, None
        for at, count in self.arrivals:
            if before is not None and begin <= index < end:
                each += [(at - before) / count] * count
                chunks.append(at - before)
            index, before = index + count, at
        return each, chunks


def run(
    overrides: Sequence[str],
    threads: int,
    streams: Sequence[Sequence[int]],
    length: int,
    until: Sequence[int],
    times_alone: bool,
) -> dict[str, Any]:
    """Runs in the child. A `length` above 0: a prompt of so many tokens comes when all streams are
    warm, and the run ends when it has been read; else it ends when each stream has `until` tokens.
    `times_alone`: read it once before, with nothing beside it.

    `begin`, `end`: of each stream the tokens it had when the prompt came, and when it was read.
    """
    config = configuration.load(overrides=["engine.prefix_reuse=false", *overrides])
    pool = next(iter(config.pools))
    engine = engines.build(config, pool, threads)
    if length >= engine.max_context:
        raise ConfigError(f"the context is {engine.max_context} tokens, {length} are asked")
    alone_s = _read_alone(engine, length) if times_alone else 0.0
    found = {f"s{i}": Stream([], []) for i in range(len(streams))}
    for i, prompt in enumerate(streams):
        # Drawn, not the likeliest: the latter soon goes round in circles, and drafts are too good.
        _submit(engine, f"s{i}", prompt, seed=i, temperature=0.8)
    _advance(engine, found, [WARM_TOKENS] * len(streams))
    begin = [len(stream.tokens) for stream in found.values()]
    read_s = 0.0
    if length:
        start = time.perf_counter()
        _submit(engine, LONG, _prompt(engine, length), seed=0, temperature=0.0, max_tokens=1)
        while not _step(engine, found):
            pass
        read_s = time.perf_counter() - start
    else:
        _advance(engine, found, until)
    return {
        "precision": engine.capabilities.precision,
        "engine": engine.capabilities.name,
        "alone_s": alone_s,
        "read_s": read_s,
        "begin": begin,
        "end": [len(stream.tokens) for stream in found.values()],
        "arrivals": [stream.arrivals for stream in found.values()],
        "tokens": [stream.tokens for stream in found.values()],
    }


def _prompt(engine: Engine, length: int) -> list[int]:
    return [(7919 + 31 * i) % engine.capabilities.vocab_size for i in range(length)]


def _read_alone(engine: Engine, length: int) -> float:
    start = time.perf_counter()
    _submit(engine, LONG, _prompt(engine, length), seed=0, temperature=0.0, max_tokens=1)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


def _submit(
    engine: Engine,
    name: str,
    prompt: Sequence[int],
    *,
    seed: int,
    temperature: float,
    max_tokens: int = _NEVER,
) -> None:
    params = SamplingParams(max_tokens=max_tokens, seed=seed, temperature=temperature)
    engine.add(
        Submit(request_id=name, model=engine.model_name, prompt=tuple(prompt), params=params)
    )


def _advance(engine: Engine, streams: dict[str, Stream], until: Sequence[int]) -> None:
    while any(len(s.tokens) < n for s, n in zip(streams.values(), until, strict=True)):
        _step(engine, streams)


def _step(engine: Engine, streams: dict[str, Stream]) -> bool:
    """Whether the long prompt has its token."""
    outputs = engine.step()
    now, is_read = time.perf_counter(), False
    for output in outputs:
        if isinstance(output, Failed):
            raise InternalError(f"{output.request_id}: {output.message}")
        if output.request_id == LONG:
            is_read = True
        elif isinstance(output, Chunk):
            stream = streams[output.request_id]
            stream.arrivals.append((now, len(output.tokens)))
            stream.tokens.extend(output.tokens)
        else:
            raise InternalError(f"{output.request_id} came to its end: {output.reason}")
    return is_read


def pace(told: dict[str, Any], begin: Sequence[int], end: Sequence[int]) -> dict[str, float]:
    """Of the tokens `begin .. end` of each stream: p50 and p99 of the time before a token, p99 and
    maximum of the time between chunks, in ms; tokens a second of all streams."""
    each: list[float] = []
    chunks: list[float] = []
    spans = []
    for i, arrivals in enumerate(told["arrivals"]):
        stream = Stream([(at, count) for at, count in arrivals], told["tokens"][i])
        own, between = stream.gaps(begin[i], end[i])
        each, chunks = each + own, chunks + between
        spans.append(sum(between))
    if not each:
        raise InternalError("no token came while the prompt was read")
    ms = 1e3 * np.array(each)
    return {
        "p50_ms": round(float(np.percentile(ms, 50)), 2),
        "p99_ms": round(float(np.percentile(ms, 99)), 2),
        "p99_chunk_ms": round(1e3 * float(np.percentile(chunks, 99)), 2),
        "longest_ms": round(1e3 * max(chunks), 2),
        "tok_s": round(len(each) / (sum(spans) / len(spans)), 1),
    }


def report(
    segments: dict[str, Any], whole: dict[str, Any], without: dict[str, Any]
) -> dict[str, Any]:
    """Compares the three runs. Raises `InternalError` where a stream's tokens differ."""
    rows = {}
    for name, told in (("segments", segments), ("whole_chunks", whole)):
        _check_same(name, told["tokens"], without["tokens"])
        before = pace(without, told["begin"], told["end"])
        beside = pace(told, told["begin"], told["end"])
        rows[name] = {
            "without": before,
            "beside": beside,
            "p99_growth": round(beside["p99_ms"] / before["p99_ms"], 2),
            "p99_chunk_growth": round(beside["p99_chunk_ms"] / before["p99_chunk_ms"], 2),
            "read_s": round(told["read_s"], 2),
        }
    return {
        "p99_growth": rows["segments"]["p99_growth"],
        "p99_chunk_growth": rows["segments"]["p99_chunk_growth"],
        "read_alone_s": round(segments["alone_s"], 2),
        **rows,
    }


def _check_same(name: str, tokens: list[list[int]], others: list[list[int]]) -> None:
    for i, (left, right) in enumerate(zip(tokens, others, strict=True)):
        common = min(len(left), len(right))
        if left[:common] != right[:common]:
            raise InternalError(f"stream {i} has other tokens with the prompt ({name})")


def command(
    streams: Annotated[int, typer.Option(min=1, help="Streams that run.")] = 8,
    length: Annotated[int, typer.Option(min=64, help="Tokens of the long prompt.")] = 6000,
    threads: Threads = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Time between tokens of running streams while a long prompt is read, and without it."""
    config = configuration.load(overrides=overrides or ())
    count = thread_count(threads or next(iter(config.pools.values())).threads)
    chats = prompts.load(None)
    texts = encode(load_tokenizer(config), [chats[i % len(chats)] for i in range(streams)])
    keys = list(overrides or ())
    slots = f"scheduler.max_batch_size.{next(iter(config.pools)).upper()}={streams + 1}"
    keys.append(slots)

    def in_a_process(extra: Sequence[str], long: int, until: Sequence[int]) -> dict[str, Any]:
        with PeerProcess([sys.executable, "-m", "mirror_sd.bench.segments"], count) as process:
            told: dict[str, Any] = process.call(
                "run",
                timeout_s=_RUN_TIMEOUT_S,
                overrides=[*keys, *extra],
                threads=count,
                streams=texts,
                length=long,
                until=until,
                times_alone=long > 0 and not extra,
            )
            return told

    segments = in_a_process((), length, ())
    whole = in_a_process((f"engine.segment_above={_NEVER}",), length, ())
    until = [max(ends) for ends in zip(segments["end"], whole["end"], strict=True)]
    without = in_a_process((), 0, until)
    facts = {
        "threads": count,
        "streams": streams,
        "length": length,
        "engine": segments["engine"],
        "precision": segments["precision"],
    }
    described = {"machine": machine.describe(), **facts}
    show({**described, **report(segments, whole, without)}, as_json)


if __name__ == "__main__":
    serve({"run": run})
