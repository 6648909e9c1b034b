"""Does a row's result depend on its batch? Run at load, on the real weights, two layers deep.

Besides each sequence's last logits it compares the second layer's keys and values of every token,
which the first layer's attention and MLP of that token went into.
"""

from __future__ import annotations

import numpy as np
import torch

from mirror_sd.backends import block_table, stability
from mirror_sd.backends.protocol import Float32, Int32, RaggedBatch
from mirror_sd.backends.torch_cache import empty_cache, geometry_of
from mirror_sd.backends.torch_decoder import TorchDecoder
from mirror_sd.backends.torch_plan import make_plan
from mirror_sd.backends.torch_static import StaticForward

LAYERS = 2
BLOCK_SIZE = 16
BLOCKS = 96
LENGTHS = (21, 1, 70, 7, 150, 12)
CHUNKINGS = (9, 64)


def is_bit_stable(decoder: TorchDecoder, device: torch.device, *, is_static: bool) -> bool:
    """Compare each sequence alone, in one piece, with all together and in several chunkings."""
    random = np.random.default_rng(7)
    lengths = [min(length, decoder.spec.max_context) for length in LENGTHS]
    prompts = [
        random.integers(0, decoder.spec.vocab_size, length).astype(np.int32) for length in lengths
    ]
    run = _Run(decoder, device, is_static)
    alone = [run.results([prompt], random, chunk=len(prompt))[0] for prompt in prompts]
    for chunk in (max(lengths), *CHUNKINGS):
        together = run.results(prompts, random, chunk)
        for one, other in zip(alone, together, strict=True):
            if not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True)):
                return False
    return True


class _Run:
    def __init__(self, decoder: TorchDecoder, device: torch.device, is_static: bool) -> None:
        self._decoder = decoder
        self._geometry = geometry_of(decoder, BLOCK_SIZE, device)
        slots = (BLOCKS + is_static) * BLOCK_SIZE
        self._cache = empty_cache(decoder, slots, device, LAYERS)
        self._static = (
            StaticForward(decoder, self._geometry, self._cache, LAYERS) if is_static else None
        )

    def results(
        self, prompts: list[Int32], random: np.random.Generator, chunk: int
    ) -> list[tuple[Float32, Float32]]:
        """Each prompt's last logits and cached vectors, fed `chunk` tokens at a time."""
        blocks = iter(random.permutation(BLOCKS).astype(np.int32))
        tables = [
            np.array([next(blocks) for _ in range(len(prompt) // BLOCK_SIZE + 1)], np.int32)
            for prompt in prompts
        ]
        starts = range(0, max(len(prompt) for prompt in prompts), chunk)
        last = stability.last_logits(self._forward, prompts, tables, starts)
        return [
            (logits, self._cached(table, len(prompt)))
            for logits, table, prompt in zip(last, tables, prompts, strict=True)
        ]

    def _forward(self, batch: RaggedBatch) -> Float32:
        if self._static is not None:
            return self._static(batch)[0]
        with torch.inference_mode():
            plan = make_plan(batch, self._geometry)
            padded: Float32 = self._decoder.forward(plan, self._cache, LAYERS).numpy()
            return padded[: len(batch.logit_rows)]

    def _cached(self, table: Int32, length: int) -> Float32:
        slots = block_table.slots_of(table, np.arange(length), BLOCK_SIZE)
        where = torch.from_numpy(slots).to(self._cache.device)
        values: Float32 = self._cache[-1].index_select(0, where).float().cpu().numpy()
        return values
