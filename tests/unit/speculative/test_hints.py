"""Draft hints: another answer as a source of drafts, which must never show in the text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror_sd.messages import Chunk, Finished
from mirror_sd.speculative.drafters import STRENGTHS
from mirror_sd.speculative.drafters.hint import HintSource
from mirror_sd.speculative.length_controller import WindowController
from tests.unit.speculative.test_engine import free_time, make_engine, solo, submit

VOCAB = 64


def run_hinted(item, hints, speculation=True, slots=16, beside=()):
    """The tokens of `item` while `hints`, of (step, index, tokens), come in; its last frame."""
    engine = make_engine(memory=3, speculation=speculation, slots=slots, clock=free_time)
    for other in (item, *beside):
        engine.add(other)
    tokens, end = list(item.delivered), None
    for step in range(2000):
        for at, index, hint in hints:
            if at == step:
                engine.hint(item.request_id, index, tuple(hint))
        if not engine.has_work:
            break
        for output in engine.step():
            if output.request_id != item.request_id:
                continue
            if isinstance(output, Chunk):
                assert output.index == len(tokens)
                tokens.extend(output.tokens)
            else:
                end = output
        engine.check_integrity()
    assert isinstance(end, Finished) and engine.stats().kv_blocks_used == 0
    return tokens, end


GREEDY, SEEDED = {}, {"temperature": 1.0, "seed": 11, "top_p": 0.9}


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_the_same_answer_as_a_hint_is_accepted_whole(params):
    item = submit(max_tokens=80, **params)
    whole = solo(item, memory=3)
    tokens, end = run_hinted(item, [(0, 0, whole)])
    assert tokens == whole
    assert end.usage.accepted_tokens == end.usage.drafted_tokens
    assert end.usage.verify_rounds <= 11  # nine tokens a round


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_hint_changes_a_token(params, data):
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    item = submit(max_tokens=40, **params)
    whole = solo(item, memory=3)
    hints = []
    for _ in range(rng.randrange(1, 6)):
        kind = rng.choice(["true", "altered", "random", "wild", "far", "before", "empty"])
        begin = rng.randrange(len(whole))
        piece = whole[begin : begin + rng.randrange(1, 40)]
        if kind == "altered":
            piece = [t if rng.random() < 0.8 else rng.randrange(VOCAB) for t in piece]
        if kind == "random":
            piece = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 400))]
        if kind == "wild":
            piece = [rng.choice([-1, VOCAB, 2**40, 3]) for _ in range(5)]
        begin = {"far": 2**60, "before": -7, "true": begin}.get(kind, rng.randrange(60))
        hints.append((rng.randrange(12), begin, [] if kind == "empty" else piece))
    cut = data.draw(st.integers(0, 20))
    resumed = submit(max_tokens=40, delivered=whole[:cut], **params)
    beside = [submit(f"b{i}", prompt=(i, 9, 9), max_tokens=30) for i in range(3)]
    assert run_hinted(resumed, hints, slots=2, beside=beside)[0] == whole


def test_a_hint_in_flight_is_followed_as_it_comes():
    item = submit(max_tokens=60)
    whole = solo(item, memory=3)
    hints = [(step, 3 * step, whole[3 * step : 3 * step + 3]) for step in range(20)]
    tokens, end = run_hinted(item, hints)
    assert tokens == whole
    assert end.usage.verify_rounds < 40


def test_hints_for_nobody_are_ignored():
    engine = make_engine()
    engine.hint("unknown", 0, (1, 2, 3))
    item = submit(max_tokens=30, speculation=False)
    tokens, end = run_hinted(item, [(0, 0, solo(item, memory=3))])
    assert tokens == solo(item, memory=3)
    assert end.usage.drafted_tokens == 0, "the request asked for no speculation"
    assert run_hinted(item, [(0, 0, [1])], speculation=False)[1].usage.drafted_tokens == 0


def test_drafts_are_half_as_long_from_the_first_step_of_degradation_on():
    item = submit(max_tokens=120)
    whole = solo(item, memory=3)

    def rounds(level):
        engine = make_engine(memory=3, clock=free_time)
        engine.add(submit(max_tokens=120, degrade_level=level))
        engine.hint("a", 0, tuple(whole))
        while engine.has_work:
            ends = engine.step()
        return ends[-1].usage

    assert [rounds(level).verify_rounds for level in (0, 1, 3)] == [15, 25, 25]


def source(hint=()):
    made = HintSource([], 1000)
    made.extend(0, hint)
    return made


def test_the_hint_is_found_again_after_the_answers_part():
    hint = list(range(10, 40))
    made = source(hint=hint)
    assert made.propose(4) == [10, 11, 12, 13]
    made.commit([10, 11, 99, 98])  # two tokens in the place of one
    assert made.propose(4) == []
    made.commit([13, 14])
    assert made.propose(4) == [15, 16, 17, 18]


def test_the_nearest_of_equal_places_is_followed():
    hint = [1, 2, 3, 50, 1, 2, 3, 60, 1, 2, 3, 70]
    made = source(hint=hint)
    made.commit([1, 2, 3, 50, 9, 2, 3])
    assert made.propose(1) == [60]


def test_the_strength_of_a_hint_grows_with_the_run_of_tokens_on_which_the_two_agree():
    made = source(hint=[5, 6, 1, 2, 30, 31, 32, 33, 34, 5, 6, 9])
    strengths = []
    for token in (5, 6, 7, 30, 31, 32, 33, 34):
        made.commit([token])
        strengths.append(made.strength())
    assert strengths == [1, 1, 0, 0, 0, 1, 1, 2], "the place is found again by two tokens"
    made = source(hint=range(200))
    made.commit(range(150))
    assert made.strength() == STRENGTHS - 1


def test_a_gap_and_a_repetition_in_the_hint_do_no_harm():
    made = source(hint=[1, 2, 3])
    made.extend(1, [2, 3, 4])
    made.commit([1])
    assert made.propose(9) == [2, 3, 4]
    made.extend(10, [11, 12, 13, 14])
    assert made.propose(9) == []
    made.commit([2, 11, 12])
    assert made.propose(9) == [13, 14]


def test_a_hint_keeps_no_more_than_its_limit():
    made = HintSource([], 100)
    for begin in range(0, 5000, 50):
        made.extend(begin, range(begin, begin + 50))
    assert made.propose(1000) == list(range(100))


def test_a_trusted_hint_begins_with_the_longest_draft():
    rule = WindowController(minimum=1, maximum=8, initial=2, window=10, grow_above=0.8)
    rule.trust()
    assert rule.length == 8
    rule.observe(8, 0)
    assert rule.length == 7
