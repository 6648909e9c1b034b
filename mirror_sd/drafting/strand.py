"""One line of tokens that a drafter follows, with the KV blocks that hold it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mirror_sd.backends.protocol import Int32
from mirror_sd.memory.block_pool import BlockPool


@dataclass(slots=True, eq=False)
class Strand:
    """The KV of `tokens[:computed]` is in the blocks of `table`; that of the last token never is.

    `strengths`: how sure each token is, 0..7, and nothing of those that were committed. `times`:
    by position, when it was drafted, where that is recorded.
    """

    tokens: list[int]
    strengths: bytearray
    table: list[int] = field(default_factory=list)
    computed: int = 0
    times: dict[int, tuple[float, float]] = field(default_factory=dict)

    @property
    def pending(self) -> int:
        """Tokens whose KV is still to be computed, at least 1."""
        return len(self.tokens) - self.computed

    def append(self, token: int, strength: int) -> None:
        self.tokens.append(token)
        self.strengths.append(strength)

    def fork(self, at: int, token: int, pool: BlockPool, block_size: int) -> Strand:
        """A strand that has `token` at position `at`. It shares the full blocks before; what lies
        between them and `at` it computes again."""
        shared = min(at, self.computed) // block_size
        for block in self.table[:shared]:
            pool.retain(block)
        return Strand(
            tokens=[*self.tokens[:at], token],
            strengths=self.strengths[:at] + bytes(1),
            table=self.table[:shared],
            computed=shared * block_size,
            times={p: span for p, span in self.times.items() if p < at},
        )

    def agreement(self, begin: int, tokens: tuple[int, ...]) -> int:
        """Position up to which the strand has the same as `tokens`, which begin at `begin`."""
        for offset, token in enumerate(tokens):
            place = begin + offset
            if place >= len(self.tokens) or self.tokens[place] != token:
                return place
        return begin + len(tokens)

    def cut(self, length: int, pool: BlockPool, block_size: int) -> None:
        """Forget what lies beyond `length`."""
        del self.tokens[length:]
        del self.strengths[length:]
        self.computed = min(self.computed, length)
        needed = -(-length // block_size)
        for block in self.table[needed:]:
            pool.release(block)
        del self.table[needed:]
        for place in [p for p in self.times if p >= length]:
            del self.times[place]

    def release(self, pool: BlockPool) -> None:
        for block in self.table:
            pool.release(block)
        self.table = []
        self.computed = 0

    def table_array(self) -> Int32:
        return np.array(self.table, dtype=np.int32)
