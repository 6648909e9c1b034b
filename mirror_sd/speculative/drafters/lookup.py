"""Prompt lookup: what followed the last time these tokens were seen in this request.

Saxena, Prompt Lookup Decoding (2023); the longest matching n-gram wins, the most recent
occurrence of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from mirror_sd.speculative.drafters import DraftSource

# The least tokens that match for each strength above 0. Measured on support chat, the next token
# is right in 22, 54, 68, 79, 89, 94, 97 and 99 of 100.
_STEPS = (2, 3, 4, 6, 12, 20, 32)


class LookupSource:
    """An n-gram index of one growing sequence; O(n-gram sizes) per token and per proposal. Its
    strength grows with the tokens before the place found that are those written last."""

    name = "lookup"

    def __init__(self, tokens: Sequence[int], sizes: range) -> None:
        self._tokens: list[int] = []
        self._sizes = sizes
        # Where the last proposal begins, behind an n-gram that matched; 0 if there was none.
        self._found = 0
        # n-gram -> index just past its latest occurrence that has a continuation.
        self._after: dict[tuple[int, ...], int] = {}
        self.commit(tokens)

    def commit(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self._tokens)
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token)

    def propose(self, limit: int) -> list[int]:
        self._found = 0
        if limit <= 0:
            return []
        end = len(self._tokens)
        for size in reversed(self._sizes):
            if size > end:
                continue
            start = self._after.get(tuple(self._tokens[end - size :]))
            if start is not None:
                self._found = start
                return self._cycle(start, limit)
        return []

    def strength(self) -> int:
        tokens, end, start = self._tokens, len(self._tokens), self._found
        most, matched = min(start, _STEPS[-1]), 0
        while matched < most and tokens[start - 1 - matched] == tokens[end - 1 - matched]:
            matched += 1
        return bisect_right(_STEPS, matched)

    def strengths(self) -> list[int]:
        return [self.strength()]

    def _cycle(self, start: int, limit: int) -> list[int]:
        # A match that overlaps the end goes on with what it has just proposed: a loop repeats.
        period = len(self._tokens) - start
        return [self._tokens[start + i % period] for i in range(limit)]


class LookupDrafter:
    """Makes a `LookupSource` per sequence."""

    nbytes = 0

    def __init__(self, *, ngram_min: int, ngram_max: int) -> None:
        if not 1 <= ngram_min <= ngram_max:
            raise ValueError(f"n-gram sizes {ngram_min}..{ngram_max} are out of order")
        self._sizes = range(ngram_min, ngram_max + 1)

    def open(self, tokens: Sequence[int], *, tenant: str, prompt_length: int) -> LookupSource:
        return LookupSource(tokens, self._sizes)

    def close(
        self,
        source: DraftSource | None,
        tokens: Sequence[int],
        *,
        tenant: str,
        prompt_length: int,
    ) -> None:
        """Nothing of a sequence outlives it."""
