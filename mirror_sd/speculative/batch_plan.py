"""What the running sequences contribute to one forward."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import numpy as np

from mirror_sd.backends.protocol import RaggedBatch
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
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    offsets = [0]
    for piece in plan:
        end = piece.start + piece.count
        tokens.extend(piece.sequence.tokens[piece.start : end])
        tokens.extend(piece.draft)
        positions.extend(range(piece.start, end + len(piece.draft)))
        rows.extend(range(len(tokens) - piece.rows, len(tokens)))
        offsets.append(len(tokens))
    return RaggedBatch(
        token_ids=np.array(tokens, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        sequence_offsets=np.array(offsets, dtype=np.int32),
        block_tables=tuple(piece.sequence.table_array() for piece in plan),
        logit_rows=np.array(rows, dtype=np.int32),
    )
