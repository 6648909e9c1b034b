"""Hidden states that a draft drafts from: of the native back end, beside the reference's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from mirror_sd import _native
from mirror_sd.backends.native.native_backend import NativeBackend, chosen_isa
from mirror_sd.backends.protocol import Float32
from mirror_sd.model_store import ModelFiles
from mirror_sd.uir import program
from tests.unit.backends.native.batches import Run, alone, batch_of, ints, whole
from tests.unit.backends.native.models import FP32, INT8, ODD, native, reference

LICENSE = Path(__file__).parents[4] / "LICENSE"
IDS = np.random.default_rng(4).integers(0, ODD.vocab_size, 40).astype(np.int32)


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("taps", [(1,), (2,), (1, 2)])
def test_features_are_the_residual_stream_after_the_tapped_layers(
    isa: str, taps: tuple[int, ...]
) -> None:
    ours, truth = native(ODD, FP32, isa=isa, threads=2), reference(ODD)
    for backend in (ours, truth):
        backend.tap(taps)
        whole(backend, IDS)
    assert ours.features.shape == (len(IDS), len(taps) * ODD.hidden_size)
    assert np.abs(ours.features - truth.features).max() < 1e-4


def test_features_of_a_batch_have_the_bits_of_those_one_by_one() -> None:
    backend = native(ODD, INT8, threads=2)
    backend.allocate_kv(8, 16)
    backend.tap((1, 2))
    expected: list[Float32] = []
    for token in range(len(IDS)):
        run = Run(IDS, ints(0, 1, 2))
        run.done = token
        backend.forward(batch_of([(run, 1)]))
        expected.append(backend.features.copy())
    other, run = Run(IDS[::-1].copy(), ints(3, 4, 5)), Run(IDS, ints(0, 1, 2))
    backend.forward(batch_of([(other, 7), (run, len(IDS))], wanted=ints(46)))
    assert np.array_equal(backend.features[7:], np.concatenate(expected))


@pytest.mark.parametrize("plan", [FP32, INT8])
def test_logits_do_not_change_by_tapping(plan: Any) -> None:
    backend = native(ODD, plan, threads=2)
    backend.allocate_kv(4, 16)
    plain = alone(backend, IDS, ints(2, 0, 3), chunk=3)
    backend.tap((1, 2))
    tapped = alone(backend, IDS, ints(2, 0, 3), chunk=3)
    backend.tap(())
    assert np.array_equal(tapped, plain)
    assert np.array_equal(alone(backend, IDS, ints(2, 0, 3), chunk=3), plain)
    assert backend.features.size == 0


@pytest.mark.parametrize("layers", [(0,), (3,), (2, 1), (1, 1), (-1,)])
def test_layers_that_are_not_there_are_refused(layers: tuple[int, ...]) -> None:
    backend = native(ODD, FP32)
    backend.tap((2,))
    with pytest.raises(ValueError, match="ascend"):
        backend.tap(layers)
    whole(backend, IDS)
    assert backend.features.shape == (len(IDS), ODD.hidden_size)


@pytest.mark.parametrize(
    ("taps", "shape"),
    [
        ([3], (1, 52)),
        ([0], (1, 52)),
        ([2, 1], (1, 104)),
        ([1, 2], (1, 52)),
        ([1], (0, 52)),
        ([1], None),
        ([2**40], (1, 52)),
    ],
)
def test_the_decoder_refuses_taps_without_room_or_layer(
    taps: list[int], shape: tuple[int, int] | None
) -> None:
    decoder = native(ODD, FP32)._decoder
    decoder.allocate_kv(1, 16)
    logits = np.zeros((1, ODD.vocab_size), np.float32)
    features = None if shape is None else np.zeros(shape, np.float32)
    batch = ints(1), ints(0), ints(0, 1), (ints(0),), ints(0), logits
    with pytest.raises((ValueError, TypeError)):
        decoder.forward(*batch, taps, features)
    assert not logits.any()


@pytest.mark.parametrize(("plan", "most"), [(FP32, 2e-3), (INT8, 0.05)])
def test_features_of_the_default_model_equal_those_of_transformers(
    default_model: ModelFiles,
    transformers_model: Any,
    tokenizer: Tokenizer,
    plan: Any,
    most: float,
) -> None:
    """Relative to the state's norm, the mean over tokens; the last layer's before the norm."""
    ids = np.array(tokenizer.encode(LICENSE.read_text(encoding="utf-8")).ids[:200], np.int32)
    kept: list[torch.Tensor] = []
    layers = transformers_model.model.layers
    taps = (3, len(layers) // 2, len(layers))
    hooks = [
        layers[tap - 1].register_forward_hook(
            lambda _module, _input, output: kept.append(
                output[0] if isinstance(output, tuple) else output
            )
        )
        for tap in taps
    ]
    with torch.inference_mode():
        transformers_model(torch.from_numpy(ids.astype(np.int64))[None])
    for hook in hooks:
        hook.remove()
    backend = NativeBackend(program.load(default_model, plan), threads=2, isa=chosen_isa({}))
    backend.tap(taps)
    whole(backend, ids)
    for ours, theirs in zip(np.split(backend.features, 3, axis=1), kept, strict=True):
        truth = theirs.reshape(len(ids), -1).numpy()
        error = np.linalg.norm(ours - truth, axis=1) / np.linalg.norm(truth, axis=1)
        assert error.mean() < most
