"""A pool of KV blocks with reference counts and least-recently-used reuse.

A block is in one of three states:

    free        holds nothing
    used        referenced by one or more sequences
    cached      referenced by nobody, but its content is published under a key and may be
                found again; it counts as free and is reclaimed, oldest first, when no free
                block is left

The block-manager shape is nano-vllm's, the published-block idea vLLM's automatic prefix caching.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable


class OutOfBlocks(Exception):
    """No block is free or reclaimable. The caller preempts a sequence or waits."""


class BlockPool:
    """Blocks `0 .. num_blocks - 1`. Not thread-safe: one engine owns it.

    `limit`: most blocks that `allocate` lets be used, all at first; it may be set below what is
    used. `high_water`: most that were used at once.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; at least 1 is needed")
        self.num_blocks = num_blocks
        # The last one freed comes first: its memory is there, others may never have been touched.
        self._free: list[int] = list(reversed(range(num_blocks)))
        self.limit = num_blocks
        self.high_water = 0
        self._references: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks that `allocate` can still hand out."""
        there = len(self._free) + len(self._cached)
        return max(min(there, self.limit - len(self._references)), 0)

    @property
    def used(self) -> int:
        """Blocks referenced by at least one sequence."""
        return len(self._references)

    def allocate(self) -> int:
        """A block with one reference and no key; raises `OutOfBlocks`."""
        if len(self._references) >= self.limit:
            raise OutOfBlocks(f"{self.limit} KV blocks are in use, and there may be no more now")
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        else:
            raise OutOfBlocks(f"all {self.num_blocks} KV blocks are in use")
        self._reference(block)
        return block

    def retain(self, block: int) -> None:
        """Add a reference to a used or cached block."""
        if block in self._references:
            self._references[block] += 1
        elif block in self._cached:
            del self._cached[block]
            self._reference(block)
        else:
            raise ValueError(f"block {block} is free and cannot be retained")

    def _reference(self, block: int) -> None:
        self._references[block] = 1
        self.high_water = max(self.high_water, len(self._references))

    def release(self, block: int) -> None:
        """Drop a reference; the last one makes the block cached if it is published, else free."""
        count = self._references.get(block)
        if count is None:
            raise ValueError(f"block {block} is released more often than it was taken")
        if count > 1:
            self._references[block] = count - 1
            return
        del self._references[block]
        if block in self._key_of:
            self._cached[block] = None
        else:
            self._free.append(block)

    def publish(self, block: int, key: bytes) -> None:
        """Make a used block findable under `key`; the first block of a key stays."""
        if block not in self._references:
            raise ValueError(f"block {block} is not in use and cannot be published")
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def unpublish(self, block: int) -> None:
        """Let nobody find a used block any more; another may then be published in its place."""
        if block not in self._references:
            raise ValueError(f"block {block} is not in use")
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]

    def find(self, key: bytes) -> int | None:
        """The block published under `key`, not yet retained."""
        return self._block_of.get(key)

    def forget_cached(self) -> list[int]:
        """Turn all cached blocks into free ones; which they were."""
        blocks = list(self._cached)
        for block in blocks:
            del self._block_of[self._key_of.pop(block)]
        self._free.extend(blocks)
        self._cached.clear()
        return blocks

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise `RuntimeError` unless `tables`, all block tables in existence, account for every
        reference and every block is in exactly one state."""
        held = Counter(block for table in tables for block in table)
        if held != Counter(self._references):
            wrong = {
                b
                for b in held.keys() | self._references.keys()
                if held.get(b, 0) != self._references.get(b, 0)
            }
            raise RuntimeError(f"blocks with wrong reference counts: {sorted(wrong)[:10]}")
        states = [*self._free, *self._cached, *self._references]
        if len(states) != self.num_blocks or set(states) != set(range(self.num_blocks)):
            raise RuntimeError("a KV block is lost or in two states")
        if {self._key_of[b] for b in self._key_of} != self._block_of.keys():
            raise RuntimeError("keys and blocks disagree")
        if not self._cached.keys() <= self._key_of.keys():
            raise RuntimeError("a cached block has no key")
