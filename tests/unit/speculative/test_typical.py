"""Typical acceptance, which keeps likely drafts that the target would not have chosen."""

from __future__ import annotations

import numpy as np
import pytest

from mirror_sd.messages import SamplingParams
from mirror_sd.speculative.sampler import open_chooser
from mirror_sd.speculative.typical import TypicalChooser, is_typical

VOCAB = 50
STOP = 7


def row(**shares: float) -> np.ndarray:
    """Logits where token tN has the share given and the others divide what is left."""
    values = np.full(VOCAB, (1 - sum(shares.values())) / (VOCAB - len(shares)))
    for name, share in shares.items():
        values[int(name[1:])] = share
    return np.log(values).astype(np.float32)


def chooser(temperature: float = 0.0) -> TypicalChooser:
    params = SamplingParams(max_tokens=9, seed=1, temperature=temperature, stop_token_ids=(STOP,))
    return TypicalChooser(open_chooser(params), params)


def judged(draft: list[int], *rows: np.ndarray, room: int = 9) -> tuple[list[int], int, object]:
    return tuple(chooser().judge(np.stack(rows), draft, 0, room))


SURE = row(t1=0.99)
SPLIT = row(t1=0.5, t2=0.45)
LAST = row(t3=0.9)


def test_a_likely_token_is_kept_though_the_target_would_choose_another() -> None:
    assert judged([2, 1], SPLIT, SURE, LAST) == ([2, 1, 3], 2, None)


def test_an_unlikely_token_is_replaced_by_the_choice_of_the_target() -> None:
    assert judged([4, 1], SPLIT, SURE, LAST) == ([1], 0, None)
    # 0.0002 of a sure target; the same share passes where the target has no idea.
    assert judged([2, 1], SURE, SURE, LAST) == ([1], 0, None)


def test_the_bar_falls_with_the_certainty_of_the_target() -> None:
    flat = np.zeros(VOCAB, np.float32)
    assert is_typical(flat, 4)  # 1/50 each: the bar is 0.3/50
    assert not is_typical(row(t1=0.98, t2=0.015), 2)
    assert is_typical(row(t1=0.55, t2=0.2), 2)
    assert not is_typical(row(t1=0.55, t2=0.2), 2, temperature=0.2)


def test_where_an_answer_ends_is_left_to_the_target() -> None:
    assert judged([STOP], row(t1=0.5, t7=0.45), SURE) == ([1], 0, None)
    assert judged([1], row(t7=0.5, t1=0.45), SURE) == ([], 0, "stop")


def test_no_more_tokens_than_there_is_room_for() -> None:
    assert judged([2, 2, 2], SPLIT, SPLIT, SPLIT, LAST, room=2) == ([2, 2], 2, "length")


def test_departures_from_the_target_are_counted() -> None:
    ours = chooser()
    ours.judge(np.stack([SPLIT, SPLIT, SURE, LAST]), [2, 1, 4], 0, 9)
    assert ours.departures == 1


def test_without_a_draft_it_is_the_exact_choice() -> None:
    random = np.random.default_rng(3)
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=9, seed=5, temperature=temperature)
        exact, ours = open_chooser(params), TypicalChooser(open_chooser(params), params)
        for position in range(40):
            logits = random.normal(0, 2, (1, VOCAB)).astype(np.float32)
            assert ours.judge(logits, [], position, 9) == exact.judge(logits, [], position, 9)
            assert ours.choose(logits[0], position) == exact.choose(logits[0], position)


def test_logits_that_are_no_numbers_are_refused() -> None:
    from mirror_sd.speculative.sampling import InvalidLogits

    with pytest.raises(InvalidLogits):
        judged([1], np.full(VOCAB, np.nan, np.float32), SURE)
