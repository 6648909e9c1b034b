"""An answer that is being written, searched by those of the same tenant beside it."""

from __future__ import annotations

from collections.abc import Sequence

from mirror_sd.speculative.drafters.suffix_ring import LONGEST, Match

# Shorter matches in another answer say little.
_NGRAM = 4


class RunningText:
    """A growing text with an index of its 4-grams, the latest of each; about 300 bytes a token."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        # n-gram -> the place behind it, where a token follows.
        self._places: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            place = len(self._tokens)
            if place >= _NGRAM:
                self._places[tuple(self._tokens[place - _NGRAM :])] = place
            self._tokens.append(token)

    def find(self, tail: Sequence[int]) -> Match | None:
        """Where the last tokens of `tail` stand here; its last `LONGEST` tokens count."""
        place = self._places.get(tuple(tail[-_NGRAM:]))
        if place is None:
            return None
        length, most = _NGRAM, min(len(tail), LONGEST, place)
        while length < most and self._tokens[place - 1 - length] == tail[-1 - length]:
            length += 1
        return Match(place, length)

    def read(self, place: int, limit: int) -> list[int]:
        """At most `limit` tokens from `place` on."""
        return self._tokens[place : place + max(limit, 0)]
