"""Drafts from another answer that this one may resemble, to a similar request of the same tenant.

The other answer is followed position by position. Where the two part, the tokens written last are
looked for in it, and it is followed from there. Until the two have agreed for some tokens its
strength is low, so that the request's own text goes first: an order number that differs stands in
the prompt, not in the other answer (docs/decisions/0010-draft-hints.md has the figures).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence

# Of what was written last, as much as can be found again is what the two have in common.
_LONGEST = 4
_SHORTEST = 2
# The least tokens in a row on which the two have agreed, for each strength above 0. Measured on
# near-duplicates, the next token is right in 55, 74, 88, 89, 94, 96, 98 and 99 of 100.
_STEPS = (1, 3, 6, 12, 20, 32, 48)


class HintSource:
    """`completion` is what was generated so far; tokens of the other answer come by `extend`, which
    keeps at most `limit` of them. Its strength grows with the tokens in a row on which the two have
    agreed."""

    name = "hint"

    def __init__(self, completion: Sequence[int], limit: int) -> None:
        self._limit = limit
        self._recent = deque(completion[-_LONGEST:], maxlen=_LONGEST)
        # `_hint[i]` is token `_base + i` of the other answer; `_at` is the one that may come next.
        self._hint: list[int] = []
        self._base = 0
        self._at = len(completion)
        self._is_aligned = not completion
        self._agreed = 0
        # n-gram -> where it ends in the hint, ascending.
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, index: int, tokens: Sequence[int]) -> None:
        """Tokens `index .. index + len(tokens)` of the other answer. What is known already is
        skipped; after a gap only what follows it is kept."""
        if len(self._hint) >= self._limit:
            return
        end = self._base + len(self._hint)
        if not self._base <= index <= end:
            self._hint, self._ends = [], {}
            self._base = end = index
        for token in tokens[end - index :]:
            if len(self._hint) == self._limit:
                return
            self._hint.append(token)
            size = len(self._hint)
            for length in range(_SHORTEST, min(_LONGEST, size) + 1):
                self._ends.setdefault(tuple(self._hint[size - length :]), []).append(size)
        if not self._is_aligned:
            self._align()

    def propose(self, limit: int) -> list[int]:
        """What the other answer goes on with."""
        begin = self._at - self._base
        if not self._is_aligned or begin < 0 or limit <= 0:
            return []
        return self._hint[begin : begin + limit]

    def strength(self) -> int:
        return bisect_right(_STEPS, self._agreed)

    def strengths(self) -> list[int]:
        return [self.strength()]

    def commit(self, tokens: Sequence[int]) -> None:
        """The target's next tokens."""
        for token in tokens:
            place = self._at - self._base
            is_known = 0 <= place < len(self._hint)
            self._is_aligned = is_known and self._hint[place] == token
            self._agreed = self._agreed + 1 if self._is_aligned else 0
            self._at += 1
            self._recent.append(token)
        if not self._is_aligned:
            self._align()

    def _align(self) -> None:
        """Follow the hint from where its tokens are those written last, the longest match nearest
        to the place that was followed."""
        recent = tuple(self._recent)
        for length in range(min(_LONGEST, len(recent)), _SHORTEST - 1, -1):
            ends = self._ends.get(recent[-length:])
            if ends is not None:
                place = self._at - self._base
                after = bisect_left(ends, place)
                near = ends[max(after - 1, 0) : after + 1]
                self._at = self._base + min(near, key=lambda end: abs(end - place))
                self._is_aligned = True
                return
