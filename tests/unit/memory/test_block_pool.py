"""The block pool and the prefix cache."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mirror_sd.memory.block_pool import BlockPool, OutOfBlocks
from mirror_sd.memory.prefix_cache import PrefixCache


def test_released_block_is_reused():
    pool = BlockPool(1)
    block = pool.allocate()
    with pytest.raises(OutOfBlocks):
        pool.allocate()
    pool.release(block)
    assert pool.allocate() == block


def test_a_published_block_outlives_its_owner_until_room_is_needed():
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, b"x")
    pool.release(first)
    assert pool.find(b"x") == first and pool.free == 1
    pool.release(second)
    assert pool.allocate() == second  # a free one goes before a cached one
    assert pool.allocate() == first
    assert pool.find(b"x") is None


def test_the_oldest_cached_block_is_reclaimed_first():
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for index in (1, 0, 2):
        pool.publish(blocks[index], bytes([index]))
        pool.release(blocks[index])
    assert [pool.allocate() for _ in range(3)] == [blocks[1], blocks[0], blocks[2]]


def test_blocks_that_were_used_are_used_again_before_others():
    pool = BlockPool(8)
    first = [pool.allocate() for _ in range(3)]
    for block in first:
        pool.release(block)
    assert {pool.allocate() for _ in range(3)} == set(first)


def test_the_most_that_was_used_is_remembered():
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(3)]
    pool.publish(blocks[0], b"x")
    for block in blocks:
        pool.release(block)
    assert (pool.used, pool.high_water) == (0, 3)
    pool.retain(blocks[0])
    assert pool.high_water == 3


def test_no_more_blocks_than_the_limit_are_given():
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(3)]
    pool.limit = 2
    assert pool.free == 0
    with pytest.raises(OutOfBlocks, match="2 KV blocks"):
        pool.allocate()
    pool.release(blocks.pop())
    assert pool.free == 0
    pool.release(blocks.pop())
    assert pool.free == 1 and pool.allocate() is not None
    pool.limit = 4
    assert pool.free == 2


def test_forgotten_prefixes_are_told():
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for index in (1, 2):
        pool.publish(blocks[index], bytes([index]))
        pool.release(blocks[index])
    assert pool.forget_cached() == blocks[1:]
    assert pool.forget_cached() == [] and pool.find(bytes([1])) is None


@pytest.mark.parametrize("act", ["release", "retain", "publish"])
def test_misuse_of_a_free_block_is_an_error(act):
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="block 0"):
        getattr(pool, act)(0, *([b"k"] if act == "publish" else []))


def test_a_prefix_is_found_only_whole_block_by_whole_block_and_not_to_its_end():
    pool = BlockPool(8)
    cache = PrefixCache(pool, block_size=2, enabled=True)
    tokens = [1, 2, 3, 4, 5]
    table = [pool.allocate() for _ in range(3)]
    cache.publish(cache.chain("t"), tokens, table, before=0, now=5)
    assert cache.take(cache.chain("t"), [1, 2, 3, 4, 9]) == table[:2]
    assert cache.take(cache.chain("t"), [1, 2, 3, 4]) == table[:1]
    assert cache.take(cache.chain("t"), [1, 9, 3, 4, 5]) == []
    assert cache.take(cache.chain("other"), tokens) == []
    assert PrefixCache(pool, 2, enabled=False).take(cache.chain("t"), tokens) == []


class PoolMachine(RuleBasedStateMachine):
    """Random use by sequences that share published prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.tables: list[list[int]] = [[], [], []]
        self.keys = [bytes([k]) for k in range(4)]

    @rule(who=st.integers(0, 2))
    def grow(self, who: int) -> None:
        try:
            self.tables[who].append(self.pool.allocate())
        except OutOfBlocks:
            assert self.pool.free == 0
            assert self.pool.used == 6 or self.pool.used >= self.pool.limit

    @rule(who=st.integers(0, 2), key=st.integers(0, 3))
    def publish(self, who: int, key: int) -> None:
        if self.tables[who]:
            self.pool.publish(self.tables[who][-1], self.keys[key])

    @rule(who=st.integers(0, 2), key=st.integers(0, 3))
    def share(self, who: int, key: int) -> None:
        block = self.pool.find(self.keys[key])
        if block is not None:
            self.pool.retain(block)
            self.tables[who].append(block)

    @precondition(lambda self: any(self.tables))
    @rule(who=st.integers(0, 2))
    def finish(self, who: int) -> None:
        for block in self.tables[who]:
            self.pool.release(block)
        self.tables[who] = []

    @rule()
    def shed(self) -> None:
        self.pool.forget_cached()

    @rule(limit=st.integers(1, 6))
    def limit(self, limit: int) -> None:
        self.pool.limit = limit

    @invariant()
    def sound(self) -> None:
        self.pool.check_integrity(self.tables)
        assert self.pool.used <= self.pool.high_water


PoolMachine.TestCase.settings = settings(max_examples=60, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_the_integrity_check_notices_a_leak():
    pool = BlockPool(2)
    pool.allocate()
    with pytest.raises(RuntimeError, match="reference counts"):
        pool.check_integrity([])
