"""The truth that other back ends are tested against: fp32 numpy, one sequence at a time.

Written to be read beside the papers, not to be fast: no packing, no padding, no batching.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mirror_sd.backends import batch_check
from mirror_sd.backends.protocol import Capabilities, Float32, Int32, RaggedBatch
from mirror_sd.uir.program import Program
from mirror_sd.uir.rope import inverse_frequencies


class ReferenceBackend:
    """Bit-stable by construction as far as numpy's products are: it computes token by token."""

    def __init__(self, program: Program) -> None:
        self._spec = program.spec
        self._weights = {name: program.weights.load(name) for name in program.weights.tensors}
        self._frequencies, self._rope_scale = inverse_frequencies(program.spec)
        self._num_blocks = self._block_size = 0
        self._keys = self._values = np.zeros(0, np.float32)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="reference",
            device="cpu",
            precision="fp32",
            vocab_size=self._spec.vocab_size,
            max_context=self._spec.max_context,
            bit_stable=True,
            detail="plain numpy, one token at a time: for tests",
        )

    def kv_bytes_per_block(self, block_size: int) -> int:
        return 2 * 4 * self._spec.kv_size * self._spec.num_layers * block_size

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"cannot allocate {num_blocks} blocks of {block_size} tokens")
        spec = self._spec
        shape = (spec.num_layers, num_blocks * block_size, spec.num_kv_heads, spec.head_dim)
        self._keys, self._values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._num_blocks, self._block_size = num_blocks, block_size

    def forward(self, batch: RaggedBatch) -> Float32:
        batch_check.check(
            batch,
            vocab_size=self._spec.vocab_size,
            max_context=self._spec.max_context,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
        )
        logits = np.empty((len(batch.logit_rows), self._spec.vocab_size), np.float32)
        wanted = {int(row): place for place, row in enumerate(batch.logit_rows)}
        for index, table in enumerate(batch.block_tables):
            for row in range(batch.sequence_offsets[index], batch.sequence_offsets[index + 1]):
                x = self._token(int(batch.token_ids[row]), int(batch.positions[row]), table)
                if row in wanted:
                    head = "embedding" if self._spec.tied_embeddings else "head"
                    x = self._norm(x, self._weights["final_norm"])
                    logits[wanted[row]] = self._weights[head] @ x
        return logits

    def _token(self, token_id: int, position: int, table: Int32) -> Float32:
        """Hidden state [hidden] of one token after the last layer."""
        places = np.arange(position + 1)
        slots = table[places // self._block_size].astype(np.int64) * self._block_size
        slots += places % self._block_size
        x = self._weights["embedding"][token_id]
        for layer in range(self._spec.num_layers):
            x = x + self._attention(layer, x, position, slots)
            x = x + self._mlp(layer, x)
        return x

    def _attention(self, layer: int, x: Float32, position: int, slots: NDArray[np.int64]) -> Float32:
        spec = self._spec
        h = self._norm(x, self._weight(layer, "attention_norm"))
        q = self._project(layer, "q", h).reshape(spec.num_heads, spec.head_dim)
        k = self._project(layer, "k", h).reshape(spec.num_kv_heads, spec.head_dim)
        v = self._project(layer, "v", h).reshape(spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm:
            q = self._norm(q, self._weight(layer, "q_norm"))
            k = self._norm(k, self._weight(layer, "k_norm"))
        self._keys[layer, slots[-1]] = self._rotate(k, position)
        self._values[layer, slots[-1]] = v
        q = self._rotate(q, position)
        window = spec.windows[layer]
        seen = slots if window is None else slots[-window:]
        shared = spec.num_heads // spec.num_kv_heads
        keys = np.repeat(self._keys[layer, seen], shared, axis=1)
        values = np.repeat(self._values[layer, seen], shared, axis=1)
        scores = np.einsum("hd,thd->ht", q, keys) / np.sqrt(np.float32(spec.head_dim))
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
        mixed: Float32 = np.einsum("ht,thd->hd", scores, values)
        return self._project(layer, "o", mixed.reshape(-1))

    def _mlp(self, layer: int, x: Float32) -> Float32:
        h = self._norm(x, self._weight(layer, "mlp_norm"))
        gate, up = self._project(layer, "gate", h), self._project(layer, "up", h)
        return self._project(layer, "down", gate / (1 + np.exp(-gate)) * up)

    def _weight(self, layer: int, role: str) -> Float32:
        return self._weights[f"layers.{layer}.{role}"]

    def _project(self, layer: int, role: str, x: Float32) -> Float32:
        y: Float32 = self._weight(layer, role) @ x
        bias = self._weights.get(f"layers.{layer}.{role}_bias")
        return y if bias is None else y + bias

    def _norm(self, x: Float32, weight: Float32) -> Float32:
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(mean_square + self._spec.rms_eps) * weight, np.float32)

    def _rotate(self, x: Float32, position: int) -> Float32:
        """Turn the pairs (i, i + head_dim / 2) of every head [heads, head_dim]."""
        angles = np.float32(position) * self._frequencies
        cosines = np.cos(angles) * np.float32(self._rope_scale)
        sines = np.sin(angles) * np.float32(self._rope_scale)
        first, second = np.split(x, 2, axis=-1)
        turned = (first * cosines - second * sines, second * cosines + first * sines)
        return np.asarray(np.concatenate(turned, axis=-1), np.float32)
