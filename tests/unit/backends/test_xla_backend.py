"""The XLA back end: right, compiled once, and the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mirror_sd.backends import registry
from mirror_sd.backends.protocol import RaggedBatch
from mirror_sd.backends.reference_backend import ReferenceBackend
from mirror_sd.backends.xla import buckets, executor, runtime
from mirror_sd.backends.xla.buckets import NARROW, WIDE, Bucket
from mirror_sd.errors import ConfigError
from mirror_sd.model_store import ModelFiles
from mirror_sd.uir import program
from mirror_sd.uir.precision_plan import PrecisionPlan
from tests.unit.backends import test_bit_stability as stability
from tests.unit.backends.test_torch_backend import BAD, GOOD, batch, ints

FEW = (Bucket(4, NARROW), Bucket(32, NARROW), Bucket(2 * WIDE, WIDE))
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "Qwen2Config": {},
    "Qwen3Config": {"head_dim": 24},
    "MistralConfig": {"sliding_window": 70, "num_attention_heads": 2},
}


@pytest.fixture(autouse=True)
def few_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second a bucket is too much for small models."""
    from mirror_sd.backends.xla import xla_backend

    monkeypatch.setattr(xla_backend, "BUCKETS", FEW)


def create(files: ModelFiles, precision: str = "fp32", **changes: Any) -> Any:
    settings = {"device": "cpu", "threads": 2, "max_context": None, **changes}
    return registry.create("xla", files, precision=precision, **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_right_and_stable_and_compiles_nothing_after_the_start(
    tiny_model: Callable[..., Any], family: str
) -> None:
    tiny = tiny_model(family, max_position_embeddings=512, **FAMILIES[family])
    backend = create(tiny.files)
    backend.allocate_kv(stability.BLOCKS, 5)
    before = backend.compilations
    assert before > 0
    assert backend.capabilities.bit_stable
    lengths = (300, 1, 90, 5, 140) if family == "MistralConfig" else (300, 40)
    prompts = [np.random.default_rng(n).integers(0, 160, n) for n in lengths]
    expected = [stability.alone(backend, ids, len(ids), 5) for ids in prompts]
    for ids, logits in zip(prompts, expected, strict=True):
        assert np.abs(logits - tiny.logits(ids)).max() < 1e-3
    for got, logits in zip(stability.shuffled(backend, prompts, 1, 5), expected, strict=True):
        assert np.array_equal(got, logits)
    assert backend.compilations == before


def test_bf16_is_near_fp32_and_stable(tiny_model: Callable[..., Any]) -> None:
    tiny = tiny_model("LlamaConfig", max_position_embeddings=512)
    ids = np.random.default_rng(1).integers(0, 160, 200)
    truth, backend = tiny.logits(ids), create(tiny.files, "bf16")
    backend.allocate_kv(stability.BLOCKS, 16)
    assert backend.capabilities.bit_stable
    whole = stability.alone(backend, ids, 200, 16)
    assert (whole - truth).std() < 0.05 * truth.std()
    [shuffled] = stability.shuffled(backend, [ids], 1, 16)
    assert np.array_equal(shuffled, whole)
    # 3 layers, keys and values, 2 heads of 16, 2 bytes
    assert backend.kv_bytes_per_block(16) == 3 * 2 * 2 * 16 * 2 * 16


def test_spans_of_other_devices_are_computed_in_groups(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "GROUPS", {"cpu": 8})
    tiny = tiny_model("LlamaConfig", max_position_embeddings=512)
    backend = create(tiny.files)
    backend.allocate_kv(stability.BLOCKS, 16)
    prompts = [np.random.default_rng(n).integers(0, 160, n) for n in (200, *range(1, 12))]
    for ids, got in zip(prompts, stability.shuffled(backend, prompts, 1, 16), strict=True):
        assert np.abs(got - tiny.logits(ids)).max() < 1e-3


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[..., Any]) -> tuple[Any, Any]:
    """A small model, and its back end with 4 blocks of 16."""
    from mirror_sd.backends.xla.xla_backend import XlaBackend

    tiny = tiny_model("LlamaConfig")
    lowered = program.load(tiny.files, PrecisionPlan.of("fp32"))
    backend = XlaBackend(lowered, runtime.open_device("cpu", 2), "fp32", FEW)
    with pytest.raises(ValueError, match="allocate_kv"):
        backend.forward(GOOD)
    with pytest.raises(ValueError, match="cannot allocate"):
        backend.allocate_kv(0, 4)
    backend.allocate_kv(4, 4)
    return tiny, backend


def test_features_are_the_residual_stream_after_the_tapped_layers(llama: tuple[Any, Any]) -> None:
    tiny, backend = llama
    ids = np.random.default_rng(4).integers(0, 160, 16).astype(np.int32)
    truth = ReferenceBackend(program.load(tiny.files, PrecisionPlan.of("fp32")))
    truth.allocate_kv(4, 4)
    before, whole = backend.compilations, batch(ids, 0, [3, 0, 1, 2])
    plain = backend.forward(whole)
    for each in (truth, backend):
        each.tap((1, 3))
        tapped = each.forward(whole)
    assert np.array_equal(tapped, plain)
    assert backend.features.shape == (16, 2 * 64)
    assert np.abs(backend.features - truth.features).max() < 1e-4 * np.abs(truth.features).max()
    with pytest.raises(ValueError, match="ascend"):
        backend.tap((2, 1))
    backend.tap(())
    assert np.array_equal(backend.forward(whole), plain)
    assert backend.features.size == 0
    assert backend.compilations == before


def test_a_bad_batch_is_refused_and_the_next_one_works(llama: tuple[Any, Any]) -> None:
    tiny, backend = llama
    backend.forward(batch(ints(4, 5, 6), 0, [0]))
    for change, message in BAD.values():
        with pytest.raises(ValueError, match=message):
            backend.forward(replace(GOOD, **change))
    expected = tiny.logits(np.array([4, 5, 6, 1, 2, 3]))[3:]
    np.testing.assert_allclose(backend.forward(GOOD), expected, atol=2e-4)
    only_writes = replace(batch(ints(7, 8), 6, [0, 1]), logit_rows=ints())
    assert backend.forward(only_writes).shape == (0, 160)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "int8"}, "the xla engine has fp32 and bf16"),
        ({"kv": "int8"}, "KV cache of int8 needs the native engine"),
        ({"device": "tpu"}, "JAX cannot use the device 'tpu'"),
        ({"device": "cpu:77"}, "JAX cannot use the device 'cpu:77'"),
        ({"device": "abacus"}, "device is auto, cpu, tpu or cuda, not 'abacus'"),
    ],
)
def test_a_bad_setting_is_named(
    tiny_model: Callable[..., Any], changes: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        create(tiny_model("LlamaConfig").files, **changes)


def ragged(*lengths: int) -> RaggedBatch:
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    return RaggedBatch(
        token_ids=np.zeros(offsets[-1], np.int32),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        sequence_offsets=offsets,
        block_tables=tuple(np.arange(99, dtype=np.int32) for _ in lengths),
        logit_rows=offsets[1:] - 1,
    )


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((1,), [Bucket(4, NARROW)]),
        ((5,), [Bucket(8, NARROW)]),
        ((9,), [Bucket(16, NARROW)]),
        ((5, 1, 1), [Bucket(8, NARROW)]),
        ((5, 5, 5, 5), [Bucket(32, NARROW)]),
        ((1,) * 65, [Bucket(64, NARROW), Bucket(4, NARROW)]),
        ((70, 1), [Bucket(WIDE, WIDE), Bucket(8, NARROW)]),
        ((256, 3), [Bucket(4 * WIDE, WIDE), Bucket(4, NARROW)]),
    ],
)
def test_a_batch_takes_the_smallest_buckets(
    lengths: tuple[int, ...], expected: list[Bucket]
) -> None:
    assert [call.bucket for call in buckets.cut(ragged(*lengths))] == expected


def test_every_token_is_in_one_call_after_those_before_it_in_its_sequence() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        made = ragged(*random.integers(1, random.choice([3, 20, 300]), random.integers(1, 70)))
        seen: list[int] = []
        for call in buckets.cut(made):
            assert len(call.spans) <= call.bucket.spans
            assert len(call.tokens) <= call.bucket.rows
            assert all(0 < s.end - s.begin <= call.bucket.queries for s in call.spans)
            seen.extend(call.tokens.tolist())
        assert sorted(seen) == list(range(len(made.token_ids)))
        order = np.argsort(seen)
        for begin, end in zip(made.sequence_offsets, made.sequence_offsets[1:], strict=False):
            assert (np.diff(order[begin:end]) > 0).all()
