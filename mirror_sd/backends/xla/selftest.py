"""Does a row's result depend on its batch? Run at load, on the very programs that serve.

Each bucket is a program of its own, which XLA may lay out in its own way: all are run.
"""

from __future__ import annotations

import numpy as np

from mirror_sd.backends import stability
from mirror_sd.backends.protocol import Float32, Int32, RaggedBatch
from mirror_sd.backends.xla.executor import Executor
from mirror_sd.uir.model_spec import ModelSpec

# Alone and in one piece; then all together in chunks of these sizes.
LENGTHS = (21, 1, 70, 7, 140, 12, 2, 3)
CHUNKINGS = (3, 11, 64, 140)
# Tokens of the longest prompt that are fed by the smaller chunks: the start, and around `CHUNK`.
_SKIPPED = (24, 110)


def is_bit_stable(executor: Executor, spec: ModelSpec, *, room: int, block_size: int) -> bool:
    """Compare each sequence alone, in one piece, with all together in several chunkings. room:
    tokens that the KV cache holds; what lies in it is overwritten."""
    random = np.random.default_rng(7)
    prompts: list[Int32] = []
    free = room // block_size
    for length in LENGTHS:
        blocks = -(-length // block_size)
        if length <= spec.max_context and blocks <= free:
            prompts.append(random.integers(0, spec.vocab_size, length).astype(np.int32))
            free -= blocks
    alone = [_results(executor, [prompt], block_size, len(prompt))[0] for prompt in prompts]
    for chunk in CHUNKINGS:
        together = _results(executor, prompts, block_size, chunk)
        if not all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True)):
            return False
    return True


def _results(
    executor: Executor, prompts: list[Int32], block_size: int, chunk: int
) -> list[Float32]:
    """Each prompt's logits at its last token, fed `chunk` tokens at a time."""
    tables, first = [], 0
    for prompt in prompts:
        blocks = -(-len(prompt) // block_size)
        # Backwards: a table need not ascend.
        tables.append(np.arange(first, first + blocks, dtype=np.int32)[::-1].copy())
        first += blocks

    def forward(batch: RaggedBatch) -> Float32:
        return executor.forward(batch)[0]

    return stability.last_logits(forward, prompts, tables, _starts(prompts, chunk))


def _starts(prompts: list[Int32], chunk: int) -> list[int]:
    """Of the forwards."""
    starts, start, longest = [], 0, max(len(prompt) for prompt in prompts)
    while start < longest:
        starts.append(start)
        start += 64 if _SKIPPED[0] <= start < _SKIPPED[1] - 64 else chunk
    return starts
