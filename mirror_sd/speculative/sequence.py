"""One running sequence: its tokens, its KV blocks, its drafts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mirror_sd.backends.protocol import Int32
from mirror_sd.memory.prefix_cache import PrefixChain
from mirror_sd.messages import SequenceUsage, Submit, TokenLogprob
from mirror_sd.speculative.head_state import HeadState
from mirror_sd.speculative.sampling import TokenChooser
from mirror_sd.speculative.sequence_drafts import SequenceDrafts


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is prompt + completion. The KV of `tokens[:computed]` is in the blocks of `table`;
    what lies beyond (rejected drafts) is overwritten before it is read. `is_long`: there is so much
    to read before its next token that it is read in segments."""

    submit: Submit
    chain: PrefixChain
    chooser: TokenChooser
    drafts: SequenceDrafts | None
    max_context: int
    tokens: list[int]
    arrival: int
    computed: int = 0
    table: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    head: HeadState | None = None
    is_long: bool = False
    rounds: int = 0
    _array: Int32 = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    _array_of: list[int] | None = None

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def priority(self) -> tuple[bool, int]:
        """Orders sequences: VIP first, then by arrival."""
        return (self.submit.tier != "vip", self.arrival)

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - len(self.submit.prompt)

    @property
    def pending(self) -> int:
        """Tokens whose KV is still to be computed; 1 when it decodes, more when it prefills."""
        return len(self.tokens) - self.computed

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return min(
            self.submit.params.max_tokens - self.completion_tokens,
            self.max_context - len(self.tokens),
        )

    def hint(self, index: int, tokens: tuple[int, ...]) -> None:
        """Draft from another answer as well: see `HintSource.extend`."""
        if self.drafts is not None:
            self.drafts.hint(index, tokens, self.max_context)

    def table_array(self) -> Int32:
        """`table` as the back end takes it, made anew only where it has grown or is another list.

        Blocks are only ever added to a table, so its length tells whether it has changed.
        """
        if self._array_of is not self.table or self._array.size != len(self.table):
            self._array = np.array(self.table, dtype=np.int32)
            self._array_of = self.table
        return self._array

    def usage(self) -> SequenceUsage:
        counts = {} if self.drafts is None else self.drafts.counts
        return SequenceUsage(
            prompt_tokens=len(self.submit.prompt),
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            drafted_tokens=sum(drafted for drafted, _ in counts.values()),
            accepted_tokens=sum(accepted for _, accepted in counts.values()),
            verify_rounds=self.rounds,
            draft_sources=dict(counts),
        )
