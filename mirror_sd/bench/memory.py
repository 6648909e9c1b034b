"""Peak memory of a worker's process that has N streams of L tokens, against what it must hold; and
the growth of one stream's cache, paged and by concatenation (`kv_growth`).

The child (`python -m mirror_sd.bench.memory`) imports what a worker imports, runs on the malloc of
a worker and builds its engine the same way. limit = 1.3 x (weights + keys and values of N x L
tokens) + 150 MB.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from mirror_sd import allocator
from mirror_sd import config as configuration
from mirror_sd import engine as engines
from mirror_sd.backends.protocol import Backend
from mirror_sd.bench import kv_growth, machine
from mirror_sd.bench.options import AsJson, Overrides, Rounds, Threads, show, thread_count
from mirror_sd.bench.peer_drivers.session import peak_rss_mb, serve
from mirror_sd.bench.peer_process import PeerProcess
from mirror_sd.engine import Engine
from mirror_sd.engine_backend import create_backend
from mirror_sd.errors import ConfigError, InternalError
from mirror_sd.messages import Chunk, Failed, SamplingParams, Submit

FACTOR, ALLOWANCE_MB = 1.3, 150
# New tokens of each stream; the rest of its length is prompt.
ANSWER_TOKENS = 32
# KV blocks that the streams may take beyond their length, as a factor.
SLACK = 1.25
MB = 2**20


def limit_mb(weights_mb: float, kv_mb: float) -> float:
    """The most memory that such a worker may take."""
    return FACTOR * (weights_mb + kv_mb) + ALLOWANCE_MB


def fill(
    overrides: Sequence[str], threads: int, streams: int, length: int
) -> dict[str, float | str]:
    """Runs in the child: grow `streams` sequences to `length` tokens and weigh the process.

    Raises `ConfigError` where the engine cannot hold them or does not know its weights' size.
    """
    importlib.import_module("workers.worker")
    config = configuration.load(overrides=overrides)
    pool = next(iter(config.pools))
    backend = create_backend(config, pool, threads)
    engine = engines.build_on(backend, config, pool)
    weights_mb = _weight_bytes(backend) / MB
    size = config.engine.block_size
    if length > backend.capabilities.max_context:
        raise ConfigError(
            f"the model's context is {backend.capabilities.max_context} tokens, {length} are asked"
        )
    blocks = streams * -(-length // size)
    kv_mb = blocks * backend.kv_bytes_per_block(size) / MB
    loaded_mb = peak_rss_mb()
    if engine.slots < streams or engine.stats().kv_blocks_free < SLACK * blocks:
        raise ConfigError(
            f"{streams} streams of {length} tokens need {streams} slots and {SLACK * blocks:.0f} KV"
            f" blocks, there are {engine.slots} and {engine.stats().kv_blocks_free}: raise"
            " scheduler.max_batch_size or engine.kv_cache_mb"
        )
    _grow(engine, streams, length)
    _verify_drafts(engine, streams)
    peak = peak_rss_mb()
    limit = limit_mb(weights_mb, kv_mb)
    return {
        "engine": engine.capabilities.name,
        "precision": engine.capabilities.precision,
        "allocator": allocator.running() or "unknown",
        "weights_mb": round(weights_mb, 1),
        "kv_mb": round(kv_mb, 1),
        "loaded_rss_mb": loaded_mb,
        "peak_rss_mb": peak,
        "limit_mb": round(limit, 1),
        "ratio": round(peak / limit, 3),
    }


def _weight_bytes(backend: Backend) -> int:
    size = getattr(backend, "weight_bytes", None)
    if not isinstance(size, int):
        raise ConfigError(
            f"the engine {backend.capabilities.name} does not tell the size of its weights"
        )
    return size


def _grow(engine: Engine, streams: int, length: int) -> None:
    """Run the streams until each has `length` tokens or more, none preempted.

    Prompts are read one after another, so the first streams have answered for longer then.
    """
    answer = min(ANSWER_TOKENS, length // 2)
    vocab = engine.capabilities.vocab_size
    for stream in range(streams):
        # No two alike from the first token on, so that they share no blocks.
        prompt = [(7919 * (stream + 1) + 31 * i) % vocab for i in range(length - answer)]
        _submit(engine, f"grow-{stream}", prompt, engine.max_context - len(prompt), False)
    lengths = dict.fromkeys((f"grow-{stream}" for stream in range(streams)), length - answer)
    while engine.has_work and min(lengths.values()) < length:
        for output in engine.step():
            if isinstance(output, Failed):
                raise InternalError(f"{output.request_id}: {output.message}")
            if isinstance(output, Chunk):
                lengths[output.request_id] += len(output.tokens)
    engine.abort_all()


def _verify_drafts(engine: Engine, streams: int) -> None:
    """The rows of many drafts in one forward take memory too: texts that repeat are drafted."""
    for stream in range(streams):
        _submit(engine, f"draft-{stream}", [100 + stream, 7, 8, 9] * 16, 2 * ANSWER_TOKENS, True)
    while engine.has_work:
        engine.step()


def _submit(
    engine: Engine, request_id: str, prompt: Sequence[int], max_tokens: int, speculation: bool
) -> None:
    params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, speculation=speculation)
    engine.add(
        Submit(request_id=request_id, model=engine.model_name, prompt=tuple(prompt), params=params)
    )


def command(
    concurrency: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 16,
    length: Annotated[int, typer.Option(min=64, help="Tokens of each stream.")] = 1024,
    rounds: Rounds = 3,
    threads: Threads = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Peak memory of a worker with N streams of L tokens, against weights + KV cache; and the time
    and memory that a stream's cache takes to grow, paged against concatenated."""
    config = configuration.load(overrides=overrides or ())
    settings = next(iter(config.pools.values()))
    count = thread_count(threads or settings.threads)
    command = [sys.executable, "-m", "mirror_sd.bench.memory"]
    environment = kv_growth.variables(settings.allocator)
    with PeerProcess(command, count, environment) as process:
        report: dict[str, Any] = process.call(
            "fill",
            timeout_s=3600.0,
            overrides=overrides or (),
            threads=count,
            streams=concurrency,
            length=length,
        )
    growth = kv_growth.measure(config.model.path, length, count, rounds)
    facts = {"threads": count, "streams": concurrency, "length": length}
    show({"machine": machine.describe(), **facts, **report, **growth}, as_json)


if __name__ == "__main__":
    serve({"fill": fill})
