"""Sequences run through a back end, alone or in batches of any shape."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from mirror_sd.backends.protocol import Backend, Float32, RaggedBatch

Ints = NDArray[np.int32]


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


class Run:
    """One sequence on its way through a back end, and the logits of each token so far."""

    def __init__(self, ids: Ints, table: Ints) -> None:
        self.ids = ids
        self.table = table
        self.done = 0
        self.logits: list[Float32] = []

    @property
    def left(self) -> int:
        return len(self.ids) - self.done


def batch_of(parts: Iterable[tuple[Run, int]], wanted: Ints | None = None) -> RaggedBatch:
    """The next `count` tokens of each run; `wanted` rows of them, by default all."""
    parts = list(parts)
    offsets = np.cumsum([0, *(count for _, count in parts)]).astype(np.int32)
    return RaggedBatch(
        token_ids=np.concatenate([run.ids[run.done : run.done + n] for run, n in parts]),
        positions=np.concatenate(
            [np.arange(run.done, run.done + n, dtype=np.int32) for run, n in parts]
        ),
        sequence_offsets=offsets,
        block_tables=tuple(run.table for run, _ in parts),
        logit_rows=np.arange(offsets[-1], dtype=np.int32) if wanted is None else wanted,
    )


def advance(backend: Backend, parts: Iterable[tuple[Run, int]]) -> None:
    """One forward; keeps the logits of all its rows."""
    parts = list(parts)
    batch = batch_of(parts)
    logits = backend.forward(batch)
    for place, (run, count) in enumerate(parts):
        begin = batch.sequence_offsets[place]
        run.logits.extend(logits[begin : begin + count].copy())
        run.done += count


def alone(backend: Backend, ids: Ints, table: Ints, chunk: int = 1) -> Float32:
    """Logits [tokens, vocabulary] of one sequence, `chunk` tokens a forward."""
    run = Run(ids, table)
    while run.left:
        advance(backend, [(run, min(chunk, run.left))])
    return np.array(run.logits)


def whole(backend: Backend, ids: Ints, block_size: int = 16, seed: int = 3) -> Float32:
    """Logits of one sequence in one forward, in a cache of just its size, blocks shuffled."""
    blocks = -(-len(ids) // block_size)
    backend.allocate_kv(blocks, block_size)
    table = np.random.default_rng(seed).permutation(blocks).astype(np.int32)
    return alone(backend, ids, table, chunk=len(ids))
