"""Alerts fire once, resolve once, and need their reason for a while."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from mirror_sd.config import ProbeConfig
from ops.alerting import RULES, Alert, AlertBook, Observation, observe
from ops.first_workers import FirstWorkers
from ops.readings import ClassReading, DeviceReading, ServiceReading, StackReading

CONFIG = ProbeConfig()


def stack(
    device: DeviceReading | None = None,
    service: ServiceReading | None = None,
    workers: int = 1,
) -> StackReading:
    item = ClassReading(device=device or DeviceReading(), workers=workers)
    return StackReading(0.0, {"gpu": item}, service or ServiceReading())


def changes(
    book: AlertBook, reading: StackReading, begin: int, seconds: int, level: int = 0
) -> list[tuple[int, Alert]]:
    found = []
    for now in range(begin, begin + seconds):
        seen = observe(reading, CONFIG, level, stale_s=0.0)
        found += [(now, alert) for alert in book.update(float(now), seen)]
    return found


BAD = {
    "MirrorDraftsRejected": stack(service=ServiceReading(rejection_rate=0.4)),
    "MirrorDeviceHot": stack(DeviceReading(temperature_c=86.0)),
    "MirrorMemoryPressure": stack(DeviceReading(memory_pressure=0.95)),
    "MirrorTailLatency": stack(service=ServiceReading(inter_token_p99_s=0.4)),
    "MirrorWorkerRestarts": stack(service=ServiceReading(worker_restarts={"gpu": 3.0})),
    "MirrorNoWorker": stack(workers=0),
}
WELL = stack(
    DeviceReading(temperature_c=60.0, memory_pressure=0.2),
    ServiceReading(inter_token_p99_s=0.02, rejection_rate=0.05, worker_restarts={"gpu": 0.0}),
)


@pytest.mark.parametrize("name", BAD)
def test_alert_fires_once_and_resolves_once(name: str) -> None:
    book = AlertBook()
    assert changes(book, WELL, 0, 100) == []
    fired = changes(book, BAD[name], 100, 300)
    assert [(alert.name, alert.state) for _, alert in fired] == [(name, "firing")]
    assert fired[0][0] == 100 + RULES[name].for_s
    assert book.firing() == {rule: int(rule == name) for rule in RULES}
    resolved = changes(book, WELL, 400, 300)
    assert [(alert.name, alert.state) for _, alert in resolved] == [(name, "resolved")]
    assert resolved[0][0] == 400 + RULES[name].clear_s
    assert sum(book.firing().values()) == 0


def test_degradation_is_told_at_each_end() -> None:
    book = AlertBook()
    assert [a.state for _, a in changes(book, WELL, 0, 5, level=2)] == ["firing"]
    assert [a.state for _, a in changes(book, WELL, 5, 5, level=0)] == ["resolved"]


def test_edge_that_takes_nothing_is_told() -> None:
    book = AlertBook()
    told = [
        (second, alert.state)
        for second in range(30)
        for alert in book.update(
            float(second), observe(WELL, CONFIG, 0, stale_s=float(second) if second < 10 else 0.0)
        )
    ]
    assert told == [(6, "firing"), (15, "resolved")]


def test_value_that_trembles_about_its_threshold_alerts_once() -> None:
    book = AlertBook()
    found: list[tuple[int, Alert]] = []
    for begin in range(0, 600, 2):
        found += changes(book, BAD["MirrorDeviceHot"], begin, 1)
        found += changes(book, stack(DeviceReading(temperature_c=84.0)), begin + 1, 1)
    # Never hot for two seconds together, or hot all the time: once at most.
    assert len(found) <= 1


def test_short_trouble_is_no_alert() -> None:
    book = AlertBook()
    for begin in range(0, 600, 20):
        assert changes(book, BAD["MirrorDraftsRejected"], begin, 15) == []
        assert changes(book, WELL, begin + 15, 5) == []


def test_classes_alert_apart() -> None:
    hot, cool = (Observation(value, 85.0, value >= 85, value < 80) for value in (90.0, 40.0))
    seen: Mapping[tuple[str, str], Observation] = {
        ("MirrorDeviceHot", "gpu"): hot,
        ("MirrorDeviceHot", "tpu"): hot,
        ("MirrorDeviceHot", "cpu"): cool,
    }
    book = AlertBook()
    fired = [alert for second in range(5) for alert in book.update(float(second), seen)]
    assert sorted(alert.subject for alert in fired) == ["gpu", "tpu"]
    assert book.firing()["MirrorDeviceHot"] == 2


def test_what_is_not_seen_neither_fires_nor_resolves() -> None:
    book = AlertBook()
    changes(book, BAD["MirrorDeviceHot"], 0, 10)
    blind = StackReading(0.0, {})
    assert changes(book, blind, 10, 600) == []
    assert book.firing()["MirrorDeviceHot"] == 1


def test_alert_is_told_in_words_and_in_json() -> None:
    alert = Alert("MirrorDeviceHot", "gpu", "firing", 86.25, 85.0)
    assert alert.summary == "class gpu is too hot: 86.2 C, the limit is 85 C"
    document = json.loads(json.dumps(alert.to_json(1700000000.1234, "127.0.0.1:8080")))
    assert document == {
        "alert": "MirrorDeviceHot",
        "class": "gpu",
        "state": "firing",
        "value": 86.25,
        "threshold": 85.0,
        "summary": alert.summary,
        "at": 1700000000.123,
        "source": "127.0.0.1:8080",
    }


@pytest.mark.parametrize(
    ("name", "value", "threshold", "firing", "resolved"),
    [
        (
            "MirrorDraftsRejected",
            0.486,
            0.4,
            "48.6% of the draft tokens are rejected, the limit is 40%",
            "draft tokens are accepted again: 48.6% are rejected, the limit is 40%",
        ),
        (
            "MirrorDeviceHot",
            91.0,
            85.0,
            "class gpu is too hot: 91 C, the limit is 85 C",
            "class gpu has cooled to 91 C, the limit is 85 C",
        ),
        (
            "MirrorMemoryPressure",
            0.95,
            0.9,
            "the memory of class gpu is 95% full, the limit is 90%",
            "the memory of class gpu has room again: it is 95% full, the limit is 90%",
        ),
        (
            "MirrorTailLatency",
            0.486,
            0.2,
            "tokens come too slowly: the p99 between two is 486 ms, the limit is 200 ms",
            "tokens no longer come too slowly, the limit is 200 ms",
        ),
        (
            "MirrorTailLatency",
            12.3456,
            0.2,
            "tokens come too slowly: the p99 between two is 12346 ms, the limit is 200 ms",
            "tokens no longer come too slowly, the limit is 200 ms",
        ),
        (
            "MirrorDegraded",
            1,
            1,
            "service is degraded, level 1 of 3",
            "service is no longer degraded",
        ),
        (
            "MirrorWorkerRestarts",
            3.0,
            3.0,
            "workers of class gpu keep dying: 3 in 10 minutes",
            "workers of class gpu no longer keep dying: 3 in 10 minutes",
        ),
        (
            "MirrorNoWorker",
            0,
            1.0,
            "class gpu has no live worker",
            "class gpu has a live worker again",
        ),
        (
            "MirrorProbeStale",
            5.8,
            5.0,
            "the edge has taken no weights from the probe for 5.8 s, the limit is 5 s",
            "the edge takes weights from the probe again",
        ),
    ],
)
def test_alert_texts_are_plain_and_have_units(
    name: str, value: float, threshold: float, firing: str, resolved: str
) -> None:
    assert Alert(name, "gpu", "firing", value, threshold).summary == firing
    assert Alert(name, "gpu", "resolved", value, threshold).summary == resolved


def no_worker(workers_at: Mapping[int, int], seconds: int) -> list[tuple[int, str]]:
    """What is told of a class that has so many workers from each second on, none before."""
    book, first, workers = AlertBook(), FirstWorkers(), 0
    told: list[tuple[int, str]] = []
    for now in range(seconds):
        workers = workers_at.get(now, workers)
        reading = stack(workers=workers)
        awaited = first.awaited(float(now), reading.classes)
        seen = observe(reading, CONFIG, 0, 0.0, awaited)
        told += [(now, alert.state) for alert in book.update(float(now), seen)]
    return told


def test_class_whose_first_worker_still_loads_is_no_page() -> None:
    assert no_worker({59: 1}, 300) == []


def test_class_that_never_gets_a_worker_is_told_after_its_first_minute() -> None:
    assert no_worker({}, 300) == [(65, "firing")]


def test_class_that_loses_its_worker_soon_after_the_start_is_told_at_once() -> None:
    assert no_worker({10: 1, 20: 0, 40: 1}, 300) == [(25, "firing"), (45, "resolved")]
