"""Answers that go round in circles: the same n-gram accepted from drafts again and again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_NGRAM = 4
_TIMES = 4
# Accepted tokens in which the repetitions are looked for.
_WINDOW = 64


class RepetitionWatch:
    """Of one sequence. A model that repeats itself accepts any length of draft; that is its text's
    fault, and is not to take rows from others."""

    def __init__(self) -> None:
        self._accepted: deque[int] = deque(maxlen=_WINDOW)
        self.is_repeating = False

    def observe(self, accepted: Sequence[int]) -> bool:
        """Take in the accepted tokens of a draft; whether it has just begun to repeat itself."""
        if len(accepted) < _NGRAM:
            self.is_repeating = self.is_repeating and bool(accepted)
            return False
        self._accepted.extend(accepted)
        recent = list(self._accepted)
        last = recent[-_NGRAM:]
        times = sum(
            recent[i] == last[0] and recent[i : i + _NGRAM] == last
            for i in range(len(recent) - _NGRAM + 1)
        )
        was, self.is_repeating = self.is_repeating, times >= _TIMES
        return self.is_repeating and not was
