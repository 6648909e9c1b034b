"""The size of the KV cache, and when it shrinks."""

from __future__ import annotations

import pytest

from mirror_sd.memory.arenas import plan
from mirror_sd.memory.pressure import Level, MemoryPressure


@pytest.mark.parametrize(
    ("wanted", "free", "blocks", "bound"),
    [
        (1000, None, 100, "setting"),
        (9000, None, 400, "sequences"),
        (9000, 10_000, 400, "sequences"),
        (3000, 2000, 180, "device"),
        (3000, 5, 1, "device"),
        (5, None, 1, "setting"),
    ],
)
def test_the_smallest_limit_gives_the_blocks(wanted, free, blocks, bound):
    arena = plan(wanted, 10, sequences=4, blocks_per_sequence=100, free_bytes=free)
    assert (arena.blocks, arena.bound, arena.size_bytes) == (blocks, bound, 10 * blocks)


class Gauge:
    def __init__(self) -> None:
        self.now, self.used, self.reads = 0.0, 0.5, 0
        self.pressure = MemoryPressure(0.9, self.read, lambda: self.now)

    def read(self):
        self.reads += 1
        return self.used

    def at(self, used):
        self.now, self.used = self.now + 1.0, used
        return self.pressure.look()


def test_prefixes_go_first_and_then_sequences():
    gauge = Gauge()
    found = [gauge.at(used) for used in (0.5, 0.89, 0.9, 0.94, 0.95, 1.0)]
    calm, shed, preempt = Level.CALM, Level.SHED, Level.PREEMPT
    assert found == [calm, calm, shed, shed, preempt, preempt]


def test_a_level_does_not_come_and_go_with_every_reading():
    gauge = Gauge()
    gauge.at(0.96)
    assert [gauge.at(used) for used in (0.94, 0.93)] == [Level.PREEMPT] * 2
    assert [gauge.at(used) for used in (0.91, 0.88)] == [Level.SHED] * 2
    assert [gauge.at(used) for used in (0.86, 0.89)] == [Level.CALM] * 2


def test_it_is_looked_at_once_a_second():
    gauge = Gauge()
    assert gauge.at(0.5) is Level.CALM
    assert gauge.pressure.look() is None and gauge.reads == 1


def test_what_cannot_be_read_is_no_pressure():
    gauge = Gauge()
    gauge.at(0.99)
    assert gauge.at(None) is Level.CALM
