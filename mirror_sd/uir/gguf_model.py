"""A GGUF file as a ModelSpec and weights: Llama (Mistral too), Qwen2 and Qwen3 architectures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mirror_sd.errors import ModelError, UnsupportedModel
from mirror_sd.uir import ggml_blocks
from mirror_sd.uir.gguf_file import GgufFile, StoredTensor
from mirror_sd.uir.model_spec import Family, ModelSpec, RopeScaling
from mirror_sd.uir.weights import LazyTensor, Weights

Float32 = NDArray[np.float32]

ARCHITECTURES: Mapping[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
ROLES = {
    "attention_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
OUTSIDE_LAYERS = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
}
Order = Literal["as stored", "interleaved"]


def read(path: Path) -> tuple[ModelSpec, Weights]:
    """Open a file. Raises `ModelError`, or `UnsupportedModel` if it is sound but not ours."""
    file = GgufFile(path)
    spec = _spec(file)
    names = dict(OUTSIDE_LAYERS)
    for layer in range(spec.num_layers):
        for role, stored in ROLES.items():
            names[f"layers.{layer}.{role}"] = f"blk.{layer}.{stored}"
    tensors = {}
    for name, stored in names.items():
        if stored in file.tensors:
            heads = _interleaved_heads(file, spec, name.rpartition(".")[2])
            tensors[name] = _lazy(file, file.tensors[stored], heads)
    return spec, Weights(path, tensors)


@dataclass(frozen=True, slots=True)
class _Fields:
    """Metadata of the file's architecture, checked for presence and type."""

    path: Path
    architecture: str
    metadata: Mapping[str, Any]

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.path}: {self.architecture}.{key} is {value!r}, not a number")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))


def _spec(file: GgufFile) -> ModelSpec:
    architecture = file.metadata.get("general.architecture")
    family = ARCHITECTURES.get(str(architecture))
    if family is None:
        raise UnsupportedModel(f"{file.path}: the architecture {architecture!r} is not supported")
    fields = _Fields(file.path, str(architecture), file.metadata)
    if fields.integer("expert_count", 0):
        raise UnsupportedModel(f"{file.path}: mixtures of experts are not supported")
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden // max(heads, 1))
    for key in ("rope.dimension_count", "attention.value_length"):
        if fields.integer(key, head_dim) != head_dim:
            raise UnsupportedModel(f"{file.path}: {key} differs from the head dimension {head_dim}")
    layers = fields.integer("block_count")
    embedding = file.tensors.get("token_embd.weight")
    return ModelSpec(
        family=family,
        # The table's rows, not the vocabulary's entries: it may be padded.
        vocab_size=embedding.shape[0] if embedding else fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rms_eps=fields.number("attention.layer_norm_rms_epsilon"),
        max_context=fields.integer("context_length"),
        windows=(None,) * layers,
        rope_scaling=_rope_scaling(file, fields),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        tied_embeddings="output.weight" not in file.tensors,
    )


def _rope_scaling(file: GgufFile, fields: _Fields) -> RopeScaling | None:
    kind = fields.get("rope.scaling.type") or "none"
    frequencies = file.tensors.get("rope_freqs.weight")
    if frequencies is not None:
        factors = _dequantised(file, frequencies)
        return RopeScaling("factors", factors=tuple(float(factor) for factor in factors))
    # Before rope.scaling.type there was only a linear factor.
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind == "yarn":
        return RopeScaling(
            "yarn",
            factor=factor,
            original_context=fields.integer("rope.scaling.original_context_length"),
        )
    if kind not in ("none", "linear"):
        raise UnsupportedModel(f"{file.path}: rope scaling {kind!r} is not supported")
    return RopeScaling("linear", factor=factor) if factor != 1.0 else None


def _interleaved_heads(file: GgufFile, spec: ModelSpec, role: str) -> int:
    """How many heads' rows llama.cpp's converter interleaved for its own rotary layout; 0: none."""
    if file.metadata.get("general.architecture") != "llama":
        return 0
    return {"q": spec.num_heads, "q_bias": spec.num_heads}.get(
        role, spec.num_kv_heads if role in ("k", "k_bias") else 0
    )


def _lazy(file: GgufFile, tensor: StoredTensor, interleaved_heads: int) -> LazyTensor:
    _check_stored(file, tensor)
    return LazyTensor(tensor.name, tensor.shape, partial(_load, file, tensor, interleaved_heads))


def _load(file: GgufFile, tensor: StoredTensor, interleaved_heads: int) -> Float32:
    values = _dequantised(file, tensor)
    if not interleaved_heads:
        return values
    pairs = values.reshape(interleaved_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _stored_bytes(file: GgufFile, tensor: StoredTensor) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.ggml_type)]
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"{file.path}: tensor {tensor.name} has the unknown type {tensor.ggml_type}"
        ) from error
    if not tensor.shape or tensor.shape[-1] % block:
        raise ModelError(
            f"{file.path}: tensor {tensor.name} of shape {list(tensor.shape)} does not divide "
            f"into blocks of {block}"
        )
    return math.prod(tensor.shape) // int(block) * int(block_bytes)


def _check_stored(file: GgufFile, tensor: StoredTensor) -> None:
    file.raw(tensor, _stored_bytes(file, tensor))


def _dequantised(file: GgufFile, tensor: StoredTensor) -> Float32:
    from gguf import quants
    from gguf.constants import GGMLQuantizationType

    raw = file.raw(tensor, _stored_bytes(file, tensor))
    kind = GGMLQuantizationType(tensor.ggml_type)
    if kind == GGMLQuantizationType.F32:
        return raw.view(np.float32).reshape(tensor.shape)
    if kind == GGMLQuantizationType.F16:
        return raw.view(np.float16).astype(np.float32).reshape(tensor.shape)
    known = ggml_blocks.dequantise(raw, kind.name)
    if known is not None:
        return known.reshape(tensor.shape)
    try:
        values: Float32 = quants.dequantize(raw.reshape(*tensor.shape[:-1], -1), kind)
    except NotImplementedError as error:
        raise UnsupportedModel(
            f"{file.path}: tensor {tensor.name} is stored as {kind.name}, which is not supported"
        ) from error
    return values.reshape(tensor.shape)
