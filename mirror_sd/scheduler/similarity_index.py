"""Finds the answers whose MinHash signatures are like one that is asked for.

Locality-sensitive hashing by bands: two signatures meet where all rows of a band agree, and only
those that meet are compared. The number of rows is the largest that lets a pair at the threshold
meet with a probability of 0.99. Scopes are part of the bands' keys, so what is in one scope is
never compared with, nor slowed by, what is in another.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from mirror_sd.scheduler.shingles import Signature, read, similarity

T = TypeVar("T", bound=Hashable)

_MEETING = 0.99
_MOST_ROWS = 8
# Of a bucket the newest are enough: those in it resemble each other.
_BUCKET = 24
# Compared at most, newest first.
_COMPARED = 64


class SimilarityIndex(Generic[T]):
    """`signature_of` gives an item's signature, which must not change."""

    def __init__(self, threshold: float, signature_of: Callable[[T], bytes]) -> None:
        self._threshold = threshold
        self._signature_of = signature_of
        self._buckets: dict[tuple[Hashable, int, bytes], list[T]] = {}
        self._signatures: dict[T, Signature] = {}

    def __len__(self) -> int:
        return len(self._signatures)

    def add(self, scope: Hashable, item: T) -> None:
        signature = self._signature_of(item)
        self._signatures[item] = read(signature)
        for key in self._keys(scope, signature):
            bucket = self._buckets.setdefault(key, [])
            bucket.append(item)
            if len(bucket) > _BUCKET:
                del bucket[0]

    def discard(self, scope: Hashable, item: T) -> None:
        if self._signatures.pop(item, None) is None:
            return
        for key in self._keys(scope, self._signature_of(item)):
            bucket = self._buckets.get(key, [])
            if item in bucket:
                bucket.remove(item)
            if not bucket:
                self._buckets.pop(key, None)

    def similar(self, scope: Hashable, signature: bytes) -> list[tuple[float, T]]:
        """The items in the scope at or above the threshold, each with its similarity."""
        candidates: dict[T, None] = {}
        for key in self._keys(scope, signature):
            candidates.update(dict.fromkeys(reversed(self._buckets.get(key, ()))))
        wanted = read(signature)
        found: list[tuple[float, T]] = []
        for item in list(candidates)[:_COMPARED]:
            other = self._signatures[item]
            if len(other) == len(wanted):
                alike = similarity(wanted, other)
                if alike >= self._threshold:
                    found.append((alike, item))
        return found

    def check_integrity(self) -> None:
        """Raises `AssertionError` if a bucket holds what is not in the index."""
        held = {item for bucket in self._buckets.values() for item in bucket}
        stray = held - self._signatures.keys()
        if stray or any(not bucket for bucket in self._buckets.values()):
            raise AssertionError(f"stray or empty buckets: {stray}")

    def _keys(self, scope: Hashable, signature: bytes) -> Iterator[tuple[Hashable, int, bytes]]:
        size = 4 * rows_of(len(signature) // 4, self._threshold)
        for band, start in enumerate(range(0, len(signature) - size + 1, size)):
            yield scope, band, signature[start : start + size]


def rows_of(permutations: int, threshold: float) -> int:
    """Rows in a band."""
    for rows in range(min(_MOST_ROWS, permutations), 1, -1):
        if 1.0 - (1.0 - threshold**rows) ** (permutations // rows) >= _MEETING:
            return rows
    return 1
