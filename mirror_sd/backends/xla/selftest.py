"""Does a row's result depend on its batch? Run at load, on the real weights, two layers deep.

Each bucket is a program of its own, which XLA may lay out in its own way: all are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mirror_sd.backends.protocol import Float32, Int32, RaggedBatch
from mirror_sd.backends.xla.buckets import Bucket
from mirror_sd.backends.xla.decoder import Weights
from mirror_sd.backends.xla.executor import Executor
from mirror_sd.uir.program import Program

LAYERS = 2
BLOCK_SIZE = 16
BLOCKS = 64
# Alone and in one piece; then all together in chunks of these sizes.
LENGTHS = (21, 1, 70, 7, 140, 12, *(2,) * 12)
CHUNKINGS = (5, 24, 64, 140)


def is_bit_stable(
    program: Program, weights: Weights, device: Any, buckets: Sequence[Bucket]
) -> bool:
    """Compare each sequence alone, in one piece, with all together in several chunkings."""
    spec = replace(program.spec, num_layers=LAYERS, windows=program.spec.windows[:LAYERS])
    executor = Executor(
        replace(program, spec=spec),
        Weights(weights.shared, weights.layers[:LAYERS]),
        device,
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        buckets=buckets,
    )
    random = np.random.default_rng(7)
    prompts = [
        random.integers(0, spec.vocab_size, min(length, spec.max_context)).astype(np.int32)
        for length in LENGTHS
    ]
    alone = [_results(executor, [prompt], random, len(prompt))[0] for prompt in prompts]
    for chunk in CHUNKINGS:
        together = _results(executor, prompts, random, chunk)
        if not all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True)):
            return False
    return True


def _results(
    executor: Executor, prompts: list[Int32], random: np.random.Generator, chunk: int
) -> list[Float32]:
    """Each prompt's logits at its last tokens, fed `chunk` tokens at a time."""
    blocks = iter(random.permutation(BLOCKS).astype(np.int32))
    tables = [
        np.array([next(blocks) for _ in range(len(prompt) // BLOCK_SIZE + 1)], np.int32)
        for prompt in prompts
    ]
    last: dict[int, Float32] = {}
    for start in range(0, max(len(prompt) for prompt in prompts), chunk):
        active = [i for i, prompt in enumerate(prompts) if start < len(prompt)]
        pieces = [prompts[i][start : start + chunk] for i in active]
        logits, _ = executor.forward(_batch(pieces, start, [tables[i] for i in active]))
        for place, i in enumerate(active):
            last[i] = logits[place].copy()
    return [last[i] for i in range(len(prompts))]


def _batch(pieces: list[Int32], start: int, tables: list[Int32]) -> RaggedBatch:
    offsets = np.cumsum([0, *(len(piece) for piece in pieces)]).astype(np.int32)
    positions = [np.arange(start, start + len(piece), dtype=np.int32) for piece in pieces]
    return RaggedBatch(
        token_ids=np.concatenate(pieces),
        positions=np.concatenate(positions),
        sequence_offsets=offsets,
        block_tables=tuple(tables),
        logit_rows=offsets[1:] - 1,
    )
