"""Peak memory of a worker's process that has N streams of L tokens, against what it must hold.

The child (`python -m mirror_sd.bench.memory`) imports what a worker imports and builds its engine
the same way. limit = 1.3 x (weights + keys and values of N x L tokens) + 150 MB.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from mirror_sd import config as configuration
from mirror_sd import engine as engines
from mirror_sd.backends.protocol import Backend
from mirror_sd.bench import machine
from mirror_sd.bench.options import AsJson, Overrides, Threads, show, thread_count
from mirror_sd.bench.peer_drivers.session import peak_rss_mb, serve
from mirror_sd.bench.peer_process import PeerProcess
from mirror_sd.config import Config
from mirror_sd.engine import Engine
from mirror_sd.errors import ConfigError, InternalError
from mirror_sd.messages import Failed, SamplingParams, Submit

FACTOR, ALLOWANCE_MB = 1.3, 150
# New tokens of each stream; the rest of its length is prompt.
ANSWER_TOKENS = 32
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
    backend = engines.create_backend(config, pool, threads)
    engine = engines.build_on(backend, config, pool)
    weights_mb = _weight_bytes(backend) / MB
    size = config.engine.block_size
    blocks = streams * -(-length // size)
    kv_mb = blocks * backend.kv_bytes_per_block(size) / MB
    loaded_mb = peak_rss_mb()
    most = _grow(engine, config, streams, length)
    if most < streams * (length // size):
        raise ConfigError(
            f"{streams} streams of {length} tokens were never there at once: at most {most} of"
            f" {blocks} KV blocks were in use; raise engine.kv_cache_mb or the batch size"
        )
    peak = peak_rss_mb()
    limit = limit_mb(weights_mb, kv_mb)
    return {
        "engine": engine.capabilities.name,
        "precision": engine.capabilities.precision,
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


def _grow(engine: Engine, config: Config, streams: int, length: int) -> int:
    """Run the streams to their end; the most KV blocks that were in use between two steps."""
    answer = min(ANSWER_TOKENS, length - 1)
    vocab = engine.capabilities.vocab_size
    for stream in range(streams):
        # No two alike from the first token on, so that they share no blocks.
        prompt = tuple((7919 * (stream + 1) + 31 * i) % vocab for i in range(length - answer))
        engine.add(
            Submit(
                request_id=str(stream),
                model=engine.model_name,
                prompt=prompt,
                params=SamplingParams(max_tokens=answer, seed=0, temperature=0.0),
            )
        )
    most = 0
    while engine.has_work:
        for output in engine.step():
            if isinstance(output, Failed):
                raise InternalError(f"stream {output.request_id}: {output.message}")
        stats = engine.stats()
        if stats.running == streams:
            most = max(most, stats.kv_blocks_used)
    return most


def command(
    concurrency: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 16,
    length: Annotated[int, typer.Option(min=64, help="Tokens of each stream.")] = 1024,
    threads: Threads = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Peak resident memory of a worker with N streams of L tokens, against weights + KV cache."""
    settings = next(iter(configuration.load(overrides=overrides or ()).pools.values()))
    count = thread_count(threads or settings.threads)
    with PeerProcess([sys.executable, "-m", "mirror_sd.bench.memory"], count) as process:
        report: dict[str, Any] = process.call(
            "fill",
            timeout_s=3600.0,
            overrides=overrides or (),
            threads=count,
            streams=concurrency,
            length=length,
        )
    facts = {"threads": count, "streams": concurrency, "length": length}
    show({"machine": machine.describe(), **facts, **report}, as_json)


if __name__ == "__main__":
    serve({"fill": fill})
