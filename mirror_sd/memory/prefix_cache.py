"""Finding the KV of an equal prefix: full blocks named by a hash chain over their tokens.

The key of a block covers all tokens before it and the tenant, so that one tenant cannot learn
from speed what another has asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from mirror_sd.memory.block_pool import BlockPool


class PrefixChain:
    """The block keys of one growing token sequence."""

    def __init__(self, tenant: str, block_size: int) -> None:
        self._block_size = block_size
        self._root = blake2b(tenant.encode(), digest_size=16).digest()
        self.keys: list[bytes] = []

    def extend(self, tokens: Sequence[int], upto: int) -> None:
        """Add the keys of all full blocks within the first `upto` of `tokens`."""
        size = self._block_size
        while (len(self.keys) + 1) * size <= upto:
            start = len(self.keys) * size
            parent = self.keys[-1] if self.keys else self._root
            content = np.asarray(tokens[start : start + size], dtype="<i4").tobytes()
            self.keys.append(blake2b(parent + content, digest_size=16).digest())


class PrefixCache:
    """Matches and publishes the full blocks of sequences in a pool. Disabled, it does nothing."""

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool) -> None:
        self._pool = pool
        self.block_size = block_size
        self.enabled = enabled

    def chain(self, tenant: str) -> PrefixChain:
        return PrefixChain(tenant, self.block_size)

    def take(self, chain: PrefixChain, tokens: Sequence[int]) -> list[int]:
        """Retain and return the longest run of published blocks that `tokens` begins with.

        At least the last token is left out: its logits must still be computed.
        """
        if not self.enabled:
            return []
        chain.extend(tokens, len(tokens) - 1)
        blocks: list[int] = []
        for key in chain.keys[: (len(tokens) - 1) // self.block_size]:
            block = self._pool.find(key)
            if block is None:
                break
            self._pool.retain(block)
            blocks.append(block)
        return blocks

    def give_up(self, blocks: Sequence[int]) -> None:
        """Release blocks that `take` has given, and forget them: they will be computed again."""
        for block in blocks:
            self._pool.unpublish(block)
            self._pool.release(block)

    def publish(
        self, chain: PrefixChain, tokens: Sequence[int], table: Sequence[int], before: int, now: int
    ) -> None:
        """Publish the blocks that became full when the computed length grew `before` -> `now`."""
        if not self.enabled or before // self.block_size == now // self.block_size:
            return
        chain.extend(tokens, now)
        for index in range(before // self.block_size, now // self.block_size):
            self._pool.publish(table[index], chain.keys[index])
