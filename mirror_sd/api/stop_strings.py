"""Finds stop strings in a stream of text, holding back no more than it must.

Every stop string is followed by its own automaton (Knuth, Morris and Pratt, 1977): its state is the
length of the longest prefix of the stop that the text so far ends with. The text held back is
the longest of those prefixes, all proper; any other text can no longer be part of a stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """The stop strings of one sequence, fed with its text in pieces of any size."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self.is_stopped = False

    def feed(self, piece: str) -> str:
        """The text that may be delivered now.

        Sets `is_stopped` at the first character that completes a stop; the text before that stop
        (before the longest, where several end together) is the last to be delivered.
        """
        if not self._automata or not piece:
            return piece
        text = self._held + piece
        for index, character in enumerate(piece, start=len(self._held)):
            found = max(automaton.advance(character) for automaton in self._automata)
            if found:
                self.is_stopped = True
                self._held = ""
                return text[: index + 1 - found]
        keep = len(text) - max(automaton.matched for automaton in self._automata)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """The text held back, which no stop will claim any more."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._fallback = _borders(stop)
        self.matched = 0

    def advance(self, character: str) -> int:
        """The length of the stop if this character completes it, else 0."""
        while self.matched and self._stop[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        if self._stop[self.matched] == character:
            self.matched += 1
        if self.matched < len(self._stop):
            return 0
        self.matched = 0
        return len(self._stop)


@lru_cache(maxsize=64)
def _borders(stop: str) -> tuple[int, ...]:
    """For each prefix of `stop` the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        if stop[index] == stop[length]:
            length += 1
        borders[index] = length
    return tuple(borders)
