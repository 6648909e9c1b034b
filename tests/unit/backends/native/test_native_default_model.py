"""The default model on the native engine against transformers, on real text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from mirror_sd.backends.native.native_backend import NativeBackend, chosen_isa
from mirror_sd.backends.protocol import Float32
from mirror_sd.model_store import ModelFiles
from mirror_sd.uir import program
from tests.unit.backends.native.batches import Ints, Run, advance, whole
from tests.unit.backends.native.models import PLANS

LICENSE = Path(__file__).parents[4] / "LICENSE"


@pytest.fixture(scope="module")
def backend_of(default_model: ModelFiles) -> Callable[[str], NativeBackend]:
    """Packed in memory: nobody needs 540 MB of fp32 weights in the cache."""

    def make(plan: str) -> NativeBackend:
        loaded = program.load(default_model, PLANS[plan])
        return NativeBackend(loaded, threads=2, isa=chosen_isa({}))

    return make


@pytest.fixture(scope="module")
def ids(tokenizer: Tokenizer) -> Ints:
    text = LICENSE.read_text(encoding="utf-8")
    return np.array(tokenizer.encode(text).ids[:400], np.int32)


@pytest.fixture(scope="module")
def expected(transformers_model: Any, ids: Ints) -> Float32:
    with torch.inference_mode():
        logits: Float32 = transformers_model(torch.from_numpy(ids)[None]).logits[0].numpy()
    return logits


def log_softmax(logits: Float32) -> Float32:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def test_fp32_logits_equal_those_of_transformers(
    backend_of: Callable[[str], NativeBackend], ids: Ints, expected: Float32
) -> None:
    assert np.abs(whole(backend_of("fp32"), ids) - expected).max() < 1e-3


# Measured: bf16 100 %, 3.5e-4; int8 98 %, 1.5e-3.
@pytest.mark.parametrize(
    ("plan", "least_agreement", "most_kl"), [("bf16", 0.985, 1e-3), ("int8", 0.96, 6e-3)]
)
def test_short_precisions_choose_the_same_tokens(
    backend_of: Callable[[str], NativeBackend],
    ids: Ints,
    expected: Float32,
    plan: str,
    least_agreement: float,
    most_kl: float,
) -> None:
    got = whole(backend_of(plan), ids)
    ours, theirs = log_softmax(got), log_softmax(expected)
    kl = (np.exp(theirs) * (theirs - ours)).sum(axis=1).mean()
    agreement = (got.argmax(axis=1) == expected.argmax(axis=1)).mean()
    assert agreement >= least_agreement
    assert kl < most_kl


def test_verified_drafts_have_the_bits_of_decoding(
    backend_of: Callable[[str], NativeBackend], ids: Ints
) -> None:
    """Eight rows at once, among those of another sequence, against one by one."""
    backend = backend_of("int8")
    backend.allocate_kv(40, 16)
    tables = np.random.default_rng(1).permutation(40).astype(np.int32)
    one, eight, other = (
        Run(ids, tables[:17]),
        Run(ids, tables[17:34]),
        Run(ids[::-1].copy(), tables[34:]),
    )
    for run in (one, eight):
        advance(backend, [(run, 240)])
    for _ in range(16):
        advance(backend, [(one, 1)])
    for _ in range(2):
        advance(backend, [(other, 3), (eight, 8)])
    assert np.array_equal(np.array(one.logits), np.array(eight.logits))
