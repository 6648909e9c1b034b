"""Random models that need neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mirror_sd.backends.native.native_backend import NativeBackend, chosen_isa
from mirror_sd.backends.protocol import Float32
from mirror_sd.backends.reference_backend import ReferenceBackend
from mirror_sd.model_store import ModelFiles
from mirror_sd.uir.hf_model import OUTSIDE_LAYERS, ROLES
from mirror_sd.uir.model_spec import ModelSpec, expected_shapes
from mirror_sd.uir.precision_plan import PrecisionPlan
from mirror_sd.uir.program import Program
from mirror_sd.uir.weights import LazyTensor, Weights

# Every option at once, and no size a multiple of a vector, a strip of outputs or a group of inputs.
ODD = ModelSpec(
    family="llama",
    vocab_size=75,
    hidden_size=52,
    intermediate_size=77,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=20,
    rope_theta=10000.0,
    rms_eps=1e-5,
    max_context=4096,
    windows=(None, 300),
    qkv_bias=True,
    output_bias=True,
    qk_norm=True,
)
# What a Hugging Face directory of the llama family can say.
PLAIN = replace(ODD, windows=(None, None), qkv_bias=False, output_bias=False, qk_norm=False)

FP32, BF16, INT8 = (PrecisionPlan.native(name) for name in ("fp32", "bf16", "int8"))
PLANS = {
    "fp32": FP32,
    "bf16": BF16,
    "int8": INT8,
    "int8, all inputs wide": replace(
        INT8, wide=frozenset({"qkv", "output", "gate_up", "down", "head", "embedding"})
    ),
    "int8, some inputs wide": replace(INT8, wide=frozenset({"qkv", "down.1"})),
    "int8, int8 cache": replace(INT8, kv="int8"),
    "int8, a bf16 head": replace(INT8, head="bf16"),
    "bf16, int8 cache": replace(BF16, kv="int8"),
}


def random_weights(spec: ModelSpec, seed: int = 7) -> dict[str, Float32]:
    """Weights under our own names. Logits come out of the order of 10; norms are not 1 nor biases
    0, which would hide a mix-up."""
    random = np.random.default_rng(seed)
    weights: dict[str, Float32] = {}
    for name, shape in expected_shapes(spec).items():
        if len(shape) == 2:
            values = random.normal(0.0, 1.5 / np.sqrt(shape[1]), shape)
        else:
            values = random.normal(1.0 if name.endswith("norm") else 0.0, 0.3, shape)
        weights[name] = values.astype(np.float32)
    return weights


def program_of(
    spec: ModelSpec, plan: PrecisionPlan, weights: Mapping[str, Float32] | None = None
) -> Program:
    tensors = {
        name: LazyTensor(name, values.shape, partial(np.copy, values))
        for name, values in (random_weights(spec) if weights is None else weights).items()
    }
    return Program("random", spec, plan, Weights(Path("random"), tensors))


def native(
    spec: ModelSpec,
    plan: PrecisionPlan,
    *,
    threads: int = 1,
    isa: str | None = None,
    weights: Mapping[str, Float32] | None = None,
) -> NativeBackend:
    program = program_of(spec, plan, weights)
    return NativeBackend(program, threads=threads, isa=isa or chosen_isa({}))


def reference(spec: ModelSpec, weights: Mapping[str, Float32] | None = None) -> ReferenceBackend:
    return ReferenceBackend(program_of(spec, FP32, weights))


def write_directory(spec: ModelSpec, directory: Path, seed: int = 7) -> ModelFiles:
    """A random model as a Hugging Face directory."""
    names = dict(OUTSIDE_LAYERS)
    for layer in range(spec.num_layers):
        for role, suffix in ROLES.items():
            names[f"layers.{layer}.{role}"] = f"model.layers.{layer}.{suffix}"
    weights = random_weights(spec, seed)
    directory.mkdir(parents=True, exist_ok=True)
    save_file({names[name]: w for name, w in weights.items()}, directory / "model.safetensors")
    config: dict[str, Any] = {
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rope_theta": spec.rope_theta,
        "rms_norm_eps": spec.rms_eps,
        "max_position_embeddings": spec.max_context,
        "tie_word_embeddings": spec.tied_embeddings,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")  # no text is tokenised
    return ModelFiles(directory.name, directory, "safetensors")
