"""A draft head in the engine: it gets what its contract says, and never changes a token."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror_sd.backends.protocol import DraftBatch
from mirror_sd.config import EngineConfig
from mirror_sd.config_speculation import SpeculationConfig
from mirror_sd.engine import Engine
from mirror_sd.messages import Chunk, Finished
from tests.unit.speculative.hash_target import HashTarget
from tests.unit.speculative.test_engine import free_time, run, solo, submit

WIDTH = 3
BLOCK = 4


def feature(token, position, layer):
    return (token + 1, position, layer)


class TappedTarget(HashTarget):
    def __init__(self, **fields):
        super().__init__(**fields)
        self.capabilities = replace(self.capabilities, num_layers=4, hidden_size=WIDTH)
        self.tapped = ()

    def tap(self, layers):
        self.tapped = tuple(layers)

    def forward(self, batch):
        self.features = np.array(
            [
                [x for layer in self.tapped for x in feature(token, position, layer)]
                for token, position in zip(
                    batch.token_ids.tolist(), batch.positions.tolist(), strict=True
                )
            ],
            np.float32,
        ).reshape(len(batch.token_ids), len(self.tapped) * WIDTH)
        return super().forward(batch)


class CheckedHead:
    """Drafts the target's own token with probability `skill`. Holds the engine to the contract: no
    gap in what it took in, the tokens of the target, each with the feature of the one before."""

    taps = (1, 3)

    def __init__(self, target, skill=0.7, seed=0):
        self.target, self.skill = target, skill
        self.rng = random.Random(seed)
        self.calls = self.drafted_for = self.taken = 0

    def kv_bytes_per_block(self, block_size):
        return 1000

    def allocate_kv(self, num_blocks, block_size):
        self.slots = np.full((num_blocks, block_size), -1, np.int64)

    def draft(self, batch: DraftBatch):
        self.calls += 1
        most = int(batch.steps.max(initial=0))
        tokens = np.full((len(batch.steps), most), -1, np.int32)
        chances = np.zeros((len(batch.steps), most), np.float32)
        for row, steps in enumerate(batch.steps.tolist()):
            begin, end = batch.sequence_offsets[row : row + 2].tolist()
            self._take_in(batch, row, begin, end)
            self.drafted_for += steps > 0
            history = self._history(batch.block_tables[row], int(batch.positions[end - 1]) + 1)
            for step in range(steps):
                right = int(self.target.row(history).argmax())
                token = right if self.rng.random() < self.skill else self.rng.randrange(64)
                place = len(history)
                self.slots[batch.block_tables[row][place // BLOCK], place % BLOCK] = token
                tokens[row, step], chances[row, step] = token, 0.6
                history = np.append(history, token)
        return tokens, chances

    def _take_in(self, batch, row, begin, end):
        table, positions = batch.block_tables[row], batch.positions[begin:end].tolist()
        assert positions == list(range(positions[0], positions[0] + end - begin))
        before = self._history(table, positions[0])
        targets = self.target.slots[table].reshape(-1)[: positions[0]]
        assert (before >= 0).all() and before.tolist() == targets.tolist()
        tokens = [*before.tolist(), *batch.token_ids[begin:end].tolist()]
        for index, place in enumerate(positions):
            expected = [0] * WIDTH * 2
            if place:
                expected = [
                    x for at in self.taps for x in feature(tokens[place - 1], place - 1, at)
                ]
            assert batch.features[begin + index].tolist() == expected, place
            self.slots[table[place // BLOCK], place % BLOCK] = tokens[place]
        self.taken += end - begin

    def _history(self, table, length):
        return self.slots[table].reshape(-1)[:length].copy()


def make(blocks=64, slots=16, chunk=16, head=CheckedHead, clock=free_time, reuse=True, **fields):
    target = TappedTarget(memory=1)
    head = head(target, **fields)
    engine = Engine(
        target,
        EngineConfig(
            block_size=BLOCK, kv_cache_mb=max(blocks, 8), prefill_chunk=chunk, prefix_reuse=reuse
        ),
        SpeculationConfig(drafter="auto", ngram_min=1, length="bandit"),
        model_name="m",
        device_class="cpu",
        slots=slots,
        head=head,
        clock=clock,
    )
    return engine, head


def test_a_head_that_knows_the_target_saves_forwards():
    engine, head = make(skill=1.0)
    item = submit(max_tokens=120, draft_source="head")
    tokens, ends = run(engine, [item])
    assert tokens["a"] == solo(item, memory=1)
    usage = ends["a"].usage
    assert usage.accepted_tokens == usage.drafted_tokens > 60
    assert usage.verify_rounds < 40
    assert usage.draft_sources == {"head": (usage.drafted_tokens, usage.accepted_tokens)}
    assert head.target.tapped == (1, 3)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(11, 40), st.integers(1, 6), st.booleans())
def test_a_head_changes_no_token_in_a_crowded_pool(seed, blocks, slots, is_free):
    rng = random.Random(seed)
    shared = [rng.randrange(64) for _ in range(rng.randrange(0, 12))]
    items = [
        submit(
            f"r{i}",
            prompt=shared + [rng.randrange(64) for _ in range(rng.randrange(1, 20))],
            max_tokens=rng.randrange(1, 12),
            tier=rng.choice(["vip", "standard"]),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(2**64),
            speculation=rng.random() < 0.9,
            draft_source=rng.choice(["auto", "head"]),
            draft_tokens=rng.choice([0, 2]),
        )
        for i in range(8)
    ]
    clock = {"clock": free_time} if is_free else {}
    engine, _ = make(blocks, slots, rng.choice([16, 32]), skill=rng.random(), seed=seed, **clock)
    tokens, ends = run(engine, items)
    for item in items:
        assert tokens[item.request_id] == solo(item, memory=1)
        assert isinstance(ends[item.request_id], Finished)
    assert engine.has_draft_head, "the head was not held to its contract"


def test_a_dropped_request_takes_its_head_along():
    engine, _ = make()
    for name in "ab":
        engine.add(submit(name, prompt=range(20), max_tokens=50))
    for _ in range(5):
        engine.step()
    engine.abort("a")
    engine.step()
    engine.abort("b")
    tokens, _ = run(engine, [submit("c", prompt=range(20), max_tokens=50)])
    assert tokens["c"] == solo(submit("c", prompt=range(20), max_tokens=50), memory=1)
    assert engine.has_draft_head


def test_the_next_request_drafts_from_a_shared_prefix_that_a_head_has_read():
    engine, head = make()
    prompt = [5, 9, 2, 7] * 10
    run(engine, [submit("a", prompt, max_tokens=8)])
    taken = head.taken
    _, ends = run(engine, [submit("b", prompt, max_tokens=8)])
    assert ends["b"].usage.cached_tokens >= 28
    assert head.taken - taken < 20


def test_a_prefix_that_no_head_has_read_is_computed_again_once():
    engine, head = make()
    prompt = [5, 9, 2, 7] * 10
    run(engine, [submit("a", prompt, max_tokens=8, speculation=False)])
    assert head.taken == 0
    cached = []
    for name in "bc":
        _, ends = run(engine, [submit(name, prompt, max_tokens=8)])
        cached.append(ends[name].usage.cached_tokens)
    assert cached[0] == 0 and cached[1] >= 28


def test_hidden_states_are_tapped_only_while_a_head_is_open():
    engine, head = make()
    run(engine, [submit("a", max_tokens=20)])
    assert head.target.tapped == (1, 3)
    run(engine, [submit("b", max_tokens=20, speculation=False)])
    assert head.target.tapped == ()
    run(engine, [submit("c", max_tokens=20, draft_source="lookup")])
    assert head.target.tapped == ()


class Hostile(CheckedHead):
    """From its fourth call on it does what `fault` says."""

    def __init__(self, target, fault, **fields):
        super().__init__(target, **fields)
        self.fault = fault

    def draft(self, batch):
        tokens, chances = super().draft(batch)
        if self.calls < 4:
            return tokens, chances
        return self.fault(tokens, chances)


def _raise(error):
    raise error


FAULTS = {
    "value error": lambda t, p: _raise(ValueError("bad batch")),
    "runtime error": lambda t, p: _raise(RuntimeError("out of memory")),
    "key error": lambda t, p: _raise(KeyError(3)),
    "beyond the vocabulary": lambda t, p: (np.where(t >= 0, 64, t), p),
    "far below": lambda t, p: (np.full_like(t, -7), p),
    "floats": lambda t, p: (t.astype(np.float32), p),
    "shape": lambda t, p: (t[:, :0], p),
    "one row too many": lambda t, p: (np.vstack([t, t]), np.vstack([p, p])),
    "not finite": lambda t, p: (t, np.full_like(p, np.nan)),
    "nothing": lambda t, p: None,
    "lists": lambda t, p: (t.tolist(), p.tolist()),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_head_that_fails_is_switched_off_and_no_request_with_it(name, caplog):
    engine, head = make(head=Hostile, fault=FAULTS[name])
    items = [submit(f"r{i}", prompt=range(i, 20 + i), max_tokens=40) for i in range(3)]
    with caplog.at_level(logging.ERROR):
        tokens, ends = run(engine, items)
    for item in items:
        assert tokens[item.request_id] == solo(item, memory=1)
        assert isinstance(ends[item.request_id], Finished)
    assert not engine.has_draft_head and head.calls == 4
    assert head.target.tapped == ()
    assert "the draft head is switched off" in caplog.text


@pytest.mark.parametrize(
    "fault",
    [
        lambda t, p: (np.full_like(t, -1), np.zeros_like(p)),
        lambda t, p: (np.zeros_like(t), np.full_like(p, 1e30)),
        lambda t, p: (t, np.full_like(p, -5)),
    ],
)
def test_a_head_that_only_drafts_badly_does_no_harm(fault):
    engine, _ = make(head=Hostile, fault=fault)
    item = submit(max_tokens=60)
    assert run(engine, [item])[0]["a"] == solo(item, memory=1)
    assert engine.has_draft_head


def test_features_of_the_wrong_shape_switch_the_head_off():
    engine, head = make()

    def forward(batch, inner=head.target.forward):
        logits = inner(batch)
        head.target.features = head.target.features[:-1]
        return logits

    head.target.forward = forward
    item = submit(max_tokens=30)
    assert run(engine, [item])[0]["a"] == solo(item, memory=1)
    assert not engine.has_draft_head


def test_chunks_come_on_while_a_head_fails():
    engine, _ = make(head=Hostile, fault=FAULTS["runtime error"])
    engine.add(submit(max_tokens=30))
    made = []
    while engine.has_work:
        made += [output for output in engine.step() if isinstance(output, Chunk)]
    assert sum(len(chunk.tokens) for chunk in made) == 30


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """Time that forwards of the target take."""
    clock, forward = Clock(), TappedTarget.forward

    def slow(self, batch):
        clock.now += 5e-3
        return forward(self, batch)

    monkeypatch.setattr(TappedTarget, "forward", slow)
    return clock


class SlowAtFirst(CheckedHead):
    """Its first call of all takes a second, as where its weights have to come from disk."""

    def __init__(self, target, clock, **fields):
        super().__init__(target, **fields)
        self.clock = clock

    def draft(self, batch: DraftBatch):
        self.clock.now += 3e-4 * (1 + int(batch.steps.max(initial=0))) if self.calls else 1.0
        if batch.features.any():
            return super().draft(batch)
        self.calls += 1  # measured without a sequence
        steps = int(batch.steps.max())
        return np.zeros((1, steps), np.int32), np.ones((1, steps), np.float32)


def test_a_head_whose_first_call_is_slow_is_called_nevertheless(clock):
    engine, head = make(skill=0.5, clock=clock, head=lambda t, **f: SlowAtFirst(t, clock, **f))
    engine.warm_up()
    measured = head.calls
    item = submit(max_tokens=60, draft_source="head")
    tokens, ends = run(engine, [item])
    assert tokens["a"] == solo(item, memory=1)
    usage = ends["a"].usage
    # One call for about each round: the slow call is not taken for what a pass costs.
    assert head.calls - measured > 0.8 * usage.verify_rounds
    assert usage.accepted_tokens > 15


class Unsure(SlowAtFirst):
    """Every token it could draft is below the floor."""

    def draft(self, batch: DraftBatch):
        tokens, chances = super().draft(batch)
        return np.full_like(tokens, -1), np.zeros_like(chances)


def test_a_head_that_drafts_nothing_is_soon_called_no_more(clock):
    engine, head = make(clock=clock, head=lambda t, **f: Unsure(t, clock, **f))
    engine.warm_up()
    item = submit(max_tokens=120, draft_source="head")
    tokens, _ = run(engine, [item])
    assert tokens["a"] == solo(item, memory=1)
    assert head.drafted_for < 30
