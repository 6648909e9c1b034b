"""The draft head in torch: in fp32, one sequence at a time where attention is concerned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mirror_sd.backends.protocol import DraftBatch, Float32, Int32
from mirror_sd.backends.stepped_draft import DraftRows, SteppedDraft
from mirror_sd.backends.torch_backend import TorchBackend
from mirror_sd.uir.draft_file import DraftProgram
from mirror_sd.uir.rope import plain_frequencies


class TorchDraftHead(SteppedDraft[Tensor]):
    def __init__(self, program: DraftProgram, target: TorchBackend) -> None:
        super().__init__(program, target.capabilities)
        spec = program.spec
        self._target = target.decoder
        self._device = target.device
        self._weights = {
            name: torch.from_numpy(np.array(values, np.float32)).to(self._device)
            for name, values in program.weights.items()
        }
        frequencies = plain_frequencies(spec.rope_theta, spec.head_dim)
        self._frequencies = torch.from_numpy(frequencies).to(self._device)
        self._cache = torch.empty(0)

    def _allocate(self, slots: int) -> None:
        shape = (2, slots, self._spec.num_kv_heads, self._spec.head_dim)
        self._cache = torch.zeros(shape, device=self._device)

    def _fused(self, features: Float32) -> Tensor:
        with torch.inference_mode():
            states = torch.from_numpy(features).to(self._device)
            return functional.linear(states, self._weights["fuse_features"])

    def _pass(self, batch: DraftBatch, rows: DraftRows, states: Tensor) -> tuple[Tensor, Float32]:
        with torch.inference_mode():
            outputs = self._layer(batch, rows, states)
            logits = self._project("head", self._norm("final_norm", outputs))
            return outputs, logits.cpu().numpy()

    def _taken(self, outputs: Tensor, rows: Sequence[int]) -> Tensor:
        return outputs[list(rows)]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self._weights[name]
        return functional.rms_norm(x, (x.shape[-1],), weight, self._spec.rms_eps)

    def _project(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self._weights[name])

    def _layer(self, batch: DraftBatch, rows: DraftRows, states: Tensor) -> Tensor:
        """The layer's outputs [len(rows.indexes), hidden]; keys and values of all rows."""
        spec = self._spec
        embedded = self._target.embed(torch.from_numpy(rows.token_ids).to(self._device))
        inputs = (self._norm("embedding_norm", embedded), self._norm("feature_norm", states))
        x = self._project("fuse_input", torch.cat(inputs, dim=1))
        h = self._norm("attention_norm", x)
        angles = torch.from_numpy(rows.positions).to(self._device).float()[:, None]
        angles = (angles * self._frequencies)[:, None]
        keys = self._rotated(
            self._project("k", h).view(-1, spec.num_kv_heads, spec.head_dim), angles
        )
        values = self._project("v", h).view(-1, spec.num_kv_heads, spec.head_dim)
        slots = torch.from_numpy(rows.slots).to(self._device)
        self._cache[0].index_copy_(0, slots, keys)
        self._cache[1].index_copy_(0, slots, values)
        x, h, angles = x[rows.indexes], h[rows.indexes], angles[rows.indexes]
        queries = self._project("q", h).view(-1, spec.num_heads, spec.head_dim)
        queries = self._rotated(queries, angles)
        mixed = [
            self._attend(queries[row], batch.block_tables[sequence], rows.positions[index])
            for row, (index, sequence) in enumerate(zip(rows.indexes, rows.sequences, strict=True))
        ]
        if not mixed:
            return x
        x = x + self._project("o", torch.stack(mixed))
        h = self._norm("mlp_norm", x)
        gated = functional.silu(self._project("gate", h)) * self._project("up", h)
        return x + self._project("down", gated)

    def _rotated(self, heads: Tensor, angles: Tensor) -> Tensor:
        first, second = heads.chunk(2, dim=-1)
        cosines, sines = angles.cos(), angles.sin()
        turned = (first * cosines - second * sines, second * cosines + first * sines)
        return torch.cat(turned, dim=-1)

    def _attend(self, queries: Tensor, table: Int32, position: int) -> Tensor:
        """[heads * head_dim] of one token."""
        places = np.arange(int(position) + 1, dtype=np.int64)
        slots = torch.from_numpy(self._slots(table, places)).to(self._device)
        keys, values = self._cache.index_select(1, slots).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            queries[None, :, None], keys[None], values[None], enable_gqa=True
        )
        return mixed.reshape(-1)
