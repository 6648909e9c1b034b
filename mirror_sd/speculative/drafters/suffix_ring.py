"""A bounded index of token texts: where the latest tokens of a text were seen before.

A ring of tokens with hash chains over n-grams of two lengths, as LZ77 compressors find matches
(Deutsch, RFC 1951, section 4): the ring's place of the latest n-gram of each hash, and for each
place the one before it of the same hash. Eviction is the overwriting of the ring; entries that
point before it are recognised by their place. 20 bytes a token kept, up to 28 where the capacity is
little above a power of two.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# The longest match that counts, in tokens.
LONGEST = 32
# Tokens of an n-gram, and how many of its places are tried, latest first. What the longer one does
# not find is looked for by the shorter. docs/decisions/0015-history.md has the figures.
_CHAINS = ((4, 16), (2, 8))
_FIRST_SIZE = 1024
# The ring grows in large steps: each indexes anew all that is held, 20 ms for 65,000 tokens.
_GROWTH = 8
# Stands behind every text: no match runs across it, no draft goes on over it.
_END = -1
# Places are 32-bit; before they overflow all are counted anew.
_LAST_PLACE = 2**30
_FACTOR, _SPREAD, _WORD = 0x9E3779B1, 0x85EBCA6B, 0xFFFFFFFF

Places = npt.NDArray[np.int32]


class Match(NamedTuple):
    """The `length` tokens before `place` are those looked for; what followed them is at `place`."""

    place: int
    length: int


class SuffixRing:
    """Holds the latest `capacity` tokens of the texts added, their ends counted as one each.

    Memory grows with what is held. Not thread-safe.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; at least 1 token is needed")
        self._capacity = capacity
        # Raised when places are counted anew: one kept from before means nothing any more.
        self.epoch = 0
        self._end = 0
        self._lay_out(min(capacity, _FIRST_SIZE))

    def __len__(self) -> int:
        """Tokens held, ends of texts included."""
        return min(self._end, self._size)

    @property
    def nbytes(self) -> int:
        """Memory of the ring and its index."""
        return self._ring.nbytes + sum(chain.nbytes for chain in self._chains)

    def add(self, text: Sequence[int]) -> None:
        """Take a text in; of one that is longer than the ring its end. O(1) a token, amortised."""
        text = text[max(len(text) - self._capacity + 1, 0) :]
        if not text:
            return
        self._make_room(len(text) + 1)
        self._append(np.array([*text, _END], dtype=np.int32))

    def find(self, tail: Sequence[int]) -> Match | None:
        """Where the longest end of `tail` was seen before, the latest such place; only its last
        `LONGEST` tokens count. Of few tokens that occur often only the latest places are seen."""
        oldest = max(self._end - self._size, 0)
        for chain in self._chains:
            if len(tail) >= chain.length and (match := self._longest(chain, tail, oldest)):
                return match
        return None

    def _longest(self, chain: _Chain, tail: Sequence[int], oldest: int) -> Match | None:
        tokens, before, size, shortest = self._tokens, chain.before, self._size, chain.length
        most = min(len(tail), LONGEST)
        place, best, found = chain.latest(tail), shortest - 1, 0
        for _ in range(chain.tries):
            if place - shortest < oldest:
                break
            # Only a text that has this token as well can be a longer match.
            if place - 1 - best >= oldest and tokens[(place - 1 - best) % size] == tail[-1 - best]:
                length = 0
                while (
                    length < most
                    and place - 1 - length >= oldest
                    and tokens[(place - 1 - length) % size] == tail[-1 - length]
                ):
                    length += 1
                if length > best and tokens[place % size] != _END:
                    best, found = length, place
                    if length == most:
                        break
            place = before[(place - 1) % size]
        return Match(found, best) if found else None

    def read(self, place: int, limit: int) -> list[int]:
        """At most `limit` tokens from `place` on, to the end of its text; none where that has been
        overwritten."""
        if limit <= 0 or not max(self._end - self._size, 0) <= place < self._end:
            return []
        first = place % self._size
        piece = self._tokens[first : first + limit].tolist()
        if len(piece) < limit:
            piece += self._tokens[: min(limit - len(piece), first)].tolist()
        return piece[: piece.index(_END)] if _END in piece else piece

    def _make_room(self, count: int) -> None:
        needed = min(self._end + count, self._capacity)
        if needed > self._size:
            self._rebuild(min(max(needed, _GROWTH * self._size), self._capacity))
        elif self._end + count > _LAST_PLACE:
            self._rebuild(self._size)

    def _rebuild(self, size: int) -> None:
        """The same texts in a ring of `size`, which is not less than before, counted from 0."""
        kept = np.roll(self._ring, -(self._end % self._size)) if self._end > self._size else None
        texts = self._ring[: self._end].copy() if kept is None else kept
        self.epoch += self._end > self._size
        self._end = 0
        self._lay_out(size)
        self._append(texts)

    def _lay_out(self, size: int) -> None:
        self._size = size
        # Two views of the same memory: single tokens are read faster from an array of Python's.
        self._tokens = array("i", [0]) * size
        self._ring: Places = np.frombuffer(self._tokens, dtype=np.int32)
        self._chains = [_Chain(length, tries, size) for length, tries in _CHAINS]

    def _append(self, texts: Places) -> None:
        """Each text followed by its end; together no more than the ring holds."""
        places = np.arange(self._end, self._end + texts.size)
        self._ring[places % self._size] = texts
        for chain in self._chains:
            chain.add(texts, self._end)
        self._end += texts.size


class _Chain:
    """For n-grams of `length` tokens: the latest place behind one of each hash, and the place
    before it. 0 stands for none: behind an n-gram there is no place 0."""

    def __init__(self, length: int, tries: int, size: int) -> None:
        self.length = length
        self.tries = tries
        self._shift = 32 - max((size - 1).bit_length(), 1)
        self._heads = array("i", [0]) * (1 << (32 - self._shift))
        self._head_of: Places = np.frombuffer(self._heads, dtype=np.int32)
        # `before[(place - 1) % size]`: the last place before `place` of the same hash.
        self.before = array("i", [0]) * size
        self._before_of: Places = np.frombuffer(self.before, dtype=np.int32)

    @property
    def nbytes(self) -> int:
        return self._head_of.nbytes + self._before_of.nbytes

    def latest(self, tail: Sequence[int]) -> int:
        """The latest place of the hash of the end of `tail`, 0 for none; it may be overwritten, or
        another n-gram's."""
        value = 0
        for token in tail[-self.length :]:
            value = value * _SPREAD + token
        return self._heads[(value * _FACTOR & _WORD) >> self._shift]

    def add(self, texts: Places, start: int) -> None:
        """Take in the n-grams of texts, the first of which begins at `start`."""
        count = texts.size - self.length + 1
        if count <= 0:
            return
        value = np.zeros(count, dtype=np.uint32)
        is_whole = np.ones(count, dtype=np.bool_)
        for offset in range(self.length):
            token = texts[offset : offset + count]
            value = value * np.uint32(_SPREAD) + token.astype(np.uint32)
            is_whole &= token != _END
        hashes = (value[is_whole] * np.uint32(_FACTOR)) >> np.uint32(self._shift)
        if not hashes.size:
            return
        # In order of hash and, as the sort is stable, of place.
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        places = np.flatnonzero(is_whole)[order] + (start + self.length)
        is_first = np.concatenate(([True], hashes[1:] != hashes[:-1]))
        before = np.concatenate(([0], places[:-1]))
        before[is_first] = self._head_of[hashes[is_first]]
        self._before_of[(places - 1) % self._before_of.size] = before
        is_last = np.concatenate((is_first[1:], [True]))
        self._head_of[hashes[is_last]] = places[is_last]
