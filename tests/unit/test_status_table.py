"""The tables of `mirror-sd status`, and the document they are made of."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from mirror_sd.errors import SetupError
from mirror_sd.status_table import render, watch
from mirror_sd.supervisor.stack_status import class_entry

STATE = {
    "running": 4,
    "workers": [
        {"device_class": "gpu", "slots": 32, "in_flight": 3},
        {"device_class": "gpu", "slots": 32, "in_flight": 1},
        {"device_class": "cpu", "slots": 16, "in_flight": 0},
    ],
    "queues": [
        {"device_class": "gpu", "tier": "vip", "depth": 1, "oldest_wait_s": 0.25},
        {"device_class": "gpu", "tier": "standard", "depth": 7, "oldest_wait_s": 2.5},
    ],
}
EDGE = {
    "factors": {"cpu": 1, "gpu": 0.5},
    "effective_weights": [
        {"below": 50, "shares": {"cpu": 0.82, "gpu": 0.18}},
        {"shares": {"gpu": 1}},
    ],
}
WEIGHTS = {"classes": {"gpu": {"factor": 0.5, "temperature_c": 86.4, "utilisation": 0.97}}}


def entries() -> list[dict[str, Any]]:
    return [
        class_entry("cpu", False, STATE, EDGE, WEIGHTS),
        class_entry("gpu", True, STATE, EDGE, WEIGHTS),
    ]


def document(**other: Any) -> dict[str, Any]:
    return {
        "processes": [
            {"role": "supervisor", "pid": 10, "rss_mb": 50.5},
            {"role": "worker", "pid": 11, "rss_mb": 400.0, "class": "gpu", "peak_mb": 512.5}
            | {"allocator": "jemalloc"},
        ],
        "running": 4,
        "waiting": 8,
        "kv_blocks_used": 10,
        "kv_blocks_free": 90,
        "kv_blocks_peak": 70,
        "workers": STATE["workers"],
        "classes": entries(),
        "degrade_level": 2,
        "weights_age_s": 0.4,
        "weights_stale": False,
        "draining": False,
        **other,
    }


def lines(shown: dict[str, Any]) -> list[str]:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(render(shown))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_class_has_what_broker_probe_and_edge_know_of_it() -> None:
    assert entries()[1] == {
        "class": "gpu",
        "emulated": True,
        "workers": 2,
        "slots": 64,
        "in_flight": 4,
        "queued": {"vip": 1, "standard": 7},
        "oldest_wait_s": 2.5,
        "temperature_c": 86.4,
        "utilisation": 0.97,
        "memory_pressure": None,
        "factor": 0.5,
        "weight": [{"below": 50, "share": 0.18}, {"below": None, "share": 1}],
    }
    assert entries()[0]["weight"] == [{"below": 50, "share": 0.82}, {"below": None, "share": 0.0}]


def test_tables_show_each_class_and_each_process() -> None:
    shown = lines(document())
    assert shown[0] == (
        "running 4 · waiting 8 · KV blocks 10 of 100 · degradation 2 · weights 0.4 s old"
    )
    # It fits into 80 columns.
    assert "vip std. <50" in shown
    assert "class live in flight wait wait oldest temp. busy mem. factor tok more" in shown
    assert "cpu 1 0/16 - - - - - - 1.00 82% 0%" in shown
    assert "gpu emulated 2 4/64 1 7 2.5 s 86 C 97% - 0.50 18% 100%" in shown
    assert "last columns: shares of standard requests by prompt" in shown
    assert "supervisor 10 50.5" in shown
    assert "worker gpu 11 400.0 512.5 jemalloc" in shown


def test_what_nobody_tells_is_a_dash() -> None:
    unknown = class_entry("cpu", False, {}, {}, {})
    silent = dict.fromkeys(
        (
            "running",
            "waiting",
            "kv_blocks_used",
            "kv_blocks_free",
            "workers",
            "degrade_level",
            "weights_age_s",
            "weights_stale",
            "draining",
        )
    )
    shown = lines(document(**silent, classes=[unknown]))
    assert shown[0] == "running - · waiting - · KV blocks - · degradation -"
    assert "cpu - -/- - - - - - - -" in shown


def test_stale_weights_and_draining_are_told() -> None:
    shown = " ".join(lines(document(weights_stale=True, draining=True)))
    assert "weights stale · draining" in shown


def test_watching_shows_each_reading_until_the_stack_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mirror_sd.status_table._EVERY_S", 0.01)
    running = iter(range(5))

    def read() -> dict[str, Any]:
        try:
            return document(running=next(running))
        except StopIteration:
            raise SetupError("no stack runs on port 1") from None

    console = Console(file=io.StringIO(), width=130, force_terminal=True, color_system=None)
    with pytest.raises(SetupError, match="no stack runs"):
        watch(read, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert [f"running {count}" in text for count in range(5)] == [True] * 5


def test_watching_prints_a_block_for_each_reading_where_the_output_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mirror_sd.status_table._EVERY_S", 0.01)
    console = Console(file=io.StringIO(), width=80)
    assert isinstance(console.file, io.StringIO)
    readings = iter(range(3))
    seen = []

    def read() -> dict[str, Any]:
        assert isinstance(console.file, io.StringIO)
        seen.append(console.file.getvalue().count("running "))
        for count in readings:
            return document(running=count)
        raise KeyboardInterrupt

    watch(read, console)
    # Each is there before the next is read, with an empty line between them.
    assert seen == [0, 1, 2, 3]
    assert "\n\nrunning 1 · " in console.file.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_watching_ends_by_an_interrupt(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirror_sd.status_table._EVERY_S", 0.01)
    readings = iter([document()])

    def read() -> dict[str, Any]:
        for reading in readings:
            return reading
        raise KeyboardInterrupt

    watch(read, Console(file=io.StringIO(), force_terminal=is_terminal))
