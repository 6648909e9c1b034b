"""A ModelSpec as the config.json of a Hugging Face directory: what `hf_model.read_spec` reads."""

from __future__ import annotations

from typing import Any

from mirror_sd.uir.model_spec import ModelSpec, RopeScaling

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """The object of config.json, without token ids."""
    config: dict[str, Any] = {
        "architectures": [_CLASSES[spec.family]],
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.rms_eps,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": spec.tied_embeddings,
    }
    if spec.family in ("llama", "qwen3"):
        config["attention_bias"] = spec.output_bias or spec.qkv_bias
    if any(window is not None for window in spec.windows):
        config |= _windows(spec)
    if spec.rope_scaling is not None:
        config["rope_scaling"] = _rope_scaling(spec.rope_scaling)
    return config


def _windows(spec: ModelSpec) -> dict[str, Any]:
    window = next(window for window in spec.windows if window is not None)
    kinds = ["full_attention" if w is None else "sliding_attention" for w in spec.windows]
    if spec.family == "mistral":
        return {"sliding_window": window}
    return {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}


def _rope_scaling(scaling: RopeScaling) -> dict[str, Any]:
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    if scaling.kind == "factors":
        return {"rope_type": "factors", "factors": list(scaling.factors)}
    values: dict[str, Any] = {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_context,
    }
    if scaling.kind == "llama3":
        return values | {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    values |= {
        "attention_factor": scaling.attention_factor,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "mscale": scaling.mscale,
        "mscale_all_dim": scaling.mscale_all_dim,
        "truncate": scaling.truncate,
    }
    return {key: value for key, value in values.items() if value is not None}
