"""The weights by themselves, and against simulated devices that answer late."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Mapping

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mirror_sd.config import ProbeConfig
from ops.device_weights import DeviceWeights
from ops.readings import ClassReading, DeviceReading
from ops.relief import Relief

CONFIG = ProbeConfig()


def reading(workers: int = 1, **device: float | bool) -> ClassReading:
    return ClassReading(device=DeviceReading(**device), workers=workers, slots=8)  # type: ignore[arg-type]


def run(
    weights: DeviceWeights,
    seconds: int,
    classes: Mapping[str, ClassReading],
    begin: float = 0.0,
) -> Mapping[str, float]:
    for second in range(seconds):
        result = weights.update(begin + second, classes)
    return result.factors


def test_calm_classes_keep_all_their_traffic() -> None:
    weights = DeviceWeights(["cpu", "gpu"], CONFIG)
    calm = reading(utilisation=0.5, temperature_c=60.0, memory_pressure=0.5)
    assert run(weights, 60, {"cpu": calm, "gpu": calm}) == {"cpu": 1.0, "gpu": 1.0}


def test_hot_class_gives_up_most_at_once_and_more_while_it_stays_hot() -> None:
    weights = DeviceWeights(["cpu", "gpu"], CONFIG)
    hot = {"cpu": reading(temperature_c=60.0), "gpu": reading(temperature_c=86.0)}
    assert weights.update(0.0, hot).factors == {"cpu": 1.0, "gpu": 0.4}
    assert weights.update(1.0, hot).causes == {"gpu": ("heat",)}
    assert run(weights, 60, hot, 2.0)["gpu"] == pytest.approx(0.1)


def test_class_between_cool_and_hot_stays_as_it_is() -> None:
    weights = DeviceWeights(["gpu"], CONFIG)
    run(weights, 1, {"gpu": reading(temperature_c=85.0)})
    assert run(weights, 300, {"gpu": reading(temperature_c=82.0)}, 1.0) == {"gpu": 0.4}


def test_cooled_class_gets_all_of_its_traffic_back() -> None:
    weights = DeviceWeights(["gpu"], CONFIG)
    run(weights, 4, {"gpu": reading(temperature_c=86.0)})
    cooled = [run(weights, 1, {"gpu": reading(temperature_c=70.0)}, 4.0 + s) for s in range(8)]
    factors = [step["gpu"] for step in cooled]
    assert factors == sorted(factors)
    assert factors[-1] == 1.0


def test_device_that_throttles_itself_is_hot_whatever_its_sensor_says() -> None:
    weights = DeviceWeights(["gpu"], CONFIG)
    assert run(weights, 1, {"gpu": reading(temperature_c=40.0, is_throttled=True)})["gpu"] == 0.4
    other = DeviceWeights(["gpu"], CONFIG)
    assert run(other, 1, {"gpu": reading(is_throttled=True)})["gpu"] == 0.4


def test_full_memory_gives_up_traffic_likewise() -> None:
    weights = DeviceWeights(["cpu", "gpu"], CONFIG)
    full = {"cpu": reading(memory_pressure=0.95), "gpu": reading(memory_pressure=0.2)}
    assert run(weights, 1, full) == {"cpu": 0.4, "gpu": 1.0}
    free = {"cpu": reading(memory_pressure=0.8), "gpu": reading(memory_pressure=0.2)}
    assert run(weights, 10, free, 1.0)["cpu"] == 1.0


def test_sensor_that_falls_silent_does_not_hold_traffic_back_for_ever() -> None:
    weights = DeviceWeights(["gpu"], CONFIG)
    run(weights, 1, {"gpu": reading(temperature_c=90.0)})
    assert run(weights, 9, {"gpu": reading()}, 1.0)["gpu"] == 0.4
    assert run(weights, 30, {"gpu": reading()}, 10.0)["gpu"] == 1.0


def test_class_without_workers_gets_nothing_while_another_has_one() -> None:
    weights = DeviceWeights(["cpu", "gpu"], CONFIG)
    assert run(weights, 1, {"cpu": reading(), "gpu": reading(workers=0)}) == {
        "cpu": 1.0,
        "gpu": 0.0,
    }
    assert run(weights, 1, {"cpu": reading(workers=0)}, 1.0) == {"cpu": 1.0, "gpu": 1.0}


def test_class_whose_workers_start_late_gets_its_traffic_with_the_first_of_them() -> None:
    weights = DeviceWeights(["cpu", "gpu"], CONFIG)
    assert run(weights, 30, {"cpu": reading(), "gpu": reading(workers=0)})["gpu"] == 0.0
    assert run(weights, 1, {"cpu": reading(), "gpu": reading()}, 30.0)["gpu"] == 1.0


def test_class_whose_workers_died_gets_its_traffic_back_by_and_by() -> None:
    weights = DeviceWeights(["cpu", "gpu"], CONFIG)
    both, one = {"cpu": reading(), "gpu": reading()}, {"cpu": reading(), "gpu": reading(workers=0)}
    run(weights, 5, both)
    assert run(weights, 1, one, 5.0)["gpu"] == 0.0
    seen = [run(weights, 1, both, 6.0 + second)["gpu"] for second in range(10)]
    assert seen[0] == pytest.approx(0.5)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_class_whose_workers_keep_dying_gets_less_each_time() -> None:
    weights = DeviceWeights(["cpu", "gpu"], CONFIG)
    both, one = {"cpu": reading(), "gpu": reading()}, {"cpu": reading(), "gpu": reading(workers=0)}
    run(weights, 5, both)
    best = []
    for begin in range(5, 105, 20):
        run(weights, 1, one, float(begin))
        best.append(run(weights, 19, both, begin + 1.0)["gpu"])
    assert best[0] == 1.0
    assert best == sorted(best, reverse=True)
    assert best[-1] < 0.6
    # The other class's factor is its own.
    assert run(weights, 1, both, 200.0)["cpu"] == 1.0


def test_busy_pcie_link_lowers_drafting_across_devices_and_frees_it_again() -> None:
    weights = DeviceWeights(["gpu"], CONFIG)
    assert weights.update(0.0, {"gpu": reading(pcie=0.5)}).draft_factor == 1.0
    busy = weights.update(1.0, {"gpu": reading(pcie=0.9)})
    assert busy.draft_factor == 0.4
    assert busy.factors == {"gpu": 1.0}
    assert weights.update(2.0, {"gpu": reading(pcie=0.7)}).draft_factor == 0.4
    assert weights.update(20.0, {"gpu": reading(pcie=0.3)}).draft_factor == 1.0


def test_gap_within_the_limit_moves_nothing() -> None:
    weights = DeviceWeights(["cpu", "gpu"], CONFIG)
    within = {"cpu": reading(utilisation=0.9), "gpu": reading(utilisation=0.65)}
    assert run(weights, 600, within) == {"cpu": 1.0, "gpu": 1.0}


def test_gap_beyond_the_limit_moves_traffic_by_rare_small_steps() -> None:
    weights = DeviceWeights(["cpu", "gpu"], CONFIG)
    beyond = {"cpu": reading(utilisation=0.95), "gpu": reading(utilisation=0.3)}
    factors = [weights.update(float(s), beyond).factors["cpu"] for s in range(30)]
    steps = [after / before for before, after in itertools.pairwise(factors)]
    assert factors[-1] < 0.5
    assert min(steps) >= 0.85
    # One step in two seconds at most.
    assert sum(step < 1 for step in steps) <= 15


def test_class_that_is_only_busy_stays_healthy_and_a_hot_one_does_not() -> None:
    weights = DeviceWeights(["cpu", "gpu"], CONFIG)
    beyond = {"cpu": reading(utilisation=0.95), "gpu": reading(utilisation=0.3)}
    run(weights, 30, beyond)
    busy = weights.update(31.0, beyond)
    assert busy.factors["cpu"] < busy.health["cpu"] == 1.0
    hot = weights.update(32.0, {"cpu": reading(temperature_c=90.0), "gpu": reading(workers=0)})
    assert hot.health["cpu"] <= 0.4
    assert hot.health["gpu"] == 0.0


def test_heat_relief_is_not_undone_by_the_balance() -> None:
    weights = DeviceWeights(["cpu", "gpu"], CONFIG)
    # The hot class is less busy because traffic was taken from it.
    hot = {
        "cpu": reading(utilisation=0.95, temperature_c=60.0),
        "gpu": reading(utilisation=0.2, temperature_c=86.0),
    }
    factors = run(weights, 60, hot)
    assert factors["cpu"] == 1.0
    assert factors["gpu"] == pytest.approx(0.1)


any_share = st.one_of(st.none(), st.floats(0, 1))
any_reading = st.builds(
    ClassReading,
    device=st.builds(
        DeviceReading,
        temperature_c=st.one_of(st.none(), st.floats(-50, 150)),
        utilisation=any_share,
        memory_pressure=any_share,
        pcie=any_share,
        is_throttled=st.booleans(),
    ),
    workers=st.integers(0, 3),
)
moments = st.lists(
    st.tuples(
        st.floats(-5, 3600), st.dictionaries(st.sampled_from(["cpu", "gpu", "tpu"]), any_reading)
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(moments)
def test_factors_are_numbers_from_0_to_1_whatever_is_read(
    steps: list[tuple[float, dict[str, ClassReading]]],
) -> None:
    weights = DeviceWeights(["cpu", "gpu", "tpu"], CONFIG)
    now = 0.0
    for elapsed, classes in steps:
        now += elapsed
        result = weights.update(now, classes)
        for factor in (*result.factors.values(), result.draft_factor):
            assert math.isfinite(factor) and 0.0 <= factor <= 1.0
        alive = [name for name, item in classes.items() if item.workers]
        assert all(result.factors[name] >= 0.1 * 0.1 * 0.25 for name in alive)


# Simulations. A device answers late; what matters is that the rule comes to rest.


def turns(values: list[float], least: float) -> int:
    """How often the direction changes, swings smaller than `least` left out."""
    count, direction, extreme = 0, 0, values[0]
    for value in values:
        if direction >= 0 and value < extreme - least:
            count, direction, extreme = count + (direction > 0), -1, value
        elif direction <= 0 and value > extreme + least:
            count, direction, extreme = count + (direction < 0), 1, value
        elif direction > 0:
            extreme = max(extreme, value)
        elif direction < 0:
            extreme = min(extreme, value)
    return count


def heated(
    relief: Relief, ambient_c: float, load_c: float, lag_s: float, seconds: int
) -> list[float]:
    """Factors against a device that load warms by `load_c` at most, with a lag."""
    degrees = ambient_c
    factors = []
    for second in range(seconds):
        factor = relief.update(float(second), degrees)
        degrees += (ambient_c + load_c * factor - degrees) / lag_s
        factors.append(factor)
    return factors


@settings(max_examples=60, deadline=None)
@given(ambient=st.floats(25, 50), load=st.floats(20, 80), lag=st.floats(3, 60))
# Its ceiling was one at which it reached the limit only after minutes.
@example(ambient=48.1875, load=48.125, lag=49.0)
# Without a ceiling it does so too.
@example(ambient=32.773, load=52.257, lag=38.22)
def test_heat_that_answers_late_does_not_swing_for_ever(
    ambient: float, load: float, lag: float
) -> None:
    factors = heated(Relief(85.0, 80.0), ambient, load, lag, 7200)
    first, last = factors[:3600], factors[3600:]
    assert turns(last, 0.05) <= turns(first, 0.05) + 2
    assert turns(last, 0.05) <= 8, "an hour after the start it swings at most four times an hour"


def test_device_that_can_never_cool_gets_the_least() -> None:
    assert heated(Relief(85.0, 80.0), 90.0, 10.0, 10.0, 100)[-1] == pytest.approx(0.1)


def balanced(
    load: float,
    capacity: Mapping[str, float],
    policy: Mapping[str, float],
    delay: int,
    noise: Callable[[], float],
    seconds: int,
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Factors and utilisation of classes that serve their share of `load`, `delay` seconds late."""
    weights = DeviceWeights(list(capacity), CONFIG)
    late = deque([dict.fromkeys(capacity, 1.0)] * (delay + 1))
    factors, utilisation = [], []
    for second in range(seconds):
        in_force = late.popleft()
        total = sum(policy[name] * in_force[name] for name in capacity)
        busy = {
            name: min(load * policy[name] * in_force[name] / total / capacity[name], 1.0)
            for name in capacity
        }
        seen = {
            name: reading(utilisation=min(max(value + noise(), 0.0), 1.0))
            for name, value in busy.items()
        }
        late.append(dict(weights.update(float(second), seen).factors))
        factors.append(late[-1])
        utilisation.append(busy)
    return factors, utilisation


@settings(max_examples=80, deadline=None)
@given(
    load=st.floats(10, 300),
    cpu=st.floats(10, 100),
    gpu=st.floats(10, 300),
    tpu=st.floats(10, 300),
    weight=st.floats(0.2, 0.8),
    delay=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_balance_comes_to_rest_whatever_the_load_and_the_delay(
    load: float, cpu: float, gpu: float, tpu: float, weight: float, delay: int, seed: int
) -> None:
    source = random.Random(seed)
    factors, _ = balanced(
        load,
        {"cpu": cpu, "gpu": gpu, "tpu": tpu},
        {"cpu": weight, "gpu": 1 - weight, "tpu": 0.3},
        delay,
        lambda: source.gauss(0, 0.02),
        400,
    )
    for name in ("cpu", "gpu", "tpu"):
        settled = [step[name] for step in factors[200:]]
        assert turns(settled, 0.08) <= 2, settled


@pytest.mark.parametrize("delay", [0, 3])
def test_balance_closes_a_gap_that_it_can_close(delay: int) -> None:
    # The policy gives the small class most: 0.7 x 60 / 45 is 93 % busy, the large one 18 %.
    _, utilisation = balanced(
        60.0, {"cpu": 45.0, "gpu": 100.0}, {"cpu": 0.7, "gpu": 0.3}, delay, lambda: 0.0, 200
    )
    assert utilisation[0]["cpu"] - utilisation[0]["gpu"] > 0.7
    assert abs(utilisation[-1]["cpu"] - utilisation[-1]["gpu"]) <= CONFIG.utilisation_gap


def test_balance_forgets_when_nothing_is_busy() -> None:
    weights = DeviceWeights(["cpu", "gpu"], CONFIG)
    run(weights, 60, {"cpu": reading(utilisation=1.0), "gpu": reading(utilisation=0.1)})
    idle = {"cpu": reading(utilisation=0.05), "gpu": reading(utilisation=0.05)}
    assert run(weights, 120, idle, 60.0) == {"cpu": 1.0, "gpu": 1.0}
