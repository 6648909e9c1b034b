"""An int8 head's best logits are computed again with 16-bit activations, strip by strip."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from mirror_sd import _native
from mirror_sd.backends.protocol import Float32
from tests.unit.backends.native.batches import Ints, alone, whole
from tests.unit.backends.native.models import INT8, ODD, native, random_weights

NATS, STRIP = 5.0, 16  # of src/decoder.cpp and src/kernels.h
# Twenty-one strips, the last of 11 outputs.
SPEC = replace(ODD, vocab_size=331)
WIDE = replace(INT8, wide=frozenset({"head"}))
IDS = np.random.default_rng(1).integers(0, SPEC.vocab_size, 50).astype(np.int32)
ISAS = _native.available_isas()
Weights = dict[str, Float32]
Flags = NDArray[np.bool_]


def spread_weights() -> Weights:
    """Logits of a row are tens apart, so that some of its strips are refined and others are not."""
    weights = random_weights(SPEC)
    weights["head"] *= 4
    return weights


def below_a_dominant_strip(weights: Weights, isa: str, ids: Ints = IDS) -> Float32:
    """Logits with 8-bit activations: a strip put before all others is so far above them that it
    alone is refined."""
    direction = np.random.default_rng(2).normal(0, 300, SPEC.hidden_size)
    dominant = np.outer(np.resize([1, -1], STRIP), direction).astype(np.float32)
    more = weights | {
        "head": np.concatenate([dominant, weights["head"]]),
        "embedding": np.concatenate([dominant, weights["embedding"]]),
    }
    spec = replace(SPEC, vocab_size=SPEC.vocab_size + STRIP)
    logits = whole(native(spec, INT8, isa=isa, weights=more), (ids + STRIP).astype(np.int32))
    # Numbers compare; a row of NaN has nothing to refine.
    assert not np.any(np.nanmax(logits[:, STRIP:]) > np.nanmin(logits[:, :STRIP].max(1)) - NATS)
    return logits[:, STRIP:]


def strips(logits: Float32) -> Float32:
    """[rows, strips, 16], the last strip filled up."""
    missing = -logits.shape[1] % STRIP
    filled = np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf)
    return filled.reshape(len(logits), -1, STRIP)


def check(weights: Weights, isa: str, threads: int = 1) -> Flags:
    """Compares each logit with the one it must be. Returns which are refined, [rows, strips]."""
    narrow = below_a_dominant_strip(weights, isa)
    wide = whole(native(SPEC, WIDE, isa=isa, weights=weights), IDS)
    got = whole(native(SPEC, INT8, isa=isa, weights=weights, threads=threads), IDS)
    largest = np.fmax.reduce(strips(narrow), axis=2)
    refined: Flags = largest >= largest.max(1, keepdims=True) - np.float32(NATS)
    expected = np.where(refined[:, :, None], strips(wide), strips(narrow))
    assert np.array_equal(strips(got), expected, equal_nan=True)
    # The two differ nearly everywhere, or nothing was tested.
    assert np.mean(narrow != wide) > 0.9
    return refined


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("isa", ISAS)
def test_strips_with_a_logit_near_the_best_are_refined_and_no_others(
    isa: str, threads: int
) -> None:
    refined = check(spread_weights(), isa, threads)
    assert 0.05 < refined.mean() < 0.95


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 50])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_row_is_refined_alike_in_every_batch(threads: int, rows: int) -> None:
    weights, table = spread_weights(), np.arange(4, dtype=np.int32)
    expected = whole(native(SPEC, INT8, weights=weights), IDS)
    backend = native(SPEC, INT8, weights=weights, threads=threads)
    backend.allocate_kv(4, 16)
    assert np.array_equal(alone(backend, IDS, table, chunk=rows), expected)


@pytest.mark.parametrize("isa", ISAS)
def test_the_last_strip_s_padding_does_not_count_as_logits_of_zero(isa: str) -> None:
    weights = spread_weights()
    # The residual stream is the embedding, and every logit about -50.
    for name in weights:
        if name.endswith((".o", ".o_bias", ".down")):
            weights[name][:] = 0
    weights["embedding"] = np.abs(weights["embedding"])
    weights["final_norm"] = np.abs(weights["final_norm"])
    weights["head"] = -np.abs(weights["head"]) - np.float32(1)
    refined = check(weights, isa)
    assert whole(native(SPEC, INT8, isa=isa, weights=weights), IDS).max() < -NATS
    assert refined.any(1).all()


def test_all_strips_of_a_row_of_equal_logits_are_refined() -> None:
    weights = spread_weights()
    weights["head"][:] = weights["head"][0]
    refined = check(weights, ISAS[0], threads=2)
    assert refined.all()


@pytest.mark.parametrize("isa", ISAS)
def test_one_output_s_nan_does_not_hide_the_best_of_its_strip(isa: str) -> None:
    weights = spread_weights()
    weights["head"][[5, 40, 330], 7] = np.nan
    refined = check(weights, isa)
    assert refined[:, [0, 2, 20]].any(0).all()
    logits = whole(native(SPEC, INT8, isa=isa, weights=weights), IDS)
    assert np.flatnonzero(np.isnan(logits).any(0)).tolist() == [5, 40, 330]


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_of_nan_stays_one_and_leaves_the_others_alone(isa: str) -> None:
    weights = spread_weights()
    # The last token is seen by no other row.
    wrong = weights | {"embedding": weights["embedding"].copy()}
    wrong["embedding"][330, 3] = np.nan
    ids = np.append(IDS[IDS != 330], 330).astype(np.int32)
    expected = whole(native(SPEC, INT8, isa=isa, weights=weights), ids)
    got = whole(native(SPEC, INT8, isa=isa, weights=wrong, threads=2), ids)
    assert np.array_equal(got[:-1], expected[:-1])
    assert np.isnan(got[-1]).all()


def test_a_plan_says_how_its_head_multiplies() -> None:
    assert INT8.product("head") == "int8"
    assert "head int8 with the best in 16 bits" in INT8.describe()
    assert WIDE.product("head") == "int16"
    assert "16 bits" not in WIDE.describe()
