"""Measured shares for the edge: when there are some, how they move, and that they are none else."""

from __future__ import annotations

from typing import Any

import pytest

from mirror_sd.scheduler.measurements import Traffic
from ops.class_split import ClassSplit
from ops.readers import service

NONE = Traffic()


def pace(step_s: float, slots: int = 8) -> dict[str, Any]:
    return {"curve": [[1, step_s], [slots, step_s]], "prefill_tok_s": 10_000.0}


def state(rate: float = 0.0, **steps: float | None) -> dict[str, Any]:
    workers = [
        {"device_class": name, "slots": 8, "in_flight": 0, "pace": step and pace(step)}
        for name, step in steps.items()
    ]
    return {"edge": {"qps": {"all": rate}}, "workers": workers}


def first(splits: list[dict[str, Any]] | None) -> dict[str, float]:
    assert splits is not None
    assert [split.get("below") for split in splits] == [50, 500, 2000, None]
    for split in splits:
        assert sum(split["shares"].values()) == pytest.approx(1.0, abs=1e-3)
    shares: dict[str, float] = splits[0]["shares"]
    return shares


def test_shares_go_to_the_class_that_measured_the_shortest_steps() -> None:
    split = ClassSplit(("cpu", "gpu"))
    shares = first(split.update(0.0, state(cpu=0.1, gpu=0.01), NONE, {}))
    # The other keeps a little: without any request it would not be measured again.
    assert shares == pytest.approx({"cpu": 0.01, "gpu": 0.99}, abs=1e-3)


def test_while_a_class_with_workers_tells_no_pace_nothing_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    split = ClassSplit(("cpu", "gpu"))
    for now in range(3):
        assert split.update(now, state(cpu=0.1, gpu=None), NONE, {}) is None
    assert [r.getMessage() for r in caplog.records] == [
        "no shares are measured, the policy holds: gpu tells no pace"
    ]
    assert split.update(3.0, state(cpu=0.1, gpu=0.01), NONE, {}) is not None


def test_a_class_without_workers_gets_nothing_and_the_others_all() -> None:
    split = ClassSplit(("cpu", "gpu"))
    first(split.update(0.0, state(cpu=0.1, gpu=0.01), NONE, {}))
    assert first(split.update(1.0, state(cpu=0.1), NONE, {})) == {"cpu": 1.0}


def test_shares_move_to_a_new_plan_in_seconds_but_leave_a_dead_class_at_once() -> None:
    split = ClassSplit(("cpu", "gpu"))
    first(split.update(0.0, state(cpu=0.1, gpu=0.01), NONE, {}))
    slow = state(cpu=0.1, gpu=1.0)
    moved = [first(split.update(float(now), slow, NONE, {}))["cpu"] for now in range(1, 16)]
    assert moved == sorted(moved)
    assert moved[0] < 0.4 and moved[-1] > 0.97
    dead = first(split.update(16.0, slow, NONE, {"cpu": 0.0}))
    assert dead == {"cpu": 0.0, "gpu": 1.0}


def test_the_rate_that_the_edge_counts_moves_shares_off_the_quickest_class() -> None:
    shares = [
        first(ClassSplit(("cpu", "gpu")).update(0.0, state(rate, cpu=0.02, gpu=0.01), NONE, {}))
        for rate in (0.1, 8.0)
    ]
    assert shares[0]["cpu"] < 0.02 < shares[1]["cpu"]


@pytest.mark.parametrize("broken", [{}, {"workers": None}, {"workers": [1]}, {"edge": 3}])
def test_a_state_that_tells_nothing_gives_no_shares(broken: dict[str, Any]) -> None:
    assert ClassSplit(("cpu",)).update(0.0, broken, NONE, {}) is None


def test_the_lengths_of_requests_are_read_from_the_scrapes() -> None:
    def scrape(count: int) -> service.Counts:
        return service.parse(
            f'mirror_gateway_requests_total{{class="cpu",tier="vip",status="200"}} {count}\n'
            f'mirror_gateway_requests_total{{class="cpu",tier="vip",status="429"}} 1000\n'
            f'mirror_gateway_prompt_tokens_total{{class="cpu"}} {300 * count}\n'
            f'mirror_gateway_completion_tokens_total{{class="cpu"}} {20 * count}\n'
        )

    window = service.ServiceWindow()
    window.add(0.0, scrape(5))
    window.add(2.0, scrape(25))
    assert window.reading(2.0).traffic == Traffic(20, 6_000, 400)
