"""Plans: shares of the classes, drafters for verifiers, draft lengths."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror_sd.scheduler.device_profile import DeviceProfile, DrafterProfile
from mirror_sd.scheduler.measurements import Traffic, demand, profile
from mirror_sd.scheduler.splitter import Demand, DynamicSplitter, Factors, Plan


def flat(name: str, latency_ms: float, prefill_tok_s: float, slots: int) -> DeviceProfile:
    """Of a device whose step takes the same whatever its batch."""
    return DeviceProfile(
        name, ((1, latency_ms / 1e3), (slots, latency_ms / 1e3)), prefill_tok_s, slots
    )


CPU = flat("cpu", 120, 2_000, 8)
GPU = flat("gpu", 20, 20_000, 32)
TPU = flat("tpu", 15, 40_000, 64)
# int8 on two cores, and a slower target whose rows cost little.
NATIVE = DeviceProfile(
    "cpu", ((1, 0.0053), (4, 0.0055), (8, 0.0062), (16, 0.010), (32, 0.0178)), 2_000, 16
)
XLA = DeviceProfile("tpu", ((1, 0.030), (8, 0.033), (16, 0.050)), 500, 64)


def plan(
    load: float,
    devices: tuple[DeviceProfile, ...] = (CPU, GPU, TPU),
    health: dict[str, float] | None = None,
) -> Plan:
    splitter = DynamicSplitter(devices)
    possible = 1 / splitter.plan(Demand(1.0)).load
    return splitter.plan(Demand(load * possible), Factors(health or {}))


def test_the_quickest_class_takes_all_while_there_is_hardly_any_load() -> None:
    assert all(split.shares["tpu"] == 1.0 for split in plan(0.0).splits)


def test_at_full_load_shares_are_what_the_classes_can_answer() -> None:
    full = plan(1.0)
    for split in full.splits:
        assert split.shares["gpu"] / split.shares["tpu"] == pytest.approx(0.41, abs=0.08)
    assert full.load == pytest.approx(1.0)


def test_load_moves_shares_from_the_quickest_class_to_the_others() -> None:
    shares = [plan(load).shares_of(100)["tpu"] for load in (0.2, 0.6, 0.8, 1.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[-1] + 0.2


def test_a_class_that_reads_prompts_slowly_gets_fewer_long_ones() -> None:
    slow_reader = flat("cpu", 20, 300, 32)
    quick_reader = flat("gpu", 20, 20_000, 32)
    mixed = plan(0.7, (slow_reader, quick_reader))
    shares = [split.shares["cpu"] for split in mixed.splits]
    assert shares[0] > 2 * shares[-1]
    assert shares == sorted(shares, reverse=True)


def test_a_hot_class_keeps_only_that_part_of_its_share_that_the_probe_leaves() -> None:
    cool, hot = plan(0.5), plan(0.5, health={"tpu": 0.4})
    for before, after in zip(cool.splits, hot.splits, strict=True):
        assert after.shares["tpu"] == pytest.approx(0.4 * before.shares["tpu"], abs=0.02)
        assert any("leaves tpu 0.40" in reason for reason in after.reasons)


def test_classes_that_are_all_held_back_alike_share_as_if_none_were() -> None:
    assert plan(0.8, health=dict.fromkeys(("cpu", "gpu", "tpu"), 0.4)).splits == plan(0.8).splits


def test_a_class_without_workers_or_health_gets_nothing() -> None:
    gone = replace(TPU, workers=0)
    assert plan(0.3, (CPU, GPU, gone)).shares_of(10)["tpu"] == 0.0
    assert plan(0.3, health={"tpu": 0.0}).shares_of(10)["tpu"] == 0.0


def test_a_stack_without_any_worker_still_has_a_plan() -> None:
    none = tuple(replace(device, workers=0) for device in (CPU, GPU))
    assert plan_of_none(none).shares_of(10) == {"cpu": 0.5, "gpu": 0.5}


def plan_of_none(devices: tuple[DeviceProfile, ...]) -> Plan:
    return DynamicSplitter(devices).plan(Demand(5.0))


devices = st.builds(
    lambda name, ms, rows, prefill, slots, workers: DeviceProfile(
        name, ((1, ms / 1e3), (slots + 1, ms / 1e3 * (1 + rows))), prefill, slots, workers
    ),
    st.just("cpu"),
    st.floats(0.1, 1_000),
    st.floats(0, 10),
    st.floats(10, 1e6),
    st.integers(1, 128),
    st.integers(0, 8),
)
factors = st.one_of(st.just(1.0), st.floats(0, 1))


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(devices, devices, devices),
    st.floats(0, 1e4),
    st.floats(1, 1e5),
    st.floats(1, 1e4),
    st.tuples(factors, factors, factors),
)
def test_shares_are_shares_whatever_the_devices_and_the_load(
    three: tuple[DeviceProfile, ...],
    rate: float,
    prompt: float,
    answer: float,
    health: tuple[float, ...],
) -> None:
    names = ("cpu", "gpu", "tpu")
    named = [replace(d, device_class=n) for d, n in zip(three, names, strict=True)]
    made = DynamicSplitter(named).plan(
        Demand(rate, prompt, answer), Factors(dict(zip(names, health, strict=True)))
    )
    alive = {d.device_class for d in named if d.workers and health[names.index(d.device_class)]}
    for split in made.splits:
        assert math.isclose(sum(split.shares.values()), 1.0)
        assert min(split.shares.values()) >= 0.0
        if alive:
            assert {name for name, share in split.shares.items() if share} <= alive
    assert [split.below for split in made.splits] == [50, 500, 2000, None]


def drafter(acceptance: float, device: DeviceProfile = NATIVE, name: str = "d") -> DrafterProfile:
    return DrafterProfile(name, device, 0.001, acceptance)


def test_a_drafter_is_paired_with_a_slower_class_and_overlap_brings_more_than_turns() -> None:
    [pair] = DynamicSplitter([XLA], [drafter(0.9)]).plan().pairs
    assert (pair.drafter, pair.verifier) == ("d", "tpu")
    assert pair.speedup > pair.serial_speedup > 1.5
    assert 0 < pair.covered < 1


def test_drafts_are_longer_where_more_of_them_is_accepted() -> None:
    lengths = [
        DynamicSplitter([XLA], [drafter(chance)]).plan().pairs[0].length
        for chance in (0.5, 0.8, 0.95)
    ]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_the_length_is_the_best_one_by_a_simulation_of_the_rounds() -> None:
    """Drafts drawn at random and timed round by round, where the formula expects the most."""
    import random

    chance, [pair] = 0.85, DynamicSplitter([XLA], [drafter(0.85)]).plan().pairs

    def rate(length: int) -> float:
        chooser, made, time_s, ready_s = random.Random(7), 0, 0.0, 0.0
        draft_s = length * NATIVE.step_s(1) + 0.001
        verify_s = XLA.step_s(length + 1)
        for _ in range(20_000):
            time_s = max(time_s, ready_s) + verify_s
            accepted = 0
            while accepted < length and chooser.random() < chance:
                accepted += 1
            made += accepted + 1
            is_hit = accepted == length and chooser.random() < chance
            ready_s = time_s - verify_s + draft_s if is_hit else time_s + draft_s
        return made / time_s

    best = max(rate(length) for length in range(1, 17))
    assert rate(pair.length) >= 0.98 * best
    assert pair.speedup == pytest.approx(rate(pair.length) * XLA.latency_s, rel=0.03)


def test_a_drafter_that_is_slow_or_mostly_wrong_is_left_out_with_the_reason() -> None:
    slow = DynamicSplitter([XLA], [drafter(0.8, flat("cpu", 200, 100, 8))]).plan()
    assert slow.pairs == () and "would not speed up tpu" in slow.reasons[0]
    assert DynamicSplitter([XLA], [drafter(0.02)]).plan().pairs == ()


def test_a_drafter_does_not_draft_for_its_own_class() -> None:
    made = DynamicSplitter([NATIVE], [drafter(0.95)]).plan()
    assert made.pairs == () and made.reasons == ("no drafter serves cpu",)


def test_a_drafter_drafts_only_for_the_classes_that_it_is_to_serve() -> None:
    gpu = replace(XLA, device_class="gpu")
    only = replace(drafter(0.9), serves=("gpu",))
    assert [pair.verifier for pair in DynamicSplitter([XLA, gpu], [only]).plan().pairs] == ["gpu"]


def test_busy_links_shorten_drafts_and_then_end_them() -> None:
    splitter = DynamicSplitter([XLA], [drafter(0.97)])
    free = splitter.plan().pairs[0].length
    half = splitter.plan(factors=Factors(draft=0.25)).pairs[0].length
    assert half == 4 < free
    cut = splitter.plan(factors=Factors(draft=0.0))
    assert cut.pairs == () and "none" in cut.reasons[0]


def test_many_streams_shorten_drafts_until_they_do_not_pay() -> None:
    dear = DeviceProfile("tpu", ((1, 0.030), (8, 0.033), (64, 0.30)), 200, 64)
    splitter = DynamicSplitter([dear], [drafter(0.8)])
    alone = splitter.plan(Demand(in_flight={"tpu": 1})).pairs[0].length
    crowded = splitter.plan(Demand(in_flight={"tpu": 64})).pairs
    assert not crowded or crowded[0].length < alone


def test_drafters_are_spread_over_verifiers_and_those_left_over_help_too() -> None:
    gpu = replace(XLA, device_class="gpu")
    two = DynamicSplitter([XLA, gpu], [drafter(0.9, name="a"), drafter(0.9, name="b")]).plan()
    assert {pair.drafter for pair in two.pairs} == {"a", "b"}
    assert {pair.verifier for pair in two.pairs} == {"gpu", "tpu"}
    one = DynamicSplitter([XLA, gpu], [drafter(0.9, name="a")]).plan()
    assert len(one.verifiers_of("a")) == 2, "many verifiers for one drafter"
    many = DynamicSplitter([XLA], [drafter(0.9, name=name) for name in "abc"]).plan()
    assert {pair.drafter for pair in many.drafters_of("tpu")} == set("abc")


def test_what_was_measured_replaces_what_was_expected() -> None:
    splitter = DynamicSplitter([CPU, GPU])
    assert splitter.plan().shares_of(10)["gpu"] == 1.0
    splitter.observe(CPU.measured([(1, 0.002), (2, 0.0019), (8, 0.004)], 9_000))
    assert splitter.plan().shares_of(10)["cpu"] == 1.0
    assert splitter.devices[0].curve == ((1, 0.002), (2, 0.002), (8, 0.004))
    with pytest.raises(KeyError):
        splitter.observe(TPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"curve": ()},
        {"curve": ((1, 0.0),)},
        {"curve": ((1, math.nan),)},
        {"curve": ((1, 0.1), (2, math.inf))},
        {"curve": ((2, 0.1), (1, 0.2))},
        {"curve": ((1, 0.2), (2, 0.1))},
        {"prefill_tok_s": 0.0},
        {"prefill_tok_s": math.nan},
        {"slots": 0},
    ],
)
def test_numbers_that_no_device_has_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"curve|device"):
        replace(CPU, **changes)  # type: ignore[arg-type]


def test_a_step_lies_on_the_curve_and_beyond_it_costs_what_reading_costs() -> None:
    assert NATIVE.step_s(12) == pytest.approx((0.0062 + 0.010) / 2)
    assert NATIVE.step_s(1) == NATIVE.step_s(0.5) == 0.0053
    assert NATIVE.step_s(132) == pytest.approx(0.0178 + 100 / 2_000)


WORKER = {
    "device_class": "cpu",
    "slots": 16,
    "in_flight": 3,
    "pace": {"curve": [[1, 0.005], [8, 0.006]], "prefill_tok_s": 2000.0},
}


def test_a_profile_is_read_from_what_the_workers_tell() -> None:
    found = profile("cpu", [WORKER, WORKER, {"device_class": "gpu"}])
    assert found == DeviceProfile("cpu", ((1, 0.005), (8, 0.006)), 2000.0, 16, 2, "measured")


@pytest.mark.parametrize(
    "pace",
    [
        None,
        "fast",
        {"curve": []},
        {"curve": [[1]], "prefill_tok_s": 1.0},
        {"curve": [[1, None]], "prefill_tok_s": 1.0},
        {"curve": [[1, -0.5]], "prefill_tok_s": 1.0},
        {"curve": [[0, 0.5]], "prefill_tok_s": 1.0},
        {"curve": [[1, 0.5]], "prefill_tok_s": None},
        {"curve": [[1, 0.5]], "prefill_tok_s": -3},
    ],
)
def test_a_pace_that_is_none_leaves_what_was_expected(pace: object) -> None:
    worker = WORKER | {"pace": pace}
    assert profile("cpu", [worker]) is None
    found = profile("cpu", [worker], CPU)
    assert found is not None and found.curve == CPU.curve and found.origin == "default"


def test_demand_is_the_rate_of_the_edge_and_the_mean_length_of_requests() -> None:
    edge = {"qps": {"all": 2.5}}
    found = demand(edge, [WORKER, WORKER], Traffic(100, 20_000, 5_000))
    assert found == Demand(2.5, 200.0, 50.0, {"cpu": 6})
    assert demand({}, [], Traffic(3, 9, 9)) == Demand()
