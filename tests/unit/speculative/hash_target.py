"""A target for tests whose logits are a hash of the whole history read back through the paged KV.

Any slip in block tables, roll-back, prefix reuse or preemption changes its logits. It is a stand-in
for a model, so that thousands of steps take a second; the real model is tested in tests/system.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from mirror_sd.backends.protocol import Capabilities, Float32, RaggedBatch


class HashTarget:
    """`peaked` makes continuations repeat, so that lookup drafts are often accepted."""

    def __init__(self, vocab: int = 64, max_context: int = 512, memory: int = 4) -> None:
        self.capabilities = Capabilities(
            name="hash",
            device="cpu",
            precision="fp32",
            vocab_size=vocab,
            max_context=max_context,
            bit_stable=True,
        )
        self._memory = memory
        self.forwards = 0
        self.poisoned: set[int] = set()

    def kv_bytes_per_block(self, block_size: int) -> int:
        return 2**20

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self.slots = np.full((num_blocks, block_size), -1, dtype=np.int64)

    def forward(self, batch: RaggedBatch) -> Float32:
        self.forwards += 1
        size = self.slots.shape[1]
        owner = (
            np.searchsorted(batch.sequence_offsets, np.arange(len(batch.token_ids)), "right") - 1
        )
        for index, token in enumerate(batch.token_ids):
            table, position = batch.block_tables[owner[index]], batch.positions[index]
            self.slots[table[position // size], position % size] = token
        logits = np.empty((len(batch.logit_rows), self.capabilities.vocab_size), dtype=np.float32)
        for out, index in enumerate(batch.logit_rows):
            table, position = batch.block_tables[owner[index]], int(batch.positions[index])
            history = self.slots[table].reshape(-1)[: position + 1]
            assert (history >= 0).all(), "a position was read before it was written"
            logits[out] = self.row(history)
            if self.poisoned & set(history.tolist()):
                logits[out] = np.nan
        return logits

    def row(self, history: np.ndarray) -> Float32:
        """Logits of the next token: mostly a hash of the last `memory` tokens, slightly of all."""
        recent = int.from_bytes(blake2b(history[-self._memory :].tobytes(), digest_size=4).digest())
        whole = int.from_bytes(blake2b(history.tobytes(), digest_size=4).digest())
        row = np.random.default_rng(recent).standard_normal(self.capabilities.vocab_size)
        row += 0.05 * np.random.default_rng(whole).standard_normal(row.size)
        return row.astype(np.float32)
