"""The bounded index of texts, held to one that knows every place and forgets by a list."""

from __future__ import annotations

import random
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror_sd.speculative.drafters import suffix_ring
from mirror_sd.speculative.drafters.suffix_ring import LONGEST, Match, SuffixRing

VOCAB = 49152
END = -1


class NaiveRing:
    """All tokens ever added with their places; what is too old counts as forgotten."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.tokens = []

    @property
    def oldest(self):
        return max(len(self.tokens) - self.capacity, 0)

    def add(self, text):
        text = text[max(len(text) - self.capacity + 1, 0) :]
        if text:
            self.tokens += [*text, END]

    def length_at(self, place, tail):
        length = 0
        while (
            length < min(len(tail), LONGEST)
            and place - 1 - length >= self.oldest
            and self.tokens[place - 1 - length] == tail[-1 - length]
        ):
            length += 1
        return length

    def find(self, tail):
        """The latest of the longest matches of at least two tokens that something follows."""
        ends = range(self.oldest, len(self.tokens))
        found = [Match(p, self.length_at(p, tail)) for p in ends if self.tokens[p] != END]
        return max(
            (match for match in found if match.length >= 2),
            key=lambda match: (match.length, match.place),
            default=None,
        )

    def read(self, place, limit):
        out = []
        for token in self.tokens[place : place + limit] if place >= self.oldest else []:
            if token == END:
                break
            out.append(token)
        return out


@st.composite
def histories(draw):
    """Capacity and texts of a small alphabet, some of them pieces of earlier ones."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    capacity = draw(st.sampled_from([1, 2, 5, 16, 40, 100, 1500]))
    letters = draw(st.sampled_from([2, 4, 30]))
    texts = []
    for _ in range(rng.randrange(1, 25)):
        size = rng.choice([0, 1, 2, 3, 7, 20, 60, capacity, 2 * capacity])
        text = [rng.randrange(letters) for _ in range(min(size, 400))]
        if texts and rng.random() < 0.5:
            text = rng.choice(texts)[rng.randrange(5) :] + text
        texts.append(text[:400])
    return capacity, texts, rng


def tails(texts, rng):
    for _ in range(6):
        text = rng.choice(texts)
        cut = rng.randrange(len(text) + 1)
        yield text[max(cut - rng.choice([1, 2, 3, 5, 9, 50]), 0) : cut]
    yield [rng.randrange(30) for _ in range(5)]


@settings(max_examples=60, deadline=None)
@given(histories())
def test_it_finds_what_a_search_of_all_places_finds(history):
    capacity, texts, rng = history
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix_ring, "_CHAINS", ((4, 10**6), (2, 10**6)))
        ring, naive = SuffixRing(capacity), NaiveRing(capacity)
        for text in texts:
            ring.add(text)
            naive.add(text)
            assert len(ring) == len(naive.tokens) - naive.oldest
            for tail in tails(texts, rng):
                assert ring.find(tail) == naive.find(tail)


@settings(max_examples=60, deadline=None)
@given(histories())
def test_what_it_finds_with_few_tries_is_there_and_as_long_as_it_says(history):
    capacity, texts, rng = history
    ring, naive = SuffixRing(capacity), NaiveRing(capacity)
    for text in texts:
        ring.add(text)
        naive.add(text)
        for tail in tails(texts, rng):
            match, best = ring.find(tail), naive.find(tail)
            if match is not None:
                assert match.length == naive.length_at(match.place, tail) <= best.length
                assert naive.tokens[match.place] != END
        for _ in range(20):
            place = rng.randrange(len(naive.tokens) + 3)
            assert ring.read(place, 9) == naive.read(place, 9)


def test_a_text_longer_than_the_ring_leaves_its_end():
    ring = SuffixRing(8)
    ring.add(range(100))
    assert len(ring) == 8
    assert ring.find([94, 95]) == Match(3, 2)  # from 93 on, seven tokens and the end
    assert ring.read(3, 9) == [96, 97, 98, 99]


def test_places_are_counted_anew_before_they_overflow(monkeypatch):
    monkeypatch.setattr(suffix_ring, "_LAST_PLACE", 3000)
    ring = SuffixRing(500)
    rng = random.Random(5)
    for _ in range(400):
        text = [rng.randrange(2000) for _ in range(rng.randrange(4, 60))]
        ring.add(text)
        match = ring.find(text[:-1])
        assert match.length == min(len(text) - 1, LONGEST)
        assert ring.read(match.place, 9) == text[-1:]
        assert ring._end <= 3000
    assert ring.epoch > 2
    older = ring.find(text[:-1])
    ring.add([1, 2, 3])
    assert ring.find(text[:-1]) == older, "what was added later moved nothing"


def test_memory_is_bounded_by_the_capacity_and_grows_with_what_is_held():
    rng = random.Random(1)
    small = SuffixRing(10**7)
    small.add(range(500))
    assert small.nbytes < 40_000
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    ring = SuffixRing(50_000)
    for _ in range(1000):
        ring.add([rng.randrange(VOCAB) for _ in range(200)])
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(ring) == 50_000
    assert ring.nbytes <= 28 * 50_000
    assert held <= ring.nbytes + 10_000, "beside its arrays it holds nothing that grows"


RNG = random.Random(2)
BASE = [RNG.randrange(VOCAB) for _ in range(40)]
# Every n-gram of them occurs often.
HARD = {
    "one token": [7] * 20_000,
    "two tokens": [RNG.randrange(2) for _ in range(20_000)],
    "a period": list(range(33)) * 600,
    "near-duplicates": [t if RNG.random() < 0.9 else 3 for _ in range(500) for t in BASE],
}


@pytest.mark.parametrize("name", HARD)
def test_a_search_and_an_addition_cost_microseconds(name):
    text, ring = HARD[name], SuffixRing(15_000)

    def least_us(work, of):
        times = []
        for _ in range(5):
            begin = time.process_time()
            work()
            times.append(time.process_time() - begin)
        return 1e6 * min(times) / of

    pieces = [text[i : i + 200] for i in range(0, len(text), 200)]
    added_us = least_us(lambda: [ring.add(piece) for piece in pieces], len(text))
    asked = [text[i : i + 40] for i in range(0, 15_000, 77)]
    found_us = least_us(lambda: [ring.find(tail) for tail in asked], len(asked))
    assert added_us < 5, f"{name}: {added_us:.1f} us a token added"
    assert found_us < 30, f"{name}: {found_us:.1f} us a search"
