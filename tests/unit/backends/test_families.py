"""Every family and option, in each engine of ours, against transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mirror_sd.backends import registry
from tests.unit.speculative.choosers import needs_native

IDS = np.random.default_rng(1).integers(0, 160, 100)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama, tied, biases": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama, wide heads": ("LlamaConfig", {"head_dim": 24}),
    "llama, no shared heads": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama, llama3 rope": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama, yarn rope": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama, linear rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2, windows": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral, window": ("MistralConfig", {"sliding_window": 24}),
}


@pytest.mark.parametrize(
    "engine", [pytest.param("native", marks=needs_native), "torch", "reference"]
)
@pytest.mark.parametrize("case", CASES)
def test_fp32_logits_equal_those_of_transformers(
    tiny_model: Callable[..., Any],
    whole: Callable[..., np.ndarray],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    engine: str,
) -> None:
    monkeypatch.setenv("MIRROR_SD_CACHE", str(tmp_path))
    config, options = CASES[case]
    tiny = tiny_model(config, **options)
    backend = registry.create(
        engine, tiny.files, device="cpu", precision="fp32", threads=2, max_context=None
    )
    assert backend.capabilities.name == engine
    expected = tiny.logits(IDS)
    assert np.abs(expected).max() > 3  # else the tolerance would prove little
    np.testing.assert_allclose(whole(backend, IDS), expected, atol=2e-4)


@pytest.mark.parametrize("engine", [pytest.param("native", marks=needs_native), "torch"])
@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "mistral, window"])
def test_bf16_is_at_least_as_exact_as_that_of_transformers(
    tiny_model: Callable[..., Any],
    whole: Callable[..., np.ndarray],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    engine: str,
) -> None:
    monkeypatch.setenv("MIRROR_SD_CACHE", str(tmp_path))
    config, options = CASES[case]
    tiny = tiny_model(config, **options)
    backend = registry.create(
        engine, tiny.files, device="cpu", precision="bf16", threads=2, max_context=None
    )
    expected = tiny.logits(IDS)
    error = np.abs(whole(backend, IDS) - expected).mean()
    theirs = replace(tiny, model=copy.deepcopy(tiny.model).bfloat16())
    assert 0 < error < np.abs(theirs.logits(IDS) - expected).mean()
