"""The decoder's forward in torch: Llama, Qwen2, Qwen3 and Mistral layers over a paged KV cache.

Residuals, norms, rotary positions, softmax and logits are fp32. Outside oneDNN and the attention
kernel only additions, products, square roots and casts are used element by element: IEEE fixes
their results, so no remainder loop can differ from the vector one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mirror_sd.backends.torch_linear import Linear, pack
from mirror_sd.backends.torch_plan import Plan
from mirror_sd.uir.model_spec import ModelSpec
from mirror_sd.uir.program import Program
from mirror_sd.uir.rope import inverse_frequencies

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    output: Linear
    mlp_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear
    window: int | None


class TorchDecoder:
    """The lowered program. `layers` limits the depth, for the self-test's short runs."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self.spec = program.spec
        self.dtype = DTYPES[program.plan.activations]
        self.kv_dtype = DTYPES[program.plan.kv]
        self._device = device
        weights = _Reader(program, device, self.dtype)
        self._embedding = weights.matrix("embedding")
        self._layers = [_load_layer(weights, self.spec, i) for i in range(self.spec.num_layers)]
        self._final_norm = weights.vector("final_norm")
        head = "embedding" if self.spec.tied_embeddings else "head"
        self._head_dtype = DTYPES[program.plan.head]
        self._head = pack(weights.matrix(head, self._head_dtype))
        self.weight_bytes = weights.bytes_read
        self._cosines, self._sines = _rotary_tables(self.spec, device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T, hidden] in fp32."""
        return self._embedding.index_select(0, token_ids).float()

    def forward(
        self,
        plan: Plan,
        cache: Tensor,
        layers: int | None = None,
        tapped: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Logits [len(plan.logit_rows), vocab] in fp32; writes the tokens' keys and values.

        cache: [layers, slots, 2 * kv_heads, head_dim]. tapped: its keys are numbers of layers,
        after which the residual stream [plan.padded, hidden] is put there.
        """
        cosines = self._cosines.index_select(0, plan.positions)[:, None]
        sines = self._sines.index_select(0, plan.positions)[:, None]
        x = self.embed(plan.token_ids)
        for number, (layer, layer_cache) in enumerate(
            zip(self._layers[:layers], cache, strict=False), start=1
        ):
            h = self._norm(x, layer.attention_norm).to(self.dtype)
            x = x + self._attend(layer, h, plan, layer_cache, cosines, sines)
            h = self._norm(x, layer.mlp_norm).to(self.dtype)
            x = x + layer.down(self._finite(layer.up.times(h, layer.gate.silu(h))))
            if tapped is not None and number in tapped:
                tapped[number] = x
        wanted = self._norm(x.index_select(0, plan.logit_rows), self._final_norm)
        return self._head(wanted.to(self._head_dtype)).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.spec.rms_eps)

    def _finite(self, x: Tensor) -> Tensor:
        """fp16 ends at 65,504, which the products of some models' MLPs pass; bf16 does not."""
        if self.dtype != torch.float16:
            return x
        limit = torch.finfo(torch.float16).max
        return x.clamp(-limit, limit)

    def _attend(
        self, layer: _Layer, h: Tensor, plan: Plan, cache: Tensor, cosines: Tensor, sines: Tensor
    ) -> Tensor:
        spec = self.spec
        rotated_heads = spec.num_heads + spec.num_kv_heads
        qkv = layer.qkv(h).view(plan.padded, -1, spec.head_dim)
        qk = qkv[:, :rotated_heads].float()
        if layer.qk_norm is not None:
            qk = functional.rms_norm(qk, (spec.head_dim,), None, spec.rms_eps) * layer.qk_norm
        half = spec.head_dim // 2
        turned = torch.cat((qk[..., half:], qk[..., :half]), dim=-1)
        qkv[:, :rotated_heads] = qk * cosines + turned * sines
        cache.index_copy_(0, plan.slots, qkv[: plan.tokens, spec.num_heads :])
        queries = qkv[:, : spec.num_heads].reshape(-1, spec.head_dim)
        mixed = plan.attention.mix(queries, cache, layer.window)
        return layer.output(mixed.view(plan.padded, spec.query_size))


class _Reader:
    """Weights on the device, read one by one so that no second copy of the model exists."""

    def __init__(self, program: Program, device: torch.device, dtype: torch.dtype) -> None:
        self._weights = program.weights
        self._device = device
        self._dtype = dtype
        self.bytes_read = 0

    def _read(self, name: str) -> Tensor:
        values = self._weights.load(name)
        # torch wants writable memory; a memory-mapped array is not.
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def vector(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._moved(name, dtype)

    def matrix(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self._moved(name, dtype or self._dtype)

    def _moved(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self._read(name).to(self._device, dtype)
        self.bytes_read += tensor.nbytes
        return tensor

    def linear(self, layer: int, *roles: str, biased: bool = False) -> Linear:
        """One packed matrix of the roles' outputs, one after another."""
        names = [f"layers.{layer}.{role}" for role in roles]
        weight = torch.cat([self.matrix(name) for name in names])
        bias = None
        if biased:
            bias = torch.cat([self.vector(f"{name}_bias", self._dtype) for name in names])
        return pack(weight, bias)


def _load_layer(weights: _Reader, spec: ModelSpec, index: int) -> _Layer:
    qk_norm = None
    if spec.qk_norm:
        query = weights.vector(f"layers.{index}.q_norm").expand(spec.num_heads, -1)
        key = weights.vector(f"layers.{index}.k_norm").expand(spec.num_kv_heads, -1)
        qk_norm = torch.cat((query, key))
    return _Layer(
        attention_norm=weights.vector(f"layers.{index}.attention_norm"),
        qkv=weights.linear(index, "q", "k", "v", biased=spec.qkv_bias),
        qk_norm=qk_norm,
        output=weights.linear(index, "o", biased=spec.output_bias),
        mlp_norm=weights.vector(f"layers.{index}.mlp_norm"),
        gate=weights.linear(index, "gate"),
        up=weights.linear(index, "up"),
        down=weights.linear(index, "down"),
        window=spec.windows[index],
    )


def _rotary_tables(spec: ModelSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines, [max_context, head_dim], such that x*cos + swapped(x)*sin turns."""
    frequencies, scale = inverse_frequencies(spec)
    positions = torch.arange(spec.max_context, dtype=torch.float32)
    angles = positions[:, None] * torch.from_numpy(frequencies)
    cosines, sines = angles.cos() * scale, angles.sin() * scale
    return (
        torch.cat((cosines, cosines), dim=-1).to(device),
        torch.cat((-sines, sines), dim=-1).to(device),
    )
