"""The figures that all engines are compared by, worked out by hand."""

from __future__ import annotations

import pytest

from mirror_sd.bench.token_times import Answer, rates


def evenly(start: float, first: float, count: int, pace: float) -> Answer:
    """`count` tokens, the first at `first`, the others every `pace` seconds."""
    return Answer(start, tuple(first + pace * i for i in range(count)))


def test_one_stream_leaves_the_reading_of_each_prompt_out():
    found = rates([evenly(0, 5, 11, 0.1), evenly(6, 16, 11, 0.1)], streams=1)
    assert found.tok_s == pytest.approx(10)
    assert found.ms_per_token == pytest.approx(100)
    assert found.ttft_ms == pytest.approx(7500)
    assert found.tokens == 22 and found.wall_tok_s == pytest.approx(22 / 17)


def test_several_streams_count_from_the_last_first_token():
    # The first stream decodes alone from 1 to 4; both from 4 to 8.
    found = rates([evenly(0, 1, 8, 1.0), evenly(0, 4, 5, 1.0)], streams=2)
    assert found.tok_s == pytest.approx((4 + 4) / 4)
    assert found.ms_per_token == pytest.approx(1000)


def test_a_prompt_read_while_others_decode_costs_time_and_counts_its_first_token():
    running = [evenly(0, 1, 11, 1.0), evenly(0, 1, 4, 1.0)]
    later = evenly(4, 6, 3, 1.0)
    found = rates([*running, later], streams=2)
    assert found.tok_s == pytest.approx((10 + 3 + 3) / 10)


def test_an_idle_gap_between_streams_is_no_decoding():
    found = rates([evenly(0, 1, 3, 1.0), evenly(0, 1, 3, 1.0), evenly(3, 10, 3, 1.0)], streams=2)
    assert found.tok_s == pytest.approx((2 + 2 + 2) / (2 + 2))


def test_tokens_that_come_together_count_each():
    drafted = Answer(0, (1.0, 2.0, 2.0, 2.0, 3.0))
    assert rates([drafted], streams=1).tok_s == pytest.approx(2)


def test_answers_of_one_token_have_no_pace():
    found = rates([Answer(0, (1.0,)), Answer(1, (3.0,))], streams=1)
    assert found.tok_s is None and found.ms_per_token is None
    assert found.row() == {
        "tok_s": None,
        "ms_per_token": None,
        "wall_tok_s": 0.7,
        "ttft_ms": 1500.0,
        "tokens": 2,
    }
