"""Finds the answers whose MinHash signatures are like one that is asked for.

Locality-sensitive hashing by bands: two signatures meet where all rows of a band agree, and of
those that meet, the ones that agree in most bands are compared. The number of rows is the largest
that lets a pair at the threshold meet with a probability of 0.99. Each scope has bands of its own,
so what is in one is never compared with, nor slowed by, what is in another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from functools import cache
from typing import Generic, TypeVar

from mirror_sd.scheduler.shingles import Signature, read, similarity

T = TypeVar("T", bound=Hashable)

_MEETING = 0.99
_MOST_ROWS = 8
# Of a bucket the newest are enough: those in it resemble each other.
_BUCKET = 8
# Compared at most.
_COMPARED = 12


class _Bands(Generic[T]):
    """The signatures of one scope; `buckets` by band and the bytes of its rows."""

    def __init__(self) -> None:
        self.buckets: dict[tuple[int, bytes], list[T]] = {}
        self.signatures: dict[T, bytes] = {}


class SimilarityIndex(Generic[T]):
    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._scopes: dict[Hashable, _Bands[T]] = {}

    def add(self, scope: Hashable, item: T, signature: bytes) -> None:
        bands = self._scopes.setdefault(scope, _Bands())
        bands.signatures[item] = signature
        for key in self._keys(signature):
            bucket = bands.buckets.setdefault(key, [])
            bucket.append(item)
            if len(bucket) > _BUCKET:
                del bucket[0]

    def discard(self, scope: Hashable, item: T) -> None:
        bands = self._scopes.get(scope)
        signature = None if bands is None else bands.signatures.pop(item, None)
        if bands is None or signature is None:
            return
        for key in self._keys(signature):
            bucket = bands.buckets.get(key, [])
            if item in bucket:
                bucket.remove(item)
                if not bucket:
                    del bands.buckets[key]
        if not bands.signatures:
            del self._scopes[scope]

    def similar(self, scope: Hashable, signature: bytes) -> list[tuple[float, T]]:
        """The items in the scope at or above the threshold, each with its similarity."""
        bands = self._scopes.get(scope)
        if bands is None:
            return []
        meetings: Counter[T] = Counter()
        for key in self._keys(signature):
            bucket = bands.buckets.get(key)
            if bucket is not None:
                # The newest first: of equals it is the one that is counted, and so compared, first.
                meetings.update(reversed(bucket))
        wanted = read(signature)
        found = (
            (self._alike(wanted, bands, item), item) for item, _ in meetings.most_common(_COMPARED)
        )
        return [(alike, item) for alike, item in found if alike >= self._threshold]

    def check_integrity(self) -> None:
        """Raises `AssertionError` if a bucket holds what is not in the index."""
        for scope, bands in self._scopes.items():
            stray = {i for b in bands.buckets.values() for i in b} - bands.signatures.keys()
            if stray or not bands.signatures or not all(bands.buckets.values()):
                raise AssertionError(f"stray items or empty buckets in {scope}: {stray}")

    @staticmethod
    def _alike(wanted: Signature, bands: _Bands[T], item: T) -> float:
        other = read(bands.signatures[item])
        return similarity(wanted, other) if len(other) == len(wanted) else 0.0

    def _keys(self, signature: bytes) -> list[tuple[int, bytes]]:
        size = 4 * rows_of(len(signature) // 4, self._threshold)
        stops = range(size, len(signature) + 1, size)
        return [(stop, signature[stop - size : stop]) for stop in stops]


@cache
def rows_of(permutations: int, threshold: float) -> int:
    """Rows in a band."""
    for rows in range(min(_MOST_ROWS, permutations), 1, -1):
        if 1.0 - (1.0 - threshold**rows) ** (permutations // rows) >= _MEETING:
            return rows
    return 1
