"""The ladder: up while tokens come too slowly, down after a calm, no swinging between."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.degradation import DegradationLadder, Step
from ops.readings import ClassReading, ServiceReading, StackReading

LIMIT_S = 0.2


def levels(
    ladder: DegradationLadder,
    seconds: int,
    p99_s: float | None,
    pressure: float = 0.0,
    begin: float = 0.0,
    usual_s: float | None = None,
) -> list[int]:
    """`usual_s`: of the classes that serve most tokens; if not given, as all."""
    service = ServiceReading(p99_s, p99_s if usual_s is None else usual_s)
    seen = []
    for second in range(seconds):
        ladder.update(begin + second, service, pressure)
        seen.append(ladder.level)
    return seen


def test_slow_tokens_climb_one_step_at_a_time() -> None:
    seen = levels(DegradationLadder(LIMIT_S), 30, 0.3, pressure=2.0)
    assert [seen.index(level) for level in (0, 1, 2, 3)] == [0, 3, 8, 18]
    assert seen[-1] == 3


def test_nothing_is_shed_where_nothing_waits() -> None:
    assert levels(DegradationLadder(LIMIT_S), 600, 2.0, pressure=0.9)[-1] == 2


def test_nothing_is_shed_for_a_small_class_that_is_slow() -> None:
    ladder = DegradationLadder(LIMIT_S)
    assert levels(ladder, 600, 0.24, pressure=5.0, usual_s=0.05)[-1] == 2
    assert levels(ladder, 600, 0.24, pressure=5.0, usual_s=0.21, begin=600.0)[-1] == 3


def test_shedding_ends_when_most_tokens_are_fast_again_though_a_small_class_is_not() -> None:
    ladder = DegradationLadder(LIMIT_S)
    levels(ladder, 30, 0.3, pressure=2.0)
    seen = levels(ladder, 600, 0.24, pressure=0.1, usual_s=0.05, begin=30.0)
    assert seen[11:] == [2] * 589


def test_a_queue_alone_degrades_nothing() -> None:
    assert set(levels(DegradationLadder(LIMIT_S), 600, 0.1, pressure=50.0)) == {0}


def test_a_moment_of_slow_tokens_changes_nothing() -> None:
    ladder = DegradationLadder(LIMIT_S)
    for second in range(0, 120, 4):
        assert set(levels(ladder, 3, 0.5, begin=second)) == {0}
        assert set(levels(ladder, 1, 0.1, begin=second + 3)) == {0}


def test_a_level_stays_while_latency_is_near_its_limit() -> None:
    ladder = DegradationLadder(LIMIT_S)
    levels(ladder, 5, 0.3)
    assert set(levels(ladder, 600, 0.19, begin=5.0)) == {1}


def test_calm_gives_back_step_by_step() -> None:
    ladder = DegradationLadder(LIMIT_S)
    levels(ladder, 30, 0.3, pressure=2.0)
    seen = levels(ladder, 60, 0.05, begin=30.0)
    assert [seen.index(level) for level in (2, 1, 0)] == [5, 15, 25]


def test_recovered_devices_end_shedding_while_the_longer_window_still_holds_the_slow_phase() -> (
    None
):
    ladder = DegradationLadder(LIMIT_S)
    levels(ladder, 30, 2.0, pressure=2.0)
    service = ServiceReading(2.0, 2.0, latest_p99_s=0.05, latest_usual_p99_s=0.05)
    seen = []
    for second in range(30, 60):
        ladder.update(float(second), service, 0.0)
        seen.append(ladder.level)
    assert [seen.index(level) for level in (2, 1, 0)] == [5, 15, 25]
    assert 1 not in seen[25:], "a slow phase that is over is no reason to climb"


def test_latest_tokens_that_are_slow_hold_the_level_whatever_the_longer_window_says() -> None:
    ladder = DegradationLadder(LIMIT_S)
    levels(ladder, 30, 2.0, pressure=2.0)
    service = ServiceReading(0.05, 0.05, latest_p99_s=0.3, latest_usual_p99_s=0.3)
    for second in range(30, 90):
        ladder.update(float(second), service, 0.0)
    assert ladder.level == 3


@pytest.mark.parametrize(
    ("waiting", "in_flight", "pressure"),
    [(6, 2, 0.0), (14, 2, 1.0), (8, 8, 1.0), (4, 8, 0.5), (8, 9, 1.0), (0, 0, 0.0)],
)
def test_requests_that_wait_beside_free_slots_are_no_pressure(
    waiting: int, in_flight: int, pressure: float
) -> None:
    item = ClassReading(workers=1, slots=8, in_flight=in_flight, waiting=waiting)
    assert StackReading(0.0, {"gpu": item}).queue_pressure == pressure


def test_silence_is_calm() -> None:
    ladder = DegradationLadder(LIMIT_S)
    levels(ladder, 30, 0.3, pressure=2.0)
    assert levels(ladder, 60, None, begin=30.0)[-1] == 0


def test_requests_are_refused_until_the_queue_is_short() -> None:
    ladder = DegradationLadder(LIMIT_S)
    levels(ladder, 30, 0.3, pressure=2.0)
    assert set(levels(ladder, 120, 0.05, pressure=0.8, begin=30.0)) == {3}
    assert levels(ladder, 12, 0.05, pressure=0.1, begin=150.0)[-1] == 2


def test_a_step_tells_its_reason() -> None:
    ladder = DegradationLadder(LIMIT_S)
    steps = [ladder.update(float(second), ServiceReading(0.31, 0.31), 1.5) for second in range(4)]
    assert steps[:3] == [None, None, None]
    reason = "p99 between tokens is 310 ms, above 200 ms, and 1.5 requests wait for each slot"
    assert steps[3] == Step(0, 1, reason)


def test_overload_that_returns_with_each_descent_swings_ever_more_rarely() -> None:
    # The plant: at level 0 tokens are slow, at level 1 they are not.
    ladder = DegradationLadder(LIMIT_S)
    changes = []
    for second in range(7200):
        step = ladder.update(float(second), ServiceReading(0.3 if ladder.level == 0 else 0.1), 0.0)
        if step is not None:
            changes.append(second)
    assert len([second for second in changes if second < 300]) < 20
    # Once in almost three minutes up, and once down.
    assert len([second for second in changes if second >= 3600]) <= 2 * 3600 / 160 + 2


any_p99 = st.one_of(st.none(), st.floats(0, 10))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 100), any_p99, any_p99, st.floats(0, 100)),
        max_size=200,
    )
)
def test_level_moves_by_one_within_0_and_3_whatever_comes(
    moments: list[tuple[float, float | None, float | None, float]],
) -> None:
    ladder = DegradationLadder(LIMIT_S)
    now = 0.0
    for elapsed, p99_s, usual_s, pressure in moments:
        now += elapsed
        before = ladder.level
        step = ladder.update(now, ServiceReading(p99_s, usual_s), pressure)
        assert 0 <= ladder.level <= 3
        assert abs(ladder.level - before) == (0 if step is None else 1)
        if step is not None and step.after > step.before:
            assert p99_s is not None and p99_s > LIMIT_S


@pytest.mark.parametrize("p99_s", [0.2, 0.1999])
def test_the_limit_itself_is_allowed(p99_s: float) -> None:
    assert set(levels(DegradationLadder(LIMIT_S), 100, p99_s, pressure=5.0)) == {0}
