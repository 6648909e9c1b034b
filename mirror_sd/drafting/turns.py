"""What the strands of a drafter compute in one forward, and how much of it each may."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from mirror_sd.backends.protocol import RaggedBatch
from mirror_sd.drafting.session import DraftSession
from mirror_sd.drafting.strand import Strand
from mirror_sd.speculative.batch_plan import Part, end_to_end

# Rows that cost about as much as one, on the CPU's kernels.
CHEAP_ROWS = 8


@dataclass(slots=True)
class Turn:
    """The next `count` tokens of a strand in a forward."""

    key: Hashable
    session: DraftSession
    strand: Strand
    count: int

    @property
    def reaches_end(self) -> bool:
        """Whether a next token is chosen."""
        return self.count == self.strand.pending

    def covered(self, block_size: int) -> bool:
        """Whether the strand has blocks for them."""
        return len(self.strand.table) * block_size >= self.strand.computed + self.count


def shares(pending: Sequence[int], budget: int) -> list[int]:
    """How many of its tokens each strand computes, in the order in which they were opened. Few
    tokens never wait. Of `budget` for all others half is kept for the first of them, so that none
    waits for ever; the rest goes to the shortest, which would else wait for the longest."""
    found = [count if count <= CHEAP_ROWS else 0 for count in pending]
    prompts = [index for index, count in enumerate(pending) if count > CHEAP_ROWS]
    kept = [(index, budget // 2) for index in prompts[:1]]
    rest = [(index, budget) for index in sorted(prompts, key=pending.__getitem__)]
    for index, most in (*kept, *rest):
        more = min(pending[index] - found[index], most, budget)
        found[index] += more
        budget -= more
    return found


def ragged(turns: Sequence[Turn]) -> RaggedBatch:
    """The turns as the back end takes them; a row of logits for each that reaches its end."""
    return end_to_end(
        Part(
            turn.strand.tokens[turn.strand.computed : turn.strand.computed + turn.count],
            turn.strand.computed,
            int(turn.reaches_end),
            turn.strand.table_array(),
        )
        for turn in turns
    )
