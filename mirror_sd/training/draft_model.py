"""The draft head in torch: the mathematics of `uir.draft_file`, for training and evaluation.

Training steps on from its own states, as drafting does (the training-time test of EAGLE-3, Li et
al., arXiv 2503.01840). In step j a token at position p takes the state that step j - 1 had at
p - 1 for its feature. It attends, as a token drafted j - 1 tokens after the last known one would,
to the keys of step 1 up to p - j + 1 and to those of step i at p - j + i.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from mirror_sd.training.fake_quantise import stored
from mirror_sd.uir.draft_file import MATRICES, VECTORS, DraftSpec, Precision

Weights = Mapping[str, Tensor]


@dataclass(slots=True)
class Steps:
    """Keys and values of the steps so far, [B, kv_heads, L, head_dim] each."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class DraftModel(nn.Module):
    """Parameters by the names of `DraftSpec.shapes`, fp32; `embedding` [vocabulary, hidden] is the
    target's and is not trained. `precision`: what the matrices are rounded to in `weights`.

    `feature_scale` [F]: what is learnt is `fuse_features` times it, so that features of very
    different sizes learn at one pace; where it is 0 a feature is left out.
    """

    def __init__(self, spec: DraftSpec, embedding: Tensor, feature_scale: Tensor) -> None:
        super().__init__()
        self.spec = spec
        self.precision: Precision = "fp32"
        self.embedding: Tensor
        self.feature_scale: Tensor
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("feature_scale", feature_scale)
        for name, shape in spec.shapes().items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        frequencies = torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim
        self._frequencies = spec.rope_theta**-frequencies

    def weights(self, precision: Precision | None = None) -> dict[str, Tensor]:
        """The weights as a file of that precision holds them (default: `precision`)."""
        made: dict[str, Tensor] = {name: getattr(self, name) for name in VECTORS}
        for name in MATRICES:
            matrix = getattr(self, name)
            if name == "fuse_features":
                matrix = matrix * self.feature_scale
            made[name] = stored(matrix, precision or self.precision)
        return made

    def unroll(
        self, weights: Weights, token_ids: Tensor, features: Tensor, steps: int
    ) -> Iterator[Tensor]:
        """The states [B, L, hidden] of each step, before the final norm; the prediction of row p
        is for the token at p + 1.

        token_ids [B, L] from position 0 on; features [B, L, F]: of the token before each, zeros at
        position 0. Rows p < j - 1 of step j mean nothing.
        """
        embedded = self.norm(self.embedding[token_ids].float(), weights["embedding_norm"])
        rotary = self._rotary(token_ids.shape[1])
        state = functional.linear(features.float(), weights["fuse_features"])
        kept = Steps()
        for step in range(steps):
            if step:
                state = functional.pad(state, (0, 0, 1, 0))[:, :-1]
            feature = self.norm(state.float(), weights["feature_norm"])
            x = functional.linear(torch.cat((embedded, feature), dim=-1), weights["fuse_input"])
            state = self._layer(weights, x, kept, rotary)
            yield state

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.spec.rms_eps)

    def _layer(
        self, weights: Weights, x: Tensor, kept: Steps, rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        x = x.float()
        h = self.norm(x, weights["attention_norm"])
        x = x + functional.linear(self._attend(weights, h, kept, rotary), weights["o"])
        h = self.norm(x, weights["mlp_norm"])
        gate = functional.silu(functional.linear(h, weights["gate"]))
        return x + functional.linear(gate * functional.linear(h, weights["up"]), weights["down"])

    def _attend(
        self, weights: Weights, h: Tensor, kept: Steps, rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        spec = self.spec
        batch, length, _ = h.shape
        q, k, v = (
            functional.linear(h, weights[name]).view(batch, length, -1, spec.head_dim)
            for name in ("q", "k", "v")
        )
        q, k, v = _turned(q, rotary), _turned(k, rotary), v.transpose(1, 2)
        kept.keys.append(k)
        kept.values.append(v)
        if len(kept.keys) == 1:
            mixed = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=spec.num_kv_heads != spec.num_heads
            )
        else:
            mixed = self._attend_steps(q, kept)
        return mixed.transpose(1, 2).reshape(batch, length, -1)

    def _attend_steps(self, q: Tensor, kept: Steps) -> Tensor:
        """[B, heads, L, head_dim] of the latest step j > 1."""
        spec, later = self.spec, len(kept.keys) - 1
        batch, _, length, dim = q.shape
        q = q.view(batch, spec.num_kv_heads, -1, length, dim) / math.sqrt(dim)
        first = kept.keys[0][:, :, None]
        reach = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-later)
        scores = (q @ first.transpose(-1, -2)).float().masked_fill(~reach, -torch.inf)
        # Step i stands at p - j + i: the keys of the latest one where they are.
        keys = [_delayed(kept.keys[i], later - i) for i in range(1, later + 1)]
        values = [_delayed(kept.values[i], later - i) for i in range(1, later + 1)]
        extra = torch.stack([(q * key[:, :, None]).sum(-1) for key in keys], dim=-1)
        weights = torch.cat((scores, extra.float()), dim=-1).softmax(dim=-1)
        mixed = weights[..., :length].to(kept.values[0].dtype) @ kept.values[0][:, :, None]
        for index, value in enumerate(values):
            mixed = mixed + weights[..., length + index, None] * value[:, :, None]
        return mixed.view(batch, -1, length, dim)

    def _rotary(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [length, 1, head_dim]."""
        angles = torch.arange(length, dtype=torch.float64)[:, None] * self._frequencies
        cosines, sines = angles.cos().float(), angles.sin().float()
        both = torch.cat((cosines, cosines), -1), torch.cat((-sines, sines), -1)
        device = self.embedding.device
        return both[0][:, None].to(device), both[1][:, None].to(device)


def _turned(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """[B, L, heads, head_dim] -> [B, heads, L, head_dim], turned by its position."""
    cosines, sines = rotary
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return (x * cosines + swapped * sines).to(x.dtype).transpose(1, 2)


def _delayed(x: Tensor, rows: int) -> Tensor:
    """Row p of the result is row p - `rows` of x, along the third dimension."""
    return functional.pad(x, (0, 0, rows, 0))[:, :, : x.shape[2]] if rows else x
