"""The truth that other back ends are tested against: fp32 numpy, one sequence at a time.

Written to be read beside the papers, not to be fast: no packing, no padding, no batching.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mirror_sd.backends import batch_check, block_table, tapped
from mirror_sd.backends.protocol import Capabilities, Float32, Int32, RaggedBatch
from mirror_sd.uir.program import Program
from mirror_sd.uir.rope import inverse_frequencies


class ReferenceBackend:
    """Sequences never meet, but numpy's products may round a row differently in longer chunks."""

    def __init__(self, program: Program) -> None:
        self._spec = program.spec
        self._weights = {name: program.weights.load(name) for name in program.weights.tensors}
        self._frequencies, self._rope_scale = inverse_frequencies(program.spec)
        self._num_blocks = self._block_size = 0
        self._keys = self._values = np.zeros(0, np.float32)
        self._taps: tuple[int, ...] = ()
        self._features = np.empty((0, 0), np.float32)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="reference",
            device="cpu",
            precision="fp32",
            vocab_size=self._spec.vocab_size,
            max_context=self._spec.max_context,
            bit_stable=False,
            detail="plain numpy, for tests",
            num_layers=self._spec.num_layers,
            hidden_size=self._spec.hidden_size,
        )

    def kv_bytes_per_block(self, block_size: int) -> int:
        return 2 * 4 * self._spec.kv_size * self._spec.num_layers * block_size

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        batch_check.check_cache(num_blocks, block_size)
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
        hidden = np.empty((len(batch.token_ids), self._spec.hidden_size), np.float32)
        self._features = np.empty((len(hidden), len(self._taps) * hidden.shape[1]), np.float32)
        for index, table in enumerate(batch.block_tables):
            begin, end = batch.sequence_offsets[index], batch.sequence_offsets[index + 1]
            states = self._sequence(batch.token_ids[begin:end], batch.positions[begin:end], table)
            hidden[begin:end] = states[-1]
            if self._taps:
                kept = [states[layer] for layer in self._taps]
                self._features[begin:end] = np.concatenate(kept, axis=1)
        wanted = self._norm(hidden[batch.logit_rows], self._weights["final_norm"])
        head = "embedding" if self._spec.tied_embeddings else "head"
        return np.asarray(wanted @ self._weights[head].T, np.float32)

    def tap(self, layers: Sequence[int]) -> None:
        self._taps = tapped.checked(layers, self._spec.num_layers)
        self._features = np.empty((0, len(self._taps) * self._spec.hidden_size), np.float32)

    @property
    def features(self) -> Float32:
        return self._features

    def _sequence(self, token_ids: Int32, positions: Int32, table: Int32) -> list[Float32]:
        """Hidden states [tokens, hidden] before the first layer and after each."""
        places = np.arange(positions[-1] + 1)
        slots = block_table.slots_of(table, places, self._block_size)
        x: Float32 = self._weights["embedding"][token_ids]
        states = [x]
        for layer in range(self._spec.num_layers):
            x = x + self._attention(layer, x, positions, slots)
            x = x + self._mlp(layer, x)
            states.append(x)
        return states

    def _attention(
        self, layer: int, x: Float32, positions: Int32, slots: NDArray[np.int64]
    ) -> Float32:
        spec = self._spec
        h = self._norm(x, self._weight(layer, "attention_norm"))
        q = self._project(layer, "q", h).reshape(-1, spec.num_heads, spec.head_dim)
        k = self._project(layer, "k", h).reshape(-1, spec.num_kv_heads, spec.head_dim)
        v = self._project(layer, "v", h).reshape(-1, spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm:
            q = self._norm(q, self._weight(layer, "q_norm"))
            k = self._norm(k, self._weight(layer, "k_norm"))
        self._keys[layer, slots[positions]] = self._rotate(k, positions)
        self._values[layer, slots[positions]] = v
        q = self._rotate(q, positions)
        shared = spec.num_heads // spec.num_kv_heads
        keys = np.repeat(self._keys[layer, slots], shared, axis=1)
        values = np.repeat(self._values[layer, slots], shared, axis=1)
        scores = np.einsum("nhd,thd->hnt", q, keys) / np.sqrt(np.float32(spec.head_dim))
        scores[:, self._hidden(layer, positions, len(slots))] = -np.inf
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed: Float32 = np.einsum("hnt,thd->nhd", scores, values)
        return self._project(layer, "o", mixed.reshape(len(x), -1))

    def _hidden(self, layer: int, positions: Int32, context: int) -> NDArray[np.bool_]:
        """[tokens, context]: which keys a token may not look at."""
        keys, rows = np.arange(context), positions[:, None]
        window = self._spec.windows[layer]
        return np.asarray((keys > rows) | (False if window is None else keys <= rows - window))

    def _mlp(self, layer: int, x: Float32) -> Float32:
        h = self._norm(x, self._weight(layer, "mlp_norm"))
        gate, up = self._project(layer, "gate", h), self._project(layer, "up", h)
        with np.errstate(over="ignore"):  # exp(-gate) is infinite where silu is zero
            return self._project(layer, "down", gate / (1 + np.exp(-gate)) * up)

    def _weight(self, layer: int, role: str) -> Float32:
        return self._weights[f"layers.{layer}.{role}"]

    def _project(self, layer: int, role: str, x: Float32) -> Float32:
        bias = self._weights.get(f"layers.{layer}.{role}_bias", np.float32(0))
        return np.asarray(x @ self._weight(layer, role).T + bias, np.float32)

    def _norm(self, x: Float32, weight: Float32) -> Float32:
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(mean_square + self._spec.rms_eps) * weight, np.float32)

    def _rotate(self, x: Float32, positions: Int32) -> Float32:
        """Turn the pairs (i, i + head_dim / 2) of every head [tokens, heads, head_dim]."""
        angles = positions[:, None, None].astype(np.float32) * self._frequencies
        cosines = np.cos(angles) * np.float32(self._rope_scale)
        sines = np.sin(angles) * np.float32(self._rope_scale)
        first, second = np.split(x, 2, axis=-1)
        turned = (first * cosines - second * sines, second * cosines + first * sines)
        return np.asarray(np.concatenate(turned, axis=-1), np.float32)
