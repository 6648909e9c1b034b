"""Measures what forwards cost before the first request comes.

Serving alone would not tell: a loop that drafts never sees how quick a forward without drafts is,
and one that does not never sees how little a row costs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mirror_sd.backends.protocol import Backend, RaggedBatch
from mirror_sd.speculative.cost_model import VerifyCost

_ROWS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128)
_TIMES = 2


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
    backend.forward(_batch(1, block_size))  # the first one of all is slow
    for rows in _ROWS:
        taken = []
        for _ in range(_TIMES):
            if rows > most or clock() - begin > budget_s:
                break
            before = clock()
            backend.forward(_batch(rows, block_size))
            taken.append(clock() - before)
        if taken:
            cost.observe(rows, min(taken))


def _batch(rows: int, block_size: int) -> RaggedBatch:
    """One sequence whose `rows` tokens all have their logits computed."""
    return RaggedBatch(
        token_ids=np.zeros(rows, dtype=np.int32),
        positions=np.arange(rows, dtype=np.int32),
        sequence_offsets=np.array([0, rows], dtype=np.int32),
        block_tables=(np.arange(-(-rows // block_size), dtype=np.int32),),
        logit_rows=np.arange(rows, dtype=np.int32),
    )
