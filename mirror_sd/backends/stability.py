"""Does a row's result depend on its batch? Asked of a back end through its protocol, at load.

Other self-tests, which look deeper than the protocol, feed their prompts by `last_logits` too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from mirror_sd.backends.protocol import Backend, Float32, Int32, RaggedBatch

BLOCK_SIZE = 16
LENGTHS = (21, 1, 140, 7)
CHUNK = 40


def is_bit_stable(backend: Backend, *, vocab_size: int, max_context: int) -> bool:
    """Compare logits of each sequence alone, in one piece, with all together in one piece and in
    several.

    Allocates the cache, anew and for itself.
    """
    random = np.random.default_rng(7)
    lengths = [min(length, max_context) for length in LENGTHS]
    prompts = [random.integers(0, vocab_size, length).astype(np.int32) for length in lengths]
    blocks = sum(length // BLOCK_SIZE + 1 for length in lengths)
    backend.allocate_kv(blocks, BLOCK_SIZE)
    alone = [_shuffled(backend, [prompt], random, len(prompt))[0] for prompt in prompts]
    for chunk in (max(lengths), CHUNK):
        together = _shuffled(backend, prompts, random, chunk)
        if not all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True)):
            return False
    return True


def _shuffled(
    backend: Backend, prompts: list[Int32], random: np.random.Generator, chunk: int
) -> list[Float32]:
    """Logits after each prompt, all fed `chunk` tokens at a time."""
    sizes = [len(prompt) // BLOCK_SIZE + 1 for prompt in prompts]
    tables = np.split(random.permutation(sum(sizes)).astype(np.int32), np.cumsum(sizes)[:-1])
    starts = range(0, max(len(prompt) for prompt in prompts), chunk)
    return last_logits(backend.forward, prompts, tables, starts)


def last_logits(
    forward: Callable[[RaggedBatch], Float32],
    prompts: Sequence[Int32],
    tables: Sequence[Int32],
    starts: Sequence[int],
) -> list[Float32]:
    """Logits after each prompt; a forward takes in, of all, the tokens from one start to the next.

    starts: ascending from 0; after the last one the prompts are fed to their ends.
    """
    last: dict[int, Float32] = {}
    for start, stop in pairwise([*starts, max(len(prompt) for prompt in prompts)]):
        active = [i for i, prompt in enumerate(prompts) if start < len(prompt)]
        pieces = [prompts[i][start:stop] for i in active]
        offsets = np.cumsum([0, *(len(piece) for piece in pieces)]).astype(np.int32)
        positions = [np.arange(start, start + len(piece), dtype=np.int32) for piece in pieces]
        logits = forward(
            RaggedBatch(
                token_ids=np.concatenate(pieces),
                positions=np.concatenate(positions),
                sequence_offsets=offsets,
                block_tables=tuple(tables[i] for i in active),
                logit_rows=offsets[1:] - 1,
            )
        )
        last.update({i: row.copy() for i, row in zip(active, logits, strict=True)})
    return [last[i] for i in range(len(prompts))]
