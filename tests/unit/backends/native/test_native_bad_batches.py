"""What the native engine refuses, and that no sequence harms another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mirror_sd import _native
from mirror_sd.backends.native.native_backend import NativeBackend
from mirror_sd.backends.protocol import Float32, RaggedBatch
from mirror_sd.uir.precision_plan import PrecisionPlan
from tests.unit.backends.native.batches import Run, advance, alone, ints
from tests.unit.backends.native.models import BF16, FP32, ODD, PLANS, native, random_weights

SPEC = replace(ODD, max_context=128, windows=(None, 30))
IDS = np.random.default_rng(4).integers(0, SPEC.vocab_size, 24).astype(np.int32)
TABLE = ints(2, 0, 5, 3)
BLOCKS, BLOCK = 6, 8

GOOD = RaggedBatch(
    token_ids=IDS[10:16],
    positions=ints(10, 11, 12, 0, 1, 2),
    sequence_offsets=ints(0, 3, 6),
    block_tables=(TABLE, ints(1)),
    logit_rows=ints(0, 2, 5),
)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "token beyond the vocabulary": ({"token_ids": ints(1, 2, 75, 4, 5, 6)}, "token id 75"),
    "negative token": ({"token_ids": ints(1, 2, 3, 4, 5, -1)}, "token id -1"),
    "a position too few": ({"positions": ints(10, 11, 12, 0, 1)}, "6 token ids with 5 positions"),
    "position beyond the context": (
        {"positions": ints(126, 127, 128, 0, 1, 2)},
        "position 128 is outside 0..127",
    ),
    "negative position": ({"positions": ints(10, 11, 12, -1, 0, 1)}, "position -1"),
    "a gap in the positions": ({"positions": ints(10, 12, 13, 0, 1, 2)}, "consecutive"),
    "positions backwards": ({"positions": ints(12, 11, 10, 0, 1, 2)}, "consecutive"),
    "offsets that miss a token": ({"sequence_offsets": ints(0, 3, 5)}, "offsets must run .* to 6"),
    "offsets beyond the tokens": ({"sequence_offsets": ints(0, 3, 7)}, "offsets must run .* to 6"),
    "offsets that do not begin at 0": (
        {"sequence_offsets": ints(1, 3, 6)},
        "offsets must run from 0",
    ),
    "an empty sequence": (
        {"sequence_offsets": ints(0, 3, 3, 6), "block_tables": (TABLE, TABLE, ints(1))},
        "every sequence must have a token",
    ),
    "offsets backwards": (
        {"sequence_offsets": ints(0, 3, 2, 6), "block_tables": (TABLE, TABLE, ints(1))},
        "every sequence must have a token",
    ),
    "an offset far outside": (
        {"sequence_offsets": ints(0, 2**31 - 1, 6)},
        "every sequence must have a token",
    ),
    "a negative offset": (
        {"sequence_offsets": ints(0, -(2**31), 6)},
        "every sequence must have a token",
    ),
    "a table too many": ({"block_tables": (TABLE, ints(1), ints(4))}, "3 offsets for 3 block"),
    "a table too few": ({"block_tables": (TABLE,)}, "3 offsets for 1 block"),
    "a short table": (
        {"block_tables": (ints(2), ints(1))},
        "block table 0 has 1 blocks, needs 2",
    ),
    "an empty table": (
        {"block_tables": (TABLE, ints())},
        "block table 1 has 0 blocks, needs 1",
    ),
    "a block beyond the cache": ({"block_tables": (TABLE, ints(6))}, "block of table 1 6"),
    "a negative block": ({"block_tables": (ints(0, -1), ints(1))}, "block of table 0 -1"),
    "a block that two sequences write": (
        {"block_tables": (TABLE, ints(0))},
        "block 0 would be written at two places",
    ),
    "a block that a sequence writes twice": (
        {
            "sequence_offsets": ints(0, 6),
            "positions": ints(5, 6, 7, 8, 9, 10),
            "block_tables": (ints(4, 4),),
        },
        "block 4 would be written at two places",
    ),
    "a row beyond the tokens": ({"logit_rows": ints(0, 6)}, "logit row 6 is outside 0..5"),
    "a negative row": ({"logit_rows": ints(-1, 2)}, "logit row -1"),
    "a row twice": ({"logit_rows": ints(2, 2)}, "logit rows must ascend"),
    "no token": (
        {
            "token_ids": ints(),
            "positions": ints(),
            "sequence_offsets": ints(0),
            "block_tables": (),
            "logit_rows": ints(),
        },
        "0 token ids",
    ),
    "no sequence": (
        {"sequence_offsets": ints(0), "block_tables": ()},
        "offsets must run from 0 to 6",
    ),
    "no offsets": ({"sequence_offsets": ints(), "block_tables": ()}, "0 offsets for 0"),
}


def started(plan: PrecisionPlan = FP32, threads: int = 2) -> tuple[NativeBackend, Run]:
    """A back end whose cache holds the first ten tokens of IDS."""
    backend = native(SPEC, plan, threads=threads)
    backend.allocate_kv(BLOCKS, BLOCK)
    run = Run(IDS, TABLE)
    advance(backend, [(run, 10)])
    return backend, run


@pytest.fixture(scope="module")
def expected() -> Float32:
    backend = native(SPEC, FP32)
    backend.allocate_kv(BLOCKS, BLOCK)
    return alone(backend, IDS, TABLE)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_is_named_and_changes_nothing(name: str, expected: Float32) -> None:
    backend, run = started()
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        backend.forward(replace(GOOD, **change))
    advance(backend, [(run, run.left)])
    assert np.array_equal(np.array(run.logits), expected)


def test_entries_beyond_what_a_table_needs_are_not_looked_at(expected: Float32) -> None:
    backend, run = started()
    run.table = ints(*TABLE, 99, -1)
    advance(backend, [(run, run.left)])
    assert np.array_equal(np.array(run.logits), expected)


FIELDS = ["token_ids", "positions", "sequence_offsets", "logit_rows", "block_tables"]
WRONG_KINDS: dict[str, Callable[[Any], Any]] = {
    "int64": lambda array: array.astype(np.int64),
    "float32": lambda array: array.astype(np.float32),
    "uint8": lambda array: array.astype(np.uint8),
    "bytes swapped": lambda array: array.astype(">i4"),
    "every other entry": lambda array: np.repeat(array, 2)[::2],
    "two dimensions": lambda array: array[None],
    "no dimension": lambda array: array[0],
    "a list": lambda array: array.tolist(),
    "nothing": lambda array: None,
}


@pytest.mark.parametrize("kind", WRONG_KINDS)
@pytest.mark.parametrize("field", FIELDS)
def test_an_array_of_another_kind_is_a_type_error(field: str, kind: str, expected: Float32) -> None:
    backend, run = started()
    change, value = WRONG_KINDS[kind], getattr(GOOD, field)
    changed = (change(value[0]), value[1]) if field == "block_tables" else change(value)
    with pytest.raises(TypeError):
        backend.forward(replace(GOOD, **{field: changed}))
    advance(backend, [(run, run.left)])
    assert np.array_equal(np.array(run.logits), expected)


def test_a_forward_before_the_cache_is_a_value_error() -> None:
    backend = native(SPEC, FP32)
    with pytest.raises(ValueError, match="allocate_kv must come before"):
        backend.forward(GOOD)


@pytest.mark.parametrize("blocks", [0, -1])
def test_a_cache_of_no_blocks_is_a_value_error(blocks: int) -> None:
    with pytest.raises(ValueError, match=f"cannot allocate {blocks} blocks"):
        native(SPEC, FP32).allocate_kv(blocks, 8)


@pytest.mark.parametrize("size", [0, -1, 2**16 + 1, 2**31 - 1])
def test_a_block_of_an_impossible_size_is_a_value_error(size: int) -> None:
    backend = native(SPEC, FP32)
    for call in (lambda: backend.allocate_kv(4, size), lambda: backend.kv_bytes_per_block(size)):
        with pytest.raises(ValueError, match=f"a block of {size} tokens"):
            call()


def test_a_cache_beyond_the_memory_is_a_memory_error_and_keeps_the_old_one(
    expected: Float32,
) -> None:
    backend, run = started()
    with pytest.raises(MemoryError):
        backend.allocate_kv(2**31 - 1, 2**16)
    advance(backend, [(run, run.left)])
    assert np.array_equal(np.array(run.logits), expected)


def test_logits_of_the_wrong_shape_are_refused() -> None:
    backend, _ = started()
    decoder = backend._decoder
    fields = (getattr(GOOD, name) for name in FIELDS)
    ids, positions, offsets, rows, tables = fields
    for logits in (np.zeros((2, 75), np.float32), np.zeros((3, 74), np.float32)):
        with pytest.raises(ValueError, match="logits has the wrong shape"):
            decoder.forward(ids, positions, offsets, tables, rows, logits)
    readonly = np.zeros((3, 75), np.float32)
    readonly.flags.writeable = False
    for wrong in (readonly, np.zeros((3, 75)), np.zeros((3, 150), np.float32)[:, ::2]):
        with pytest.raises(TypeError):
            decoder.forward(ids, positions, offsets, tables, rows, wrong)


def test_a_decoder_without_all_its_weights_does_not_run() -> None:
    decoder = _native.Decoder(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=8,
        max_context=8,
        rms_eps=1e-5,
        rope_scale=1.0,
        frequencies=np.ones(4, np.float32),
        windows=[0],
        cache="fp32",
        isa="portable",
        threads=1,
        cores=[],
    )
    data = np.zeros(_native.packed_bytes("fp32", 24, 8), np.uint8)
    with pytest.raises(ValueError, match="qkv are missing"):
        decoder.seal()
    for arguments, message in (
        (("qkv", 1, data, 24, 8, 1.0, "fp32"), "layer 1 is outside 0..0"),
        (("qkv", 0, data[:-1], 24, 8, 1.0, "fp32"), "8191 packed bytes, expected 8192"),
        (("qkv", 0, data, 24, 8, 1.0, "fp8"), "format 'fp8' is not one of"),
        (("kqv", 0, data, 24, 8, 1.0, "fp32"), "no matrix has the role 'kqv'"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.set_matrix(*arguments)
    with pytest.raises(ValueError, match="weights are not complete"):
        decoder.forward(ints(1), ints(0), ints(0, 1), (ints(0),), ints(0), np.zeros((1, 8), "f4"))


def test_a_weight_set_anew_is_checked_before_it_is_used() -> None:
    backend, _ = started()
    data = np.zeros(_native.packed_bytes("fp32", 500, SPEC.hidden_size), np.uint8)
    backend._decoder.set_matrix("head", -1, data, 500, SPEC.hidden_size, 1.0, "fp32")
    with pytest.raises(ValueError, match="weights are not complete"):
        backend.forward(GOOD)
    with pytest.raises(ValueError, match="head is 500 x 52, expected 75 x 52"):
        backend._decoder.seal()


POISONS = {"NaN": np.nan, "infinity": np.inf, "minus infinity": -np.inf}
POISONED = 3  # a token that is not among IDS


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_token_that_is_not_a_number_harms_only_what_comes_after_it(
    plan: str, poison: str
) -> None:
    weights = random_weights(SPEC)
    weights["embedding"][POISONED, 5] = POISONS[poison]
    good = np.where(IDS == POISONED, 4, IDS).astype(np.int32)
    bad = good.copy()
    bad[10] = POISONED
    backend = native(SPEC, PLANS[plan], threads=2, weights=weights)
    backend.allocate_kv(BLOCKS, BLOCK)
    clean = alone(backend, good, TABLE)
    assert np.isfinite(clean).all()

    backend.allocate_kv(BLOCKS, BLOCK)
    sick, healthy = Run(bad, ints(0, 1, 2)), Run(good, ints(3, 4, 5))
    for count in (7, 8, 9):  # the second batch has the token in a tile with those before it
        advance(backend, [(sick, count), (healthy, count)])
    assert np.array_equal(np.array(healthy.logits), clean)
    assert np.array_equal(np.array(sick.logits[:10]), clean[:10])
    assert np.isnan(np.array(sick.logits[10:])).all()

    # Its blocks are used again, a token at a time and in one forward.
    for chunk in (1, 3, len(good)):
        sick.done = 0
        advance(backend, [(sick, len(bad))])
        assert np.array_equal(alone(backend, good, sick.table, chunk), clean)


def test_values_beyond_bf16_are_kept_from_other_rows() -> None:
    """Finite in fp32, infinite in the cache."""
    weights = random_weights(SPEC)
    weights["layers.0.v_bias"][3] = 3.4e38
    backend = native(SPEC, BF16, weights=weights)
    backend.allocate_kv(BLOCKS, BLOCK)
    assert np.isnan(alone(backend, IDS, TABLE)).all()
