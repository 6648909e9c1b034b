"""A proposal on trial: compared with what the target says next, whether it was verified or not."""

from __future__ import annotations

from collections.abc import Sequence

from mirror_sd.speculative.acceptance import AcceptanceModel, Context, Record
from mirror_sd.speculative.length_bandit import Key


class Trial:
    """What a source would have been worth is learned at no cost. `contexts`: of each token, or one
    for all; `key`, `price`: as `LengthBandit` takes them; `asked`: the most tokens it could have
    proposed, of a head. `matched`: tokens that were the target's so far."""

    __slots__ = ("asked", "contexts", "is_over", "key", "matched", "price", "source", "tokens")

    def __init__(
        self,
        source: str,
        tokens: Sequence[int],
        contexts: Sequence[Context],
        key: Key,
        price: float,
    ) -> None:
        self.source = source
        self.tokens = tokens
        self.contexts = contexts
        self.key = key
        self.price = price
        self.asked = len(tokens)
        self.matched = 0
        self.is_over = False

    @property
    def proposed(self) -> int:
        return len(self.tokens)

    def observe(self, tokens: Sequence[int], model: AcceptanceModel, record: Record) -> None:
        """Take in the target's next tokens."""
        last = len(self.contexts) - 1
        for token in tokens:
            accepted = token == self.tokens[self.matched]
            model.observe(self.contexts[min(self.matched, last)], self.matched, accepted)
            record.observe(accepted)
            self.matched += accepted
            if not accepted or self.matched == len(self.tokens):
                self.is_over = True
                return
