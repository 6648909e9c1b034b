"""What the running sequences contribute to one forward."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mirror_sd.backends.protocol import Int32, RaggedBatch
from mirror_sd.speculative.sequence import Sequence


@dataclass(slots=True)
class Slice:
    """What one sequence contributes to a forward: its `count` tokens from position `start`, then
    `draft`, from `source`. `scores_all`: the logits of all its rows are wanted, not only those that
    choose a token."""

    sequence: Sequence
    start: int
    count: int
    scores_all: bool = False
    draft: list[int] = field(default_factory=list)
    source: str = ""

    @property
    def tokens(self) -> int:
        return self.count + len(self.draft)

    @property
    def reaches_end(self) -> bool:
        """True if the slice computes the last committed token, so that a next one is chosen."""
        return self.start + self.count == len(self.sequence.tokens)

    @property
    def is_decoding(self) -> bool:
        """Whether the slice can be drafted for."""
        return self.count == 1 and self.reaches_end

    @property
    def draft_limit(self) -> int:
        """Most tokens that may be drafted for it."""
        drafts = self.sequence.drafts
        return 0 if drafts is None else min(drafts.limit, self.sequence.room - 1)

    @property
    def has_head(self) -> bool:
        drafts = self.sequence.drafts
        return self.sequence.head is not None and drafts is not None and drafts.uses_head

    @property
    def rows(self) -> int:
        """Of logits, for the tokens at the end."""
        if self.scores_all:
            return self.tokens
        return 1 + len(self.draft) if self.reaches_end else 0


def ragged(plan: Ordered[Slice]) -> RaggedBatch:
    """The plan as the back end takes it."""
    return end_to_end(
        Part(
            [*piece.sequence.tokens[piece.start : piece.start + piece.count], *piece.draft],
            piece.start,
            piece.rows,
            piece.sequence.table_array(),
        )
        for piece in plan
    )


class Part(NamedTuple):
    """`tokens` of one sequence from position `start` on; the logits of the last `rows` of them are
    wanted. `table`: its blocks."""

    tokens: Ordered[int]
    start: int
    rows: int
    table: Int32


def end_to_end(parts: Iterable[Part]) -> RaggedBatch:
    """The batch of these parts, in their order."""
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    offsets = [0]
    tables: list[Int32] = []
    for part in parts:
        tokens.extend(part.tokens)
        positions.extend(range(part.start, part.start + len(part.tokens)))
        rows.extend(range(len(tokens) - part.rows, len(tokens)))
        offsets.append(len(tokens))
        tables.append(part.table)
    return RaggedBatch(
        token_ids=np.array(tokens, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        sequence_offsets=np.array(offsets, dtype=np.int32),
        block_tables=tuple(tables),
        logit_rows=np.array(rows, dtype=np.int32),
    )
