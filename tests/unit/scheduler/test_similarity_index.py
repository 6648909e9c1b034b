"""The index finds what is alike, in its scope only, and holds no more than it was given."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror_sd.scheduler.similarity_index import SimilarityIndex, rows_of

PERMUTATIONS = 128
RNG = np.random.default_rng(11)


def random_signature() -> np.ndarray:
    return RNG.integers(0, 2**32, PERMUTATIONS, dtype=np.uint32)


def like(signature: np.ndarray, equal: int) -> bytes:
    """One with exactly `equal` minima the same."""
    changed = signature.copy()
    changed[RNG.choice(PERMUTATIONS, PERMUTATIONS - equal, replace=False)] += np.uint32(1)
    return changed.tobytes()


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.85, 0.95])
def test_nearly_every_pair_at_the_threshold_is_found(threshold: float) -> None:
    equal = int(np.ceil(threshold * PERMUTATIONS))
    index: SimilarityIndex[int] = SimilarityIndex(threshold)
    originals = [random_signature() for _ in range(300)]
    for number, signature in enumerate(originals):
        index.add("s", number, signature.tobytes())
    found = [index.similar("s", like(signature, equal)) for signature in originals]
    right = [n for n, pairs in enumerate(found) if pairs == [(equal / PERMUTATIONS, n)]]
    assert len(right) >= 0.97 * len(originals)
    below = [index.similar("s", like(signature, equal - 1)) for signature in originals]
    assert below == [[]] * len(originals), "what is less alike is not given"


def test_the_most_alike_of_many_is_among_those_found() -> None:
    index: SimilarityIndex[int] = SimilarityIndex(0.5)
    original = random_signature()
    for number in range(200):
        index.add("s", number, like(original, 70 + number % 50))
    best = max(index.similar("s", original.tobytes()))
    assert best[0] > 0.85


def test_scopes_do_not_meet() -> None:
    index: SimilarityIndex[int] = SimilarityIndex(0.5)
    signature = random_signature().tobytes()
    index.add("one", 1, signature)
    assert index.similar("two", signature) == []
    index.add("two", 2, signature)
    assert index.similar("two", signature) == [(1.0, 2)]


def test_signatures_of_another_length_are_not_compared() -> None:
    index: SimilarityIndex[int] = SimilarityIndex(0.5)
    signature = random_signature()
    index.add("s", 1, signature.tobytes())
    assert index.similar("s", signature[:64].tobytes()) == []


OPERATIONS = st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.sampled_from("ab")))
SIGNATURES = [np.full(16, number // 3, dtype=np.uint32).tobytes() for number in range(13)]


@given(OPERATIONS)
@settings(deadline=None)
def test_what_was_discarded_is_never_found(operations: list[tuple[bool, int, str]]) -> None:
    index: SimilarityIndex[tuple[str, int]] = SimilarityIndex(0.5)
    there: set[tuple[str, int]] = set()
    for is_added, number, scope in operations:
        item = (scope, number)
        if is_added and item not in there:
            index.add(scope, item, SIGNATURES[number])
            there.add(item)
        elif not is_added:
            index.discard(scope, item)
            there.discard(item)
        index.check_integrity()
        for other in range(13):
            alike = {(s, n) for s, n in there if s == scope and n // 3 == other // 3}
            assert {item for _, item in index.similar(scope, SIGNATURES[other])} == alike


def test_longer_bands_for_higher_thresholds() -> None:
    assert [rows_of(128, threshold) for threshold in (0.0, 0.3, 0.5, 0.85, 1.0)] == [1, 2, 3, 8, 8]
