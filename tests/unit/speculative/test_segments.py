"""Long prompts read in segments: the pace of the streams beside them, in simulated time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from mirror_sd.config import EngineConfig
from mirror_sd.config_speculation import SpeculationConfig
from mirror_sd.engine import Engine
from mirror_sd.messages import Chunk, SamplingParams, Submit
from mirror_sd.speculative.cost_model import VerifyCost
from mirror_sd.speculative.segment_pace import Segment, SegmentPace
from tests.unit.speculative.hash_target import HashTarget
from tests.unit.speculative.simulation import Clock, SimTarget
from tests.unit.speculative.test_engine import make_engine, run, solo, submit

LONG = 6000


class Reader(SimTarget):
    """A context beyond what the streams have is read once in a forward, and weighs on each row."""

    def __init__(self, clock, cost):
        super().__init__(clock, cost)
        self.batches = []

    def forward(self, batch):
        counts = np.diff(batch.sequence_offsets)
        ends = batch.positions[batch.sequence_offsets[1:] - 1]
        beyond = np.maximum(ends - 3000, 0)
        self.clock.now += float((7e-7 * beyond + 3e-7 * beyond * counts).sum())
        self.batches.append(dict(zip(ends.tolist(), counts.tolist(), strict=True)))
        return super().forward(batch)


def cost(rows):
    return 5e-3 + 5e-4 * max(rows - 4, 0)


class Floor:
    """Eight streams that never end, and what is added beside them."""

    def __init__(self, streams=8, **engine):
        self.clock = Clock()
        self.target = Reader(self.clock, cost)
        self.engine = Engine(
            self.target,
            EngineConfig(prefix_reuse=False, kv_cache_mb=8, **engine),
            SpeculationConfig(enabled=False),
            model_name="m",
            device_class="cpu",
            slots=streams + 4,
            clock=self.clock,
        )
        self.engine.warm_up()
        for i in range(streams):
            self.add(f"stream-{i}", [i] * 100, 20_000)

    def add(self, name, prompt, max_tokens=4):
        params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
        self.engine.add(Submit(request_id=name, model="m", prompt=tuple(prompt), params=params))

    def steps(self, until=None, count=10_000):
        """Seconds of each step until `until` has a token."""
        taken = []
        for _ in range(count):
            begin = self.clock.now
            outputs = self.engine.step()
            taken.append(self.clock.now - begin)
            if any(isinstance(o, Chunk) and o.request_id == until for o in outputs):
                return taken
        assert until is None, f"{until} has no token after {count} steps"
        return taken


def test_streams_keep_their_pace_while_a_long_prompt_is_read():
    floor = Floor()
    floor.steps(count=100)
    alone = np.percentile(floor.steps(count=200), 99)
    floor.add("long", [7] * LONG)
    beside = floor.steps("long")
    assert np.percentile(beside, 99) < 2 * alone
    # The pace is used: token by token it would take thousands of steps.
    assert len(beside) < LONG / 3
    assert np.mean(beside) > 1.4 * alone


def test_a_pace_that_is_set_is_kept():
    for pace in (1.2, 3.0):
        floor = Floor(segment_pace=pace)
        alone = np.mean(floor.steps(count=200)[-100:])
        floor.add("long", [7] * 3000)
        beside = floor.steps("long")
        assert np.median(beside) == pytest.approx(pace * alone, rel=0.1)


def test_a_long_prompt_with_nobody_beside_it_is_read_in_whole_chunks():
    floor = Floor(streams=0)
    floor.add("long", [7] * LONG)
    floor.steps("long")
    assert len(floor.target.batches) - 17 * 2 - 1 <= -(-LONG // 256) + 1


def test_a_short_prompt_does_not_wait_for_a_long_one():
    floor = Floor()
    floor.steps(count=50)
    floor.add("long", [7] * LONG)
    floor.steps(count=5)
    floor.add("short", [9] * 200)
    assert len(floor.steps("short")) <= 2


def test_of_two_long_prompts_one_is_read_after_the_other():
    floor = Floor()
    floor.steps(count=50)
    floor.add("first", [7] * 3000)
    floor.add("second", [9] * 3000)
    floor.steps("first")
    assert floor.engine.stats().running == 10
    assert max(end for end in floor.target.batches[-1]) >= 2999
    floor.steps("second")


@pytest.mark.parametrize("speculation", [False, True])
def test_segments_change_no_token(speculation):
    engine = Engine(
        HashTarget(memory=1),
        EngineConfig(block_size=4, kv_cache_mb=200, prefill_chunk=16, segment_above=20),
        SpeculationConfig(enabled=speculation, ngram_min=1, max_tokens=8),
        model_name="m",
        device_class="cpu",
        slots=4,
    )
    items = [
        submit(f"r{i}", prompt=[(i + j * j) % 64 for j in range(length)], max_tokens=40)
        for i, length in enumerate((3, 150, 18, 90, 5, 70))
    ]
    tokens, _ = run(engine, items)
    for item in items:
        assert tokens[item.request_id] == solo(item, memory=1)


def test_a_long_prompt_is_read_where_blocks_are_short():
    items = [submit(f"r{i}", prompt=[i] * n, max_tokens=30) for i, n in enumerate((4, 40, 40))]
    engine = make_engine(blocks=22, slots=3, memory=1, chunk=16)
    engine._segment_above = 20
    tokens, _ = run(engine, items)
    for item in items:
        assert tokens[item.request_id] == solo(item, memory=1)


def known_cost():
    found = VerifyCost()
    for rows in (1, 8, 24, 64):
        for _ in range(3):
            found.observe(rows, cost(rows))
    return found


def test_a_segment_is_what_the_spare_time_pays_for():
    pace = SegmentPace(2.0, known_cost())
    spare = cost(8) / 5e-4
    assert pace.tokens(8, 0) == pytest.approx(spare, abs=1.5)
    slow = SegmentPace(2.0, known_cost())
    for _ in range(100):
        slow.observe(Segment(8, 5000, 8), cost(8) + 8 * 5e-3)
    assert slow.tokens(8, 5000) == 1
    assert slow.tokens(8, 9000) == 1, "further on it takes at least as long"
    assert slow.tokens(8, 0) > 4, "nearer the beginning it does not"


def test_one_slow_step_does_not_stop_the_reading():
    pace = SegmentPace(1.5, known_cost())
    before = pace.tokens(8, 0)
    pace.observe(Segment(before, 0, 8), 10.0)
    assert pace.tokens(8, 0) >= before // 2


def test_a_step_without_a_segment_comes_now_and_then():
    pace = SegmentPace(1.5, known_cost())
    given = [pace.tokens(8, 0) for _ in range(64)]
    assert given.count(0) == 4 and all(a or b for a, b in pairwise(given))


def test_before_anything_is_known_a_segment_is_short():
    assert SegmentPace(1.6, VerifyCost()).tokens(8, 0) == 16
