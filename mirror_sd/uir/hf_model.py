"""A Hugging Face directory (config.json, *.safetensors) as a ModelSpec and weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mirror_sd.errors import ModelError, UnsupportedModel
from mirror_sd.uir import safetensors_file, stored_format
from mirror_sd.uir.model_spec import FAMILIES, Family, ModelSpec, RopeScaling
from mirror_sd.uir.weights import LazyTensor, Weights

ROLES = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
OUTSIDE_LAYERS = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
INDEX = "model.safetensors.index.json"
# `quantization_config.quant_method` of what `mirror-sd convert` writes.
OUR_METHOD = "mirror-sd"
# transformers' default where config.json is silent; its other defaults are the families' own.
DEFAULT_THETA = 10000.0
DEFAULT_HEAD_DIM: dict[Family, int] = {"qwen3": 128}


def read(directory: Path) -> tuple[ModelSpec, Weights]:
    """Open a directory. Raises `ModelError`, or `UnsupportedModel` for another model class."""
    spec = read_spec(directory)
    stored = _with_scales(directory, _stored_tensors(directory))
    names = stored_names(spec.num_layers)
    tensors = {name: stored[theirs] for name, theirs in names.items() if theirs in stored}
    return spec, Weights(directory, tensors)


def stored_names(num_layers: int) -> dict[str, str]:
    """Our name of every weight -> the name in such a directory; some a model does not have."""
    names = dict(OUTSIDE_LAYERS)
    for layer in range(num_layers):
        for role, suffix in ROLES.items():
            names[f"layers.{layer}.{role}"] = f"model.layers.{layer}.{suffix}"
    return names


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model; raises `ModelError` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def _stored_tensors(directory: Path) -> dict[str, LazyTensor]:
    files = sorted(directory.glob("*.safetensors"))
    if (directory / INDEX).is_file():
        shards = read_json(directory / INDEX).get("weight_map")
        if not isinstance(shards, dict):
            raise ModelError(f"{directory / INDEX} has no weight_map")
        files = [directory / Path(str(name)).name for name in sorted(set(shards.values()))]
    elif (directory / "model.safetensors").is_file():
        files = [directory / "model.safetensors"]
    if not files:
        raise ModelError(f"{directory} has no *.safetensors file")
    tensors: dict[str, LazyTensor] = {}
    for file in files:
        tensors |= safetensors_file.read(file)
    return tensors


def _with_scales(directory: Path, stored: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Codes and their scales as the matrix that they stand for."""
    coded = [name for name in stored if name.endswith(stored_format.CODES)]
    if not coded:
        return stored
    tensors = dict(stored)
    path = directory / "config.json"
    quantised = read_json(path).get("quantization_config") or {}
    form = stored_format.StoredFormat("int8", _group_size(path, quantised))
    for name in coded:
        base = name.removesuffix(stored_format.CODES)
        codes, scales = tensors.pop(name), tensors.pop(base + stored_format.SCALES, None)
        needed = form.parts(base, codes.shape)[1].shape if len(codes.shape) == 2 else None
        if scales is None or scales.shape != needed:
            raise ModelError(f"{directory}: the codes of {base} have no scales of shape {needed}")
        tensors[base] = LazyTensor(base, codes.shape, partial(_decoded, codes, scales, form.group))
    return tensors


def _group_size(path: Path, quantised: Mapping[str, Any]) -> int | None:
    if quantised.get("group_size") is None:
        return None
    size = number(path, quantised, "group_size")
    if size < 1:
        raise ModelError(f"{path}: group_size is {size}; it must be positive")
    return int(size)


def _decoded(codes: LazyTensor, scales: LazyTensor, group: int | None) -> stored_format.Float32:
    return stored_format.dequantise(codes.read(), scales.read(), group)


class _Config:
    """config.json with checked look-ups; a null counts as absent, as transformers treats it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values = read_json(path)

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> float:
        return number(self.path, self._values, key, default)

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))


def number(path: Path, values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number in `values`; raises `ModelError` naming the file and the key."""
    value = values.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"{path}: {key} is {value!r}, not a number")
    return value


def read_spec(directory: Path) -> ModelSpec:
    """The spec alone, from config.json. Raises as `read` does."""
    path = directory / "config.json"
    config = _Config(path)
    family = next((known for known in FAMILIES if known == config.get("model_type")), None)
    if family is None:
        raise UnsupportedModel(
            f"{path}: the model type {config.get('model_type')!r} is not supported"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"{path}: the activation {config.get('hidden_act')!r} is unknown")
    if config.get("mlp_bias"):
        raise UnsupportedModel(f"{path}: biases in the MLP are not supported")
    quantised = config.get("quantization_config")
    if quantised and not (
        isinstance(quantised, dict) and quantised.get("quant_method") == OUR_METHOD
    ):
        raise UnsupportedModel(f"{path}: quantised safetensors are not supported")
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    head_dim = DEFAULT_HEAD_DIM.get(family, hidden // max(heads, 1))
    max_context = config.integer("max_position_embeddings")
    rope = _rope(config)
    biased = bool(config.get("attention_bias", False))
    return ModelSpec(
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", head_dim),
        rope_theta=number(path, rope, "rope_theta", config.number("rope_theta", DEFAULT_THETA)),
        rms_eps=config.number("rms_norm_eps", 1e-6),
        max_context=max_context,
        windows=_windows(config, family),
        rope_scaling=_rope_scaling(path, rope, max_context),
        qkv_bias=family == "qwen2" or (family in ("llama", "qwen3") and biased),
        output_bias=family in ("llama", "qwen3") and biased,
        qk_norm=family == "qwen3",
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _windows(config: _Config, family: Family) -> tuple[int | None, ...]:
    layers = config.integer("num_hidden_layers")
    uses_windows = family == "mistral" or (
        family in ("qwen2", "qwen3") and config.get("use_sliding_window", False)
    )
    if not uses_windows or config.get("sliding_window") is None:
        return (None,) * layers
    window = config.integer("sliding_window")
    kinds = config.get("layer_types")
    if family == "mistral":
        return (window,) * layers
    if kinds is None:
        first = config.integer("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelError(f"{config.path}: layer_types does not list {layers} layers")
    if set(kinds) - {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(f"{config.path}: layer_types {sorted(set(kinds))} are not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(config: _Config) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"{config.path}: the rope parameters are not an object")
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedModel(f"{config.path}: rope parameters per layer are not supported")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel(f"{config.path}: partial rotary positions are not supported")
    return rope


def _rope_scaling(path: Path, rope: dict[str, Any], max_context: int) -> RopeScaling | None:
    def value(key: str, default: float | None = None) -> float:
        return number(path, rope, key, default)

    def optional(key: str) -> float | None:
        return None if rope.get(key) is None else value(key)

    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", factor=value("factor"))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=value("factor"),
            original_context=int(value("original_max_position_embeddings", max_context)),
            low_freq_factor=value("low_freq_factor"),
            high_freq_factor=value("high_freq_factor"),
        )
    if kind == "yarn":
        original = int(value("original_max_position_embeddings", max_context))
        return RopeScaling(
            "yarn",
            factor=value("factor", max_context / original),
            original_context=original,
            attention_factor=optional("attention_factor"),
            beta_fast=value("beta_fast", 32.0),
            beta_slow=value("beta_slow", 1.0),
            mscale=optional("mscale"),
            mscale_all_dim=optional("mscale_all_dim"),
            truncate=bool(rope.get("truncate", True)),
        )
    if kind == "factors":
        return RopeScaling("factors", factors=_factors(path, rope))
    raise UnsupportedModel(f"{path}: rope scaling {kind!r} is not supported")


def _factors(path: Path, rope: Mapping[str, Any]) -> tuple[float, ...]:
    """Ours, for a model that came from a GGUF, which stores divisors of frequencies."""
    factors = rope.get("factors")
    if not isinstance(factors, list) or not all(isinstance(f, int | float) for f in factors):
        raise ModelError(f"{path}: the rope's factors are not a list of numbers")
    return tuple(float(factor) for factor in factors)
