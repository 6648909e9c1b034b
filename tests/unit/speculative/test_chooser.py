"""The chooser against the best fixed source and length, in simulated time."""

from __future__ import annotations

import numpy as np
import pytest

from mirror_sd.speculative.calibration import calibrate
from mirror_sd.speculative.chooser import Purse, Rates, allot
from mirror_sd.speculative.cost_model import PassCost, VerifyCost
from mirror_sd.speculative.length_bandit import LengthBandit
from mirror_sd.speculative.repetition import RepetitionWatch
from tests.unit.speculative.simulation import Clock, Curve, Scene, SimTarget


def cpu(rows: int) -> float:
    """Measured: SmolLM2-135M in int8 on 2 cores."""
    knots = [1, 8, 10, 12, 16, 32, 2000]
    return 1e-3 * float(np.interp(rows, knots, [5.6, 6.2, 7.1, 8.6, 10.0, 17.8, 900]))


def wide(rows: int) -> float:
    """A device to which rows are nearly free."""
    return 1e-3 * (8 + 0.02 * rows)


WORKLOADS = {
    "support": {
        "lookup": lambda: Curve(
            0.45, lambda s, j: min(0.95, 0.2 + 0.12 * s + 0.03 * j), range(1, 5)
        ),
        "history": lambda: Curve(0.7, lambda s, j: 0.3 + 0.08 * s, (1, 3, 6, 7), 1e-5),
    },
    "creative": {
        "lookup": lambda: Curve(0.3, lambda s, j: 0.15),
        "history": lambda: Curve(0.4, lambda s, j: 0.1),
    },
    "duplicates": {
        "lookup": lambda: Curve(0.5, lambda s, j: 0.5),
        "history": lambda: Curve(0.95, lambda s, j: 0.93, (7,), 1e-5),
    },
}
SKILL = (0.55, 0.6, 0.65, 0.7)
HEAD = (lambda j: SKILL[min(j, 3)], lambda n: 1.5e-4 + 1.5e-5 * n)
SECONDS = {1: 15.0, 4: 5.0, 16: 5.0, 64: 5.0}


def best_fixed(monkeypatch, streams, cost, workload, head):
    """Tokens a second of the best of: no drafts, each source at each of a few lengths."""
    rates = [steady(Scene(monkeypatch, streams, cost, {}, speculation=False), 1.0)]
    seconds = 8.0 if streams == 1 else 2.0
    for length in (1, 2, 4, 8):
        for name, curve in WORKLOADS[workload].items():
            scene = Scene(monkeypatch, streams, cost, {name: curve()}, fixed=length)
            rates.append(steady(scene, seconds))
        if head:
            scene = Scene(monkeypatch, streams, cost, {}, head, fixed=length)
            rates.append(steady(scene, seconds))
    return max(rates)


def steady(scene, seconds):
    """Tokens a second once the prompts are read."""
    scene.run(0.6)
    return scene.run(seconds)


def chosen(monkeypatch, streams, cost, workload, head, **fields):
    curves = {name: curve() for name, curve in WORKLOADS[workload].items()}
    scene = Scene(monkeypatch, streams, cost, curves, head, **fields)
    scene.run(1.5)  # what it learns first
    return scene.run(SECONDS[streams])


@pytest.mark.parametrize("head", [None, HEAD], ids=["no head", "head"])
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("streams", [1, 4, 16, 64])
def test_it_is_within_three_percent_of_the_best_fixed_source_and_length(
    monkeypatch, streams, workload, head
):
    best = best_fixed(monkeypatch, streams, cpu, workload, head)
    assert chosen(monkeypatch, streams, cpu, workload, head) >= 0.97 * best


@pytest.mark.parametrize("workload", ["support", "creative"])
def test_so_it_is_where_rows_are_nearly_free(monkeypatch, workload):
    best = best_fixed(monkeypatch, 16, wide, workload, HEAD)
    assert chosen(monkeypatch, 16, wide, workload, HEAD) >= 0.95 * best


def test_it_follows_when_acceptance_changes(monkeypatch):
    skill = {"lookup": 0.9, "history": 0.1}
    curves = {
        name: Curve(0.9, lambda s, j, name=name: skill[name], (4,))
        for name in ("lookup", "history")
    }
    scene = Scene(monkeypatch, 1, cpu, curves)
    scene.run(2.0)
    before = scene.run(8.0)
    skill["lookup"], skill["history"] = 0.1, 0.9
    scene.run(2.0)
    after = scene.run(8.0)
    assert after >= 0.95 * before
    skill["history"] = 0.02
    scene.run(2.0)
    assert scene.run(8.0) >= 0.97 / cpu(1), "drafts that are no good any more cost nothing"
    skill["lookup"] = 0.9
    scene.run(2.0)
    assert scene.run(8.0) >= 0.95 * before, "a source that was given up is noticed again"


def test_one_bad_sequence_does_not_spoil_the_others(monkeypatch):
    """vllm#58080: each sequence has a record of its own."""
    scene = Scene(monkeypatch, 4, cpu, {"lookup": Curve(1.0, lambda s, j: 0.9, (4,))})
    bad = Curve(1.0, lambda s, j: 0.02, (4,))
    opened = []

    def open_mixed(tokens, *, tenant, prompt_length, inner=scene.engine._drafters["lookup"].open):
        source = inner(tokens, tenant=tenant, prompt_length=prompt_length)
        if tokens[0] == 0:
            source._curve = bad
        opened.append(source)
        return source

    scene.engine._drafters["lookup"].open = open_mixed
    scene.run(3.0)
    drafted = {s.request_id: s.usage() for s in scene.engine._loop.running}
    good = [u for name, u in drafted.items() if name != "r0"]
    assert len(opened) == 4
    assert drafted["r0"].drafted_tokens < 0.3 * min(u.drafted_tokens for u in good)
    assert all(u.accepted_tokens > 0.5 * u.drafted_tokens for u in good)


def test_rows_go_to_the_likeliest_tokens_first():
    flat = [1.0] * 9 + [2.0] * 2000
    offers = [[0.9, 0.5], [0.8, 0.7, 0.6]]
    assert allot(offers, 5, flat, rate=10.0).lengths == [1, 2]
    assert allot(offers, 2, flat, rate=10.0).lengths == [2, 3]
    steep = [float(rows) for rows in range(2000)]
    assert allot(offers, 2, steep, rate=0.75).lengths == [1, 1]
    assert allot(offers, 2, steep, rate=2.0).gain < 0


def test_a_forward_costs_what_was_measured_and_follows_the_device():
    cost = VerifyCost()
    for _ in range(50):
        for rows in (1, 8, 16):
            cost.observe(rows, cpu(rows))
    assert cost.seconds(12) == pytest.approx((cpu(8) + cpu(16)) / 2)
    assert cost.seconds(32) > cost.seconds(16)
    for _ in range(100):
        cost.observe(8, 2 * cpu(8))  # all has become slower, and only this is seen
    assert cost.seconds(8) == pytest.approx(2 * cpu(8), rel=0.02)
    assert cost.seconds(1) > 1.3 * cpu(1)
    cost.observe(8, 10.0)
    assert cost.seconds(8) < 2.3 * cpu(8), "an outlier is no trend"


class Disturbed:
    """A cost that is `seconds` the first time that it is asked for `at`, once it is armed."""

    def __init__(self, cost, at, seconds):
        self._cost, self._at, self._seconds = cost, at, seconds
        self.is_armed = self.has_struck = False

    def __call__(self, size):
        if self.is_armed and not self.has_struck and size == self._at:
            self.has_struck = True
            return self._seconds
        return self._cost(size)


@pytest.mark.parametrize("rows", [5, 9])
def test_one_slow_step_does_not_make_drafts_shorter_for_good(monkeypatch, rows):
    def speed(seconds):
        cost = Disturbed(cpu, rows, seconds)
        curves = {name: curve() for name, curve in WORKLOADS["duplicates"].items()}
        scene = Scene(monkeypatch, 1, cost, curves)
        cost.is_armed = True
        scene.run(2.0)
        assert cost.has_struck
        return scene.run(5.0)

    assert speed(0.1) >= 0.95 * speed(cpu(rows))


def test_one_slow_call_of_the_head_does_not_switch_it_off_for_good(monkeypatch):
    def speed(seconds):
        chance, cost = HEAD
        cost = Disturbed(cost, 2, seconds)
        scene = Scene(monkeypatch, 2, cpu, {}, (chance, cost))
        cost.is_armed = True
        scene.run(2.0)
        assert cost.has_struck
        return scene.run(5.0)

    assert speed(0.02) >= 0.95 * speed(HEAD[1](2))


def test_what_a_slow_spell_made_look_dear_is_tried_again_later():
    cost = VerifyCost()
    cost.measure(1, 0.006)
    cost.measure(6, 0.0061)
    for _ in range(2):
        cost.observe(5, 0.018)
        cost.observe(6, 0.018)
    assert cost.seconds(6) > 0.01
    for _ in range(1200):
        cost.observe(1, 0.006)
    assert cost.seconds(6) < 0.007


def test_a_clock_too_coarse_for_a_forward_teaches_nothing():
    cost, passes = VerifyCost(), PassCost(3e-4)
    cost.measure(1, 0.0)
    for _ in range(3):
        cost.observe(1, 0.0)
        passes.observe(1, 1, 0.0)
    assert not cost.is_known
    for _ in range(3):
        cost.observe(1, 0.006)
        passes.observe(1, 1, 2e-4)
    assert cost.seconds(1) == pytest.approx(0.006)
    assert passes.seconds(1) == pytest.approx(2e-4)


def test_a_forward_measured_only_once_does_not_count():
    clock, cost = Clock(), VerifyCost()
    target = SimTarget(clock, Disturbed(cpu, 2, 0.4))
    target.cost.is_armed = True
    calibrate(target, cost, num_blocks=64, block_size=16, clock=clock, budget_s=0.3)
    assert target.cost.has_struck
    assert cost.seconds(1) == pytest.approx(cpu(1))
    assert cost.seconds(2) < 1.1 * cpu(2)


def test_of_a_slow_model_at_least_a_forward_of_one_row_is_known_at_the_start():
    clock, cost = Clock(), VerifyCost()
    target = SimTarget(clock, lambda rows: 0.3)
    calibrate(target, cost, num_blocks=64, block_size=16, clock=clock, budget_s=0.5)
    assert cost.seconds(1) == pytest.approx(0.3)


def test_thousands_of_sequences_at_once_decode(monkeypatch):
    scene = Scene(monkeypatch, 2100, wide, {"lookup": Curve(0.5, lambda s, j: 0.5)})
    for _ in range(8):
        scene.engine.step()
    assert all(len(s.tokens) > 18 for s in scene.engine._loop.running)
    assert len(scene.engine._loop.running) == 2100


def test_the_pace_that_a_worker_tells_is_what_it_measured():
    cost = VerifyCost()
    assert cost.pace(256) is None
    for _ in range(50):
        for rows in (1, 2, 4, 8, 16, 32, 64, 256):
            cost.observe(rows, cpu(rows))
    pace = cost.pace(256)
    assert pace is not None
    assert [rows for rows, _ in pace.curve] == [1, 2, 4, 8, 16, 32, 64]
    for rows, seconds in pace.curve:
        assert seconds == pytest.approx(cpu(rows), rel=1e-3)
    assert pace.prefill_tok_s == pytest.approx(256 / cpu(256), rel=1e-3)


def test_a_length_is_capped_where_more_never_pays():
    bandit = LengthBandit(8)
    key = LengthBandit.key(16, "lookup", 3)
    assert bandit.longest(key) == 8
    for _ in range(50):
        bandit.observe(key, 8, 2, 0.5)
    assert bandit.longest(key) == 2
    for _ in range(300):
        bandit.observe(key, 8, 0, 0.5)
    assert bandit.longest(key) == 0
    for _ in range(300):
        bandit.observe(key, 8, 8, 0.5)
    assert bandit.longest(key) == 8


def test_time_for_trying_is_a_small_share():
    purse = Purse(0.01, 1.0)
    spent = 0
    for _ in range(1000):
        purse.save(0.1)
        spent += purse.spend(0.05)
    assert 15 <= spent <= 20


def test_a_rate_starts_at_that_of_plain_decoding():
    rates = Rates()
    assert rates.rate(4, 0.01) == pytest.approx(400)
    for _ in range(1000):
        rates.observe(4, 8, 0.01)
    assert rates.rate(4, 0.01) == pytest.approx(800, rel=0.06)


def test_an_answer_that_goes_round_in_circles_is_noticed_once():
    watch = RepetitionWatch()
    assert not any(watch.observe(list(range(10 * i, 10 * i + 8))) for i in range(10))
    noticed = [watch.observe([1, 2, 3, 4, 5]) for _ in range(8)]
    assert noticed == [False, False, False, True, False, False, False, False]
    assert watch.is_repeating
    watch.observe([])
    assert not watch.is_repeating
