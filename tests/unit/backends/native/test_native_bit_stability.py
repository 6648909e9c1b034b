"""A row's logits are those of its sequence computed alone, token by token: the same bits."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mirror_sd import _native
from mirror_sd.backends.native.native_backend import NativeBackend
from mirror_sd.backends.protocol import Float32
from tests.unit.backends.native.batches import Ints, Run, advance, alone, batch_of
from tests.unit.backends.native.models import ODD, PLANS, native

BLOCK = 16
# Segments of attention hold 256 keys. A layer of ODD has a window of 300.
LENGTHS = (530, 290, 258, 120, 40, 9, 2)
BLOCKS = sum(-(-length // BLOCK) for length in LENGTHS) + 5
SEQUENCES = [
    np.random.default_rng(length).integers(0, ODD.vocab_size, length).astype(np.int32)
    for length in LENGTHS
]
ISAS = _native.available_isas()
COUNTS = st.sampled_from([1, 1, 1, 2, 3, 5, 7, 8, 9, 16, 33, 70, 300])


@functools.cache
def backend_of(isa: str, plan: str, threads: int) -> NativeBackend:
    backend = native(ODD, PLANS[plan], isa=isa, threads=threads)
    backend.allocate_kv(BLOCKS, BLOCK)
    return backend


@functools.cache
def expected_of(isa: str, plan: str) -> list[Float32]:
    """Each sequence alone, one token a forward, one thread, blocks in their order."""
    backend = backend_of(isa, plan, 1)
    table = np.arange(BLOCKS, dtype=np.int32)
    return [alone(backend, ids, table) for ids in SEQUENCES]


def tables_of(seed: int) -> list[Ints]:
    """A table for each sequence out of the shuffled blocks of the cache."""
    blocks = np.random.default_rng(seed).permutation(BLOCKS).astype(np.int32)
    ends = np.cumsum([-(-length // BLOCK) for length in LENGTHS])
    return np.split(blocks, ends)[: len(LENGTHS)]


@st.composite
def schedules(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Batches of (sequence, tokens), each sequence at most once in a batch, until all are done."""
    left = dict(enumerate(LENGTHS))
    steps = []
    while left:
        chosen = draw(st.permutations(sorted(left)))[: draw(st.integers(1, len(left)))]
        step = [(index, min(draw(COUNTS), left[index])) for index in chosen]
        # Enough steps are drawn by now; the rest in one batch.
        if len(steps) == 12:
            step = list(left.items())
        for index, count in step:
            left[index] -= count
            if not left[index]:
                del left[index]
        steps.append(step)
    return steps


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("isa", ISAS)
# Shrinking would take minutes for each of the parameters, and a schedule is readable as it is.
@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(schedule=schedules(), threads=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_random_batches_give_the_bits_of_each_sequence_alone(
    isa: str, plan: str, schedule: list[list[tuple[int, int]]], threads: int, seed: int
) -> None:
    expected = expected_of(isa, plan)
    backend = backend_of(isa, plan, threads)
    runs = [Run(ids, table) for ids, table in zip(SEQUENCES, tables_of(seed), strict=True)]
    for step in schedule:
        advance(backend, [(runs[index], count) for index, count in step])
    for run, logits in zip(runs, expected, strict=True):
        assert np.array_equal(np.array(run.logits), logits)


@pytest.mark.parametrize("plan", ["fp32", "bf16", "int8", "int8, all inputs wide"])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 39, 40])
def test_the_number_of_rows_does_not_matter(plan: str, rows: int) -> None:
    """The last `rows` tokens of a sequence as one verification, wherever tiles of 8 end."""
    backend = backend_of(ISAS[0], plan, 2)
    table = np.arange(BLOCKS, dtype=np.int32)[::-1].copy()
    run = Run(SEQUENCES[0], table)
    advance(backend, [(run, run.left - rows)])
    advance(backend, [(run, rows)])
    assert np.array_equal(np.array(run.logits), expected_of(ISAS[0], plan)[0])


@pytest.mark.parametrize("plan", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("isa", ISAS)
def test_a_context_split_over_threads_gives_the_bits_of_an_undivided_one(
    isa: str, plan: str
) -> None:
    """One row on four threads is split by segments; the same row among forty is not."""
    expected = expected_of(isa, plan)
    backend = backend_of(isa, plan, 4)
    tables = tables_of(5)
    long, crowd = Run(SEQUENCES[0], tables[0]), Run(SEQUENCES[1], tables[1])
    advance(backend, [(long, long.left - 1)])
    assert np.array_equal(long.logits[-1], expected[0][-2])
    advance(backend, [(long, 1)])
    assert np.array_equal(long.logits[-1], expected[0][-1])
    long.done -= 1
    advance(backend, [(crowd, crowd.left - 40)])
    advance(backend, [(crowd, 40), (long, 1)])
    assert np.array_equal(long.logits[-1], expected[0][-1])
    assert np.array_equal(np.array(crowd.logits), expected[1])


@pytest.mark.parametrize("plan", ["fp32", "bf16", "int8"])
def test_block_sizes_of_whole_chunks_give_the_same_bits(plan: str) -> None:
    expected = expected_of(ISAS[0], plan)[0]
    backend = native(ODD, PLANS[plan], threads=2)
    for block_size in (32, 48, 256):
        backend.allocate_kv(40, block_size)
        table = np.random.default_rng(block_size).permutation(40).astype(np.int32)
        assert np.array_equal(alone(backend, SEQUENCES[0], table, chunk=37), expected)


@pytest.mark.parametrize("block_size", [1, 7, 24])
def test_rows_do_not_depend_on_their_batch_in_odd_blocks(block_size: int) -> None:
    ids = SEQUENCES[2]
    blocks = -(-len(ids) // block_size)
    backend = native(ODD, PLANS["int8"], threads=2)
    backend.allocate_kv(blocks, block_size)
    table = np.random.default_rng(block_size).permutation(blocks).astype(np.int32)
    one_by_one = alone(backend, ids, table)
    for chunk in (5, 64, len(ids)):
        assert np.array_equal(alone(backend, ids, table, chunk), one_by_one)


def test_asking_for_fewer_rows_changes_none() -> None:
    expected = expected_of(ISAS[0], "int8")[0]
    backend = backend_of(ISAS[0], "int8", 2)
    run = Run(SEQUENCES[0], np.arange(BLOCKS, dtype=np.int32))
    for wanted in ([], [0], [3, 7, 99], [99]):
        rows = np.array(wanted, np.int32)
        got = backend.forward(batch_of([(run, 100)], rows))
        assert np.array_equal(got, expected[rows])


def test_computing_rejected_tokens_leaves_no_trace() -> None:
    """A draft is verified, rejected and overwritten."""
    expected = expected_of(ISAS[0], "int8")[0]
    backend = backend_of(ISAS[0], "int8", 2)
    ids = SEQUENCES[0]
    run = Run(ids, np.arange(BLOCKS, dtype=np.int32))
    wrong = Run((ids + 1) % ODD.vocab_size, run.table)
    for count in (250, 1, 8, 20):
        advance(backend, [(run, count)])
        wrong.done = run.done
        advance(backend, [(wrong, 9)])
    assert np.array_equal(np.array(run.logits), expected[: run.done])
