from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.samples import Sample

from mirror_sd import telemetry
from mirror_sd.serving.token_meter import Tally, TokenMeter
from tests.unit.scheduler.test_priority_queue import Clock

BOUNDS = (0.001, 0.01, 0.1, 1)


def samples(histogram: Histogram) -> list[tuple[str, dict[str, str], float]]:
    def described(sample: Sample) -> tuple[str, dict[str, str], float]:
        return sample.name, sample.labels, round(sample.value, 9)

    # When it was made differs, nothing else may.
    [metric] = histogram.collect()
    return [described(sample) for sample in metric.samples if not sample.name.endswith("_created")]


def test_a_tally_leaves_what_single_observations_leave() -> None:
    rng = random.Random(3)
    single = Histogram("gap", "", buckets=BOUNDS, registry=CollectorRegistry())
    tallied = Histogram("gap", "", buckets=BOUNDS, registry=CollectorRegistry())
    tally = Tally(tallied)
    for _ in range(5):
        for value in (*BOUNDS, *(10 ** rng.uniform(-4, 1) for _ in range(50))):
            times = rng.randrange(1, 9)
            tally.observe(value, times)
            for _ in range(times):
                single.observe(value)
        tally.flush()
        assert samples(tallied) == samples(single)
    tally.flush()
    assert samples(tallied) == samples(single), "nothing is written twice"


def test_a_long_request_is_seen_before_it_ends() -> None:
    clock = Clock()
    counted = telemetry.COMPLETION_TOKENS.labels("tpu")._value
    meter = TokenMeter("tpu", "standard", clock.now, clock)
    begin = counted.get()
    last_at = None
    for _ in range(30):
        clock.now += 0.1
        last_at = meter.arrived(1, last_at)
        meter.delivered(1)
    assert 20 <= counted.get() - begin <= 30
    meter.flush()
    assert counted.get() - begin == 30
