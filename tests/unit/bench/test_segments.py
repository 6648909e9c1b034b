"""What the bench of segments makes of the times it sees."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from mirror_sd.bench.cli import app
from mirror_sd.bench.segments import Stream, pace, report
from mirror_sd.errors import InternalError


def told(arrivals, tokens, begin=1, end=None):
    return {
        "arrivals": arrivals,
        "tokens": tokens,
        "begin": [begin] * len(tokens),
        "end": [len(t) if end is None else end for t in tokens],
        "read_s": 2.0,
        "alone_s": 1.0,
    }


def steady(step_s, count=40):
    return [(step_s * i, 1) for i in range(count)]


def test_tokens_that_come_together_share_the_time_before_them():
    stream = Stream([(0.0, 1), (0.4, 4), (0.5, 1)], [1] * 6)
    assert stream.gaps(0, 6) == ([0.1] * 4 + [pytest.approx(0.1)], [0.4, pytest.approx(0.1)])
    assert stream.gaps(5, 6) == ([pytest.approx(0.1)], [pytest.approx(0.1)])


def test_growth_is_measured_on_the_same_tokens():
    tokens = [list(range(40))] * 2
    # The streams are slower from token 20 on, with the prompt or without.
    slow = [(0.01 * i if i < 20 else 0.2 + 0.02 * (i - 20), 1) for i in range(40)]
    beside = [(2 * at, count) for at, count in slow]
    made = report(
        told([beside] * 2, tokens, begin=20),
        told([beside] * 2, tokens, begin=20),
        told([slow] * 2, tokens),
    )
    assert made["p99_growth"] == made["p99_chunk_growth"] == 2.0
    assert made["segments"]["without"]["p99_ms"] == 20.0
    assert made["segments"]["beside"]["tok_s"] == pytest.approx(50, rel=0.1)


def test_other_tokens_beside_a_prompt_are_an_error():
    same, other = [list(range(40))], [[*range(39), 7]]
    arrivals = [steady(0.01)]
    with pytest.raises(InternalError, match=r"stream 0 .* \(whole_chunks\)"):
        report(told(arrivals, same), told(arrivals, other), told(arrivals, same))


def test_a_run_in_which_no_token_came_says_nothing():
    with pytest.raises(InternalError, match="no token came"):
        pace(told([steady(0.01)], [list(range(40))]), [40], [40])


@pytest.mark.slow
def test_the_default_engine_is_watched(default_model):
    segments_at = "engine.segment_above=100"
    arguments = ["segments", "--streams", "2", "--length", "300", "--set", segments_at, "--json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    made = json.loads(result.stdout)
    assert made["streams"] == 2 and made["length"] == 300
    assert made["segments"]["beside"]["longest_ms"] < made["whole_chunks"]["beside"]["longest_ms"]
    assert made["segments"]["read_s"] > 0
