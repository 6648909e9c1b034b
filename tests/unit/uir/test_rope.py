"""Rotary frequencies against transformers' own functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mirror_sd.uir.model_spec import ModelSpec, RopeScaling
from mirror_sd.uir.rope import inverse_frequencies

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: list[tuple[RopeScaling | None, dict[str, Any]]] = [
    (None, {}),
    (RopeScaling("linear", factor=3.0), {"rope_type": "linear", "factor": 3.0}),
    (
        RopeScaling("llama3", factor=8.0, original_context=512, **LLAMA3),
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512, **LLAMA3},
    ),
    (
        RopeScaling("yarn", factor=4.0, original_context=512),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    ),
    (
        RopeScaling("yarn", factor=4.0, original_context=512, mscale=1.0, mscale_all_dim=0.7),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    ),
]


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize(("scaling", "parameters"), CASES)
def test_frequencies_equal_those_of_transformers(
    scaling: RopeScaling | None, parameters: dict[str, Any], theta: float
) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    spec = ModelSpec(
        family="llama",
        vocab_size=8,
        hidden_size=128,
        intermediate_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        rope_theta=theta,
        rms_eps=1e-5,
        max_context=2048,
        windows=(None,),
        rope_scaling=scaling,
    )
    parameters = {"rope_type": "default", "rope_theta": theta, **parameters}
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=2048,
        rope_parameters=parameters,
    )
    theirs = LlamaRotaryEmbedding(config)
    frequencies, factor = inverse_frequencies(spec)
    np.testing.assert_allclose(frequencies, theirs.inv_freq.numpy(), rtol=3e-7)
    assert factor == pytest.approx(theirs.attention_scaling)
