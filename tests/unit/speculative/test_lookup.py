"""What lookup says of its own proposals."""

from __future__ import annotations

import random

import pytest

from mirror_sd.speculative.acceptance import first_guess
from mirror_sd.speculative.drafters import STRENGTHS
from mirror_sd.speculative.drafters.lookup import LookupDrafter


def opened(tokens, ngram_min=1, ngram_max=4):
    drafter = LookupDrafter(ngram_min=ngram_min, ngram_max=ngram_max)
    return drafter.open(tokens, tenant="a", prompt_length=len(tokens))


@pytest.mark.parametrize(
    ("matched", "strength"),
    [(1, 0), (2, 1), (3, 2), (4, 3), (6, 4), (11, 4), (12, 5), (20, 6), (31, 6), (32, 7), (90, 7)],
)
def test_strength_grows_with_the_text_that_agrees_beyond_the_ngram_that_was_found(
    matched, strength
):
    shared = list(range(100, 100 + matched))
    source = opened([1, *shared, 7, 8, 2, *shared])
    assert source.propose(2) == [7, 8]
    assert source.strength() == strength


def test_without_a_proposal_nothing_speaks_for_one():
    source = opened([1, 2, 3, 1, 2])
    assert source.propose(1) == [3] and source.strength() == 1
    source.commit([9])
    assert source.propose(1) == [] and source.strength() == 0
    assert source.propose(0) == [] and source.strength() == 0


def test_a_loop_is_followed_round_and_its_strength_stays_within_bounds():
    source = opened([5, 6] * 40)
    assert source.propose(5) == [5, 6, 5, 6, 5]
    assert source.strength() == STRENGTHS - 1
    rng = random.Random(3)
    for _ in range(200):
        source.commit([rng.randrange(3)])
        source.propose(4)
        assert 0 <= source.strength() < STRENGTHS


@pytest.mark.parametrize("source", ["lookup", "history", "hint", "head"])
def test_the_first_guess_of_a_chance_grows_with_the_strength(source):
    guesses = [first_guess(source, strength) for strength in range(STRENGTHS)]
    assert guesses == sorted(guesses) and 0 < guesses[0] < guesses[-1] < 1
