"""Does a row's result depend on its batch? Run at load, on the real weights, two layers deep."""

from __future__ import annotations

import numpy as np
import torch

from mirror_sd.backends.protocol import Float32, Int32, RaggedBatch
from mirror_sd.backends.torch_cache import empty_cache, geometry_of
from mirror_sd.backends.torch_decoder import TorchDecoder
from mirror_sd.backends.torch_plan import make_plan

LAYERS = 2
BLOCK_SIZE = 16
BLOCKS = 64
LENGTHS = (21, 1, 70, 7, 130, 12)
CHUNKINGS = (1, 5, 19, 64)


def is_bit_stable(decoder: TorchDecoder, device: torch.device) -> bool:
    """Compare each sequence alone, in one piece, with all together and in several chunkings."""
    random = np.random.default_rng(7)
    lengths = [min(length, decoder.spec.max_context) for length in LENGTHS]
    prompts = [
        random.integers(0, decoder.spec.vocab_size, length).astype(np.int32) for length in lengths
    ]
    run = _Run(decoder, device)
    alone = [run.last_logits([prompt], random, chunk=len(prompt))[0] for prompt in prompts]
    together = run.last_logits(prompts, random, chunk=max(lengths))
    if not _all_equal(alone, together):
        return False
    return all(
        _all_equal(alone, run.last_logits(prompts, random, chunk=chunk)) for chunk in CHUNKINGS
    )


def _all_equal(left: list[Float32], right: list[Float32]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


class _Run:
    def __init__(self, decoder: TorchDecoder, device: torch.device) -> None:
        self._decoder = decoder
        self._geometry = geometry_of(decoder, BLOCK_SIZE, device)
        self._cache = empty_cache(decoder, BLOCKS * BLOCK_SIZE, device)[:LAYERS]

    def last_logits(
        self, prompts: list[Int32], random: np.random.Generator, chunk: int
    ) -> list[Float32]:
        """Each prompt's last row, fed `chunk` tokens at a time over freshly shuffled blocks."""
        blocks = iter(random.permutation(BLOCKS).astype(np.int32))
        tables = [
            np.array([next(blocks) for _ in range(len(prompt) // BLOCK_SIZE + 1)], np.int32)
            for prompt in prompts
        ]
        last: dict[int, Float32] = {}
        for start in range(0, max(len(prompt) for prompt in prompts), chunk):
            active = [i for i, prompt in enumerate(prompts) if start < len(prompt)]
            pieces = [prompts[i][start : start + chunk] for i in active]
            batch = _batch(pieces, start, [tables[i] for i in active])
            with torch.inference_mode():
                plan = make_plan(batch, self._geometry)
                logits = self._decoder.forward(plan, self._cache, LAYERS).cpu().numpy()
            for place, i in enumerate(active):
                last[i] = logits[place].copy()
        return [last[i] for i in range(len(prompts))]


def _batch(pieces: list[Int32], start: int, tables: list[Int32]) -> RaggedBatch:
    offsets = np.cumsum([0, *(len(piece) for piece in pieces)]).astype(np.int32)
    return RaggedBatch(
        token_ids=np.concatenate(pieces),
        positions=np.concatenate(
            [np.arange(start, start + len(piece), dtype=np.int32) for piece in pieces]
        ),
        sequence_offsets=offsets,
        block_tables=tuple(tables),
        logit_rows=offsets[1:] - 1,
    )
