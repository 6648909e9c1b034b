"""The time of one forward against the memory floor: what must be read, at memory's own speed.

floor = (bytes of the weights + bytes of the context's keys and values) / bandwidth, which is
that of a streaming vector read by as many threads over as many bytes, read again beside
each measurement because shared machines change their speed by the minute.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mirror_sd import _native
from mirror_sd.backends.native.native_backend import NativeBackend
from mirror_sd.backends.protocol import RaggedBatch
from mirror_sd.config import Config
from mirror_sd.engine_backend import create_backend
from mirror_sd.errors import ConfigError

_BLOCK = 16


@dataclass(slots=True)
class Row:
    """Readings of `tokens` new tokens of one sequence whose context ends at `context`."""

    precision: str
    tokens: int
    context: int
    read_bytes: int
    ms: list[float] = field(default_factory=list)
    bandwidth: list[float] = field(default_factory=list)  # GB/s beside each of `ms`

    def floors(self) -> list[float]:
        return [self.read_bytes / gb_s / 1e6 for gb_s in self.bandwidth]

    def report(self, one_token_ms: float) -> dict[str, Any]:
        """Medians over the rounds; a ratio is taken within its round."""
        ratios = [ms / floor for ms, floor in zip(self.ms, self.floors(), strict=True)]
        ms = statistics.median(self.ms)
        return {
            "precision": self.precision,
            "tokens": self.tokens,
            "context": self.context,
            "ms": round(ms, 3),
            "floor_ms": round(statistics.median(self.floors()), 3),
            "ratio": round(statistics.median(ratios), 3),
            "times_one_token": round(ms / one_token_ms, 3),
        }


def measure(
    config: Config,
    precisions: Sequence[str],
    *,
    tokens: Sequence[int],
    contexts: Sequence[int],
    threads: int,
    rounds: int,
    repeats: int,
) -> dict[str, Any]:
    """`{"bandwidth_gb_s", "rows"}`, a row for each pair of tokens and context.

    Raises `ConfigError` if the engine is not the native one, or a pair cannot be.
    """
    if max(tokens) > min(contexts):
        raise ConfigError(
            f"{max(tokens)} new tokens are more than a context of {min(contexts)} has"
        )
    rows: list[Row] = []
    readings: list[float] = []
    details: dict[str, str] = {}
    for precision in precisions:
        backend = _load(config, precision, threads)
        limit = backend.capabilities.max_context
        if max(contexts) > limit:
            raise ConfigError(f"the model's context is {limit} tokens, {max(contexts)} are asked")
        backend.allocate_kv(-(-max(contexts) // _BLOCK) + 1, _BLOCK)
        facts = backend.capabilities
        details[facts.precision] = f"{facts.isa}, {facts.detail}"
        per_token = backend.kv_bytes_per_block(_BLOCK) // _BLOCK
        mine = [
            Row(facts.precision, count, context, backend.weight_bytes + context * per_token)
            for context in contexts
            for count in tokens
        ]
        for _ in range(rounds):
            for row in mine:
                gb_s = _native.read_bandwidth(threads, backend.weight_bytes, 4)
                readings.append(gb_s)
                row.bandwidth.append(gb_s)
                row.ms.append(_time(backend, row.tokens, row.context, repeats))
        rows += mine
    return {
        "bandwidth_gb_s": round(statistics.median(readings), 1),
        "threads": threads,
        "engines": details,
        "rows": [row.report(_one_token(rows, row)) for row in rows],
    }


def _one_token(rows: Sequence[Row], of: Row) -> float:
    """ms of the row with the fewest tokens at the same precision and context."""
    alike = [r for r in rows if (r.precision, r.context) == (of.precision, of.context)]
    return statistics.median(min(alike, key=lambda r: r.tokens).ms)


def _load(config: Config, precision: str, threads: int) -> NativeBackend:
    name, pool = next(iter(config.pools.items()))
    pools = {name: pool.model_copy(update={"precision": precision})}
    backend = create_backend(config.model_copy(update={"pools": pools}), name, threads)
    if not isinstance(backend, NativeBackend):
        raise ConfigError(
            f"bench forward measures the native engine, this is {backend.capabilities.name}"
        )
    return backend


def _time(backend: NativeBackend, tokens: int, context: int, repeats: int) -> float:
    """Median milliseconds of a forward whose logits are all wanted."""
    positions = np.arange(context - tokens, context, dtype=np.int32)
    batch = RaggedBatch(
        token_ids=positions % 997 + 3,
        positions=positions,
        sequence_offsets=np.array([0, tokens], np.int32),
        block_tables=(np.arange(-(-context // _BLOCK), dtype=np.int32),),
        logit_rows=np.arange(tokens, dtype=np.int32),
    )
    spans = []
    for _ in range(repeats + 1):  # the first one finds cold caches
        begin = time.perf_counter()
        backend.forward(batch)
        spans.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(spans[1:])
