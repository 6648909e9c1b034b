"""The batch limit finds what a device is good for, and leaves it alone where nothing is to gain."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mirror_sd.scheduler.batch_limit import BatchLimit, Interval

BEAT_S = 0.5


def run(
    limit: BatchLimit, step_s: Callable[[int], float], *, load: int, beats: int = 400
) -> list[int]:
    """The limits while `load` requests want to run on a device with that time for a step."""
    limits = []
    for _ in range(beats):
        running = min(load, limit.limit)
        tokens = round(running * BEAT_S / step_s(running))
        limit.observe(Interval(running, tokens, BEAT_S))
        limits.append(limit.limit)
    return limits


def settled(limits: list[int]) -> float:
    return sum(limits[-200:]) / 200


def test_a_device_within_its_target_is_given_all_its_slots() -> None:
    assert set(run(BatchLimit(64, 0.2), lambda n: 0.02, load=100)) == {64}


def test_a_batch_that_makes_tokens_late_shrinks_until_they_come_in_time() -> None:
    limit = BatchLimit(64, 0.2)
    # 10 ms a sequence: twenty of them keep the target.
    limits = run(limit, lambda n: 0.01 * n, load=100)
    assert 12 <= settled(limits) <= 24
    assert min(limits[20:]) >= 8


def test_it_grows_again_when_the_device_recovers() -> None:
    limit = BatchLimit(32, 0.2)
    run(limit, lambda n: 0.02 * n, load=100)
    assert limit.limit < 16
    run(limit, lambda n: 0.0002 * n + 0.01, load=100)
    assert limit.limit == 32


def test_a_device_whose_step_costs_the_same_keeps_its_batch_however_slow() -> None:
    limits = run(BatchLimit(32, 0.2), lambda n: 0.5, load=100)
    assert settled(limits) > 30


def test_growth_that_brings_no_more_tokens_is_undone() -> None:
    limit = BatchLimit(32, 0.2)
    limit.limit = 8
    # Eight at once are all that it can do in parallel.
    limits = run(limit, lambda n: 0.004 * max(n, 8) / 8 * 8, load=100)
    assert settled(limits) < 14


@pytest.mark.parametrize(
    "interval", [Interval(3, 0, 0.5), Interval(0, 5, 0.5), Interval(3, 5, 0.0)]
)
def test_an_interval_that_says_nothing_changes_nothing(interval: Interval) -> None:
    limit = BatchLimit(8, 0.001)
    for _ in range(10):
        limit.observe(interval)
    assert limit.limit == 8


def test_one_slow_sequence_is_no_batch_to_shrink() -> None:
    assert set(run(BatchLimit(8, 0.01), lambda n: 0.5, load=1)) == {8}


def test_the_limit_stays_between_one_and_the_slots() -> None:
    for slots in (1, 2, 3, 64):
        for cost_s in (0.0001, 0.01, 1.0, 5.0):
            limits = run(BatchLimit(slots, 0.2), lambda n, c=cost_s: c * n, load=slots * 2)
            assert all(1 <= limit <= slots for limit in limits)
