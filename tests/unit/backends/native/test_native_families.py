"""The native forward against transformers and the fp32 reference: families, sizes, options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mirror_sd.backends import registry
from mirror_sd.backends.protocol import Float32
from mirror_sd.errors import UnsupportedModel
from mirror_sd.uir.model_spec import ModelSpec, RopeScaling
from tests.unit.backends.native.batches import whole
from tests.unit.backends.native.models import (
    BF16,
    FP32,
    INT8,
    ODD,
    PLANS,
    native,
    random_weights,
    reference,
)

LENGTH = 600
IDS = np.random.default_rng(1).integers(0, 75, LENGTH).astype(np.int32)
# Root mean square of the error over that of the logits; measured: 1e-6, 0.012, 0.035.
BOUNDS = {"fp32": 1e-5, "bf16": 0.025, "int8": 0.07}


def error_of(got: Float32, expected: Float32) -> float:
    return float(np.sqrt(np.mean(np.square(got - expected)) / np.mean(np.square(expected))))


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LONG_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a window of less than a segment": ("MistralConfig", {"sliding_window": 24}),
    "a window of more than a segment": ("MistralConfig", {"sliding_window": 270}),
    "windows in some layers": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1},
    ),
    "llama3 rope": ("LlamaConfig", {"rope_parameters": LLAMA3, "num_key_value_heads": 1}),
    "qk norm": ("Qwen3Config", {"head_dim": 24}),
}


@pytest.mark.parametrize("case", LONG_CASES)
def test_fp32_logits_of_long_contexts_equal_those_of_transformers(
    tiny_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setenv("MIRROR_SD_CACHE", str(tmp_path))
    config, options = LONG_CASES[case]
    tiny = tiny_model(config, max_position_embeddings=1024, **options)
    backend = registry.create(
        "native", tiny.files, device="cpu", precision="fp32", threads=2, max_context=None
    )
    assert backend.capabilities.name == "native"
    expected = tiny.logits(IDS)
    assert np.abs(expected).max() > 3
    np.testing.assert_allclose(whole(backend, IDS), expected, atol=3e-4)


def heads(query: int, key_value: int, size: int) -> dict[str, int]:
    return {"num_heads": query, "num_kv_heads": key_value, "head_dim": size}


OPTIONS: dict[str, dict[str, Any]] = {
    "every option, odd sizes": {},
    "tied embeddings": {"tied_embeddings": True},
    "no biases": {"qkv_bias": False, "output_bias": False},
    "no qk norm": {"qk_norm": False},
    "full attention": {"windows": (None, None)},
    "a window of itself and its neighbour": {"windows": (2, 1)},
    "windows at the edge of a segment": {"windows": (256, 257)},
    "even sizes": {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128},
    "a group too many": {"vocab_size": 81, "hidden_size": 66, "intermediate_size": 33},
    "one KV head for 32 query heads": heads(32, 1, 8),
    "two KV heads for 22 query heads": heads(22, 2, 8),
    "a KV head for each query head": heads(3, 3, 16),
    "heads of two": heads(4, 2, 2),
    "heads of 64": heads(4, 2, 64),
    "heads of 80": heads(3, 1, 80),
    "heads of 130": heads(2, 1, 130),
    "heads of 512": heads(2, 1, 512),
    "linear rope": {"rope_scaling": RopeScaling("linear", factor=3.0)},
    "llama3 rope": {"rope_scaling": RopeScaling("llama3", factor=8.0, original_context=64)},
    "yarn rope, scaled attention": {
        "rope_scaling": RopeScaling("yarn", factor=4.0, original_context=64)
    },
    "rope by factors": {
        "rope_scaling": RopeScaling("factors", factors=tuple(1.0 + i / 4 for i in range(10)))
    },
}
EXPECTED: dict[str, Float32] = {}


def expected_of(name: str) -> Float32:
    if name not in EXPECTED:
        EXPECTED[name] = whole(reference(replace(ODD, **OPTIONS[name])), IDS)
    return EXPECTED[name]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", OPTIONS)
def test_logits_are_near_those_of_the_reference(name: str, precision: str) -> None:
    expected = expected_of(name)
    assert np.abs(expected).max() > 3
    spec = replace(ODD, **OPTIONS[name])
    got = whole(native(spec, PLANS[precision], threads=2), IDS)
    assert error_of(got, expected) < BOUNDS[precision]
    # The worst row too, and no row is one of another position.
    rows = np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert rows.max() < 6 * BOUNDS[precision]


@pytest.mark.parametrize("plan", [name for name in PLANS if name.startswith("int8")])
def test_int8_in_its_variants_is_near_the_reference(plan: str) -> None:
    expected = expected_of("every option, odd sizes")
    got = whole(native(ODD, PLANS[plan]), IDS)
    assert 1e-4 < error_of(got, expected) < BOUNDS["int8"]


def test_wide_inputs_are_more_exact() -> None:
    expected = expected_of("every option, odd sizes")
    errors = [
        error_of(whole(native(ODD, replace(PLANS[plan], kv="fp32")), IDS), expected)
        for plan in ("int8, all inputs wide", "int8")
    ]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("block_size", [1, 7, 16, 24, 32, 250])
@pytest.mark.parametrize("plan", [FP32, BF16], ids=["fp32", "bf16"])
def test_any_block_size_gives_the_same_logits(plan: Any, block_size: int) -> None:
    got = whole(native(ODD, plan, threads=2), IDS, block_size)
    expected = expected_of("every option, odd sizes")
    assert error_of(got, expected) < BOUNDS[plan.weights]


def changed(spec: ModelSpec, name: str) -> Float32:
    """Logits of a model in which one array of weights is another one of its kind."""
    weights = random_weights(spec)
    random = np.random.default_rng(9)
    if weights[name].ndim == 1:
        weights[name] = random.permutation(weights[name])
    else:
        weights[name] = weights[name][random.permutation(len(weights[name]))]
    return whole(reference(spec, weights), IDS[:60])


def test_the_bounds_would_show_one_wrong_array_of_weights() -> None:
    expected = whole(reference(ODD), IDS[:60])
    missed = {
        name: error
        for name in random_weights(ODD)
        if (error := error_of(changed(ODD, name), expected)) < 1.2 * BOUNDS["int8"]
    }
    # Keys share what their bias adds to a score, so that softmax hardly sees it; fp32 does.
    assert set(missed) <= {f"layers.{layer}.{n}_bias" for layer in (0, 1) for n in "qk"}
    assert not missed or min(missed.values()) > 10 * BOUNDS["fp32"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rope_theta": 20000.0},
        {"rms_eps": 0.3},
        {"windows": (None, 30)},
        {"rope_scaling": RopeScaling("linear", factor=2.0)},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_the_bounds_would_show_a_wrong_option(wrong: dict[str, Any]) -> None:
    expected = expected_of("every option, odd sizes")
    got = whole(native(replace(ODD, **wrong), INT8), IDS)
    assert error_of(got, expected) > 1.2 * BOUNDS["int8"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (heads(33, 1, 8), "33 query heads share a KV head; the native engine takes 32"),
        (heads(2, 1, 514), "heads of 514; the native engine takes 512"),
    ],
)
def test_a_model_beyond_the_limits_is_refused_in_one_sentence(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        native(replace(ODD, **options), FP32)
