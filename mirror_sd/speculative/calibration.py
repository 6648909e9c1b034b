"""Measures what forwards cost before the first request comes.

Serving alone would not tell: a loop that drafts never sees how quick a forward without drafts is,
and one that does not never sees how little a row costs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mirror_sd.backends.protocol import Backend, DraftBatch, DraftHead, RaggedBatch
from mirror_sd.speculative.cost_model import VerifyCost

# Tiles of 16 rows make 17 much dearer than 16.
_ROWS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 17, 24, 32, 33, 48, 64, 96, 128)
_TIMES = 2
_HEAD_STEPS, _HEAD_TIMES = 4, 4


def calibrate(
    backend: Backend,
    cost: VerifyCost,
    *,
    num_blocks: int,
    block_size: int,
    clock: Callable[[], float],
    budget_s: float,
) -> None:
    """Forwards of more and more rows until `budget_s` are used up. Overwrites the KV cache: to be
    called while no sequence is there."""
    most = min(num_blocks * block_size, backend.capabilities.max_context)
    begin = clock()
    backend.forward(blank_batch(1, block_size))  # the first one of all is slow
    for rows in _ROWS:
        taken = []
        for _ in range(_TIMES):
            if rows > most or clock() - begin > budget_s:
                break
            before = clock()
            backend.forward(blank_batch(rows, block_size))
            taken.append(clock() - before)
        # One alone may have been disturbed. The first is corrected while serving, a later one not.
        if len(taken) == _TIMES or (taken and not cost.is_known):
            cost.measure(rows, min(taken))


def time_head(
    head: DraftHead, backend: Backend, *, width: int, block_size: int, clock: Callable[[], float]
) -> float:
    """Seconds of one pass of the head for one sequence, after a forward, as it is called while
    serving. The first call of all is slow and not counted: it would keep the head from being called
    again for a long time. Overwrites both caches."""
    steps = min(_HEAD_STEPS, block_size)
    batch = DraftBatch(
        token_ids=np.zeros(1, dtype=np.int32),
        positions=np.zeros(1, dtype=np.int32),
        sequence_offsets=np.array([0, 1], dtype=np.int32),
        block_tables=(np.zeros(1, dtype=np.int32),),
        features=np.zeros((1, width), dtype=np.float32),
        steps=np.array([steps], dtype=np.int32),
        floors=np.zeros(1, dtype=np.float32),
        temperatures=np.zeros(1, dtype=np.float32),
        seeds=np.zeros(1, dtype=np.uint64),
    )
    taken = []
    for _ in range(1 + _HEAD_TIMES):
        backend.forward(blank_batch(1, block_size))
        before = clock()
        head.draft(batch)
        taken.append(clock() - before)
    return min(taken[1:]) / (1 + steps)


def blank_batch(rows: int, block_size: int) -> RaggedBatch:
    """One sequence whose `rows` tokens all have their logits computed."""
    return RaggedBatch(
        token_ids=np.zeros(rows, dtype=np.int32),
        positions=np.arange(rows, dtype=np.int32),
        sequence_offsets=np.array([0, rows], dtype=np.int32),
        block_tables=(np.arange(-(-rows // block_size), dtype=np.int32),),
        logit_rows=np.arange(rows, dtype=np.int32),
    )
