"""The engine with drafters elsewhere: whatever they do, no token changes."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror_sd.config import EngineConfig
from mirror_sd.config_speculation import SpeculationConfig
from mirror_sd.drafting.frames import Line, Proposal
from mirror_sd.engine import Engine
from mirror_sd.messages import SamplingParams
from mirror_sd.speculative.drafters.remote import Offer, RemoteSource, Terms
from mirror_sd.speculative.remote_drafting import Await, RemoteDrafting
from tests.unit.drafting.drafters import NearLink, drafter
from tests.unit.drafting.test_draft_engine import continuation
from tests.unit.speculative.hash_target import HashTarget
from tests.unit.speculative.test_engine import free_time, run, solo, submit


def make(link, *, drafters="auto", clock=free_time, **target):
    return Engine(
        HashTarget(**target),
        EngineConfig(block_size=4, kv_cache_mb=64, prefill_chunk=16),
        SpeculationConfig(ngram_min=1, max_tokens=8, drafter=drafters),
        model_name="m",
        device_class="tpu",
        slots=8,
        clock=clock,
        remote=RemoteDrafting(link, vocab_size=64, most_tokens=8, clock=clock),
    )


PARAMS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"presence_penalty": 1.5},
    {"logit_bias": {5: 3.0, 6: -100.0}},
]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("overlaps", [True, False], ids=["overlapped", "serial"])
def test_drafts_from_elsewhere_change_no_token(params, overlaps):
    engine = make(NearLink(drafter(), steps=6, overlaps=overlaps), drafters="remote")
    items = [submit(f"r{i}", prompt=(i, 2, 3), max_tokens=60, **params) for i in range(1, 4)]
    tokens, ends = run(engine, items)
    for item in items:
        assert tokens[item.request_id] == solo(item)
    drafted, accepted = (
        sum(e.usage.draft_sources["remote"][n] for e in ends.values()) for n in (0, 1)
    )
    assert drafted >= accepted > 60
    assert engine.remote._link.engine.sessions == 0


def test_a_drafter_that_is_right_saves_most_forwards():
    engine = make(NearLink(drafter(noise=0.0), steps=10), drafters="remote")
    item = submit(max_tokens=90)
    _, ends = run(engine, [item])
    assert ends["a"].usage.verify_rounds < 30


def test_a_request_can_ask_for_drafts_from_elsewhere_only_or_for_none():
    engine = make(NearLink(drafter()))
    wanted = submit("a", max_tokens=40, draft_source="remote")
    other = submit("b", max_tokens=40, draft_source="lookup")
    plain = submit("c", max_tokens=40, speculation=False)
    _, ends = run(engine, [wanted, other, plain])
    assert set(ends["a"].usage.draft_sources) == {"remote"}
    assert "remote" not in ends["b"].usage.draft_sources
    assert ends["c"].usage.drafted_tokens == 0


@pytest.mark.parametrize(("factor", "longest"), [(1.0, 8), (0.5, 4), (0.1, 1), (0.0, None)])
def test_drafts_from_elsewhere_are_as_long_as_the_links_leave_room_for(factor, longest):
    link = NearLink(drafter(noise=0.0), steps=10)
    asked = []
    link.open = lambda request, open=link.open: asked.append(request.length) or open(request)
    link.commit = lambda commit, then=link.commit: asked.append(commit.length) or then(commit)
    engine = make(link, drafters="remote")
    item = msgspec.structs.replace(submit(max_tokens=60), draft_factor=factor)
    tokens, _ = run(engine, [item])
    assert tokens["a"] == solo(item)
    assert max(asked, default=None) == longest


def test_each_sequence_is_drafted_for_by_the_terms_of_its_own_drafter():
    link = NearLink(drafter(noise=0.0), steps=10)
    terms = iter([Terms(length=5, overlaps=False), Terms(length=3)])
    opened, waits = [], []
    link.assign = lambda session, length: Offer(next(terms), 512)
    link.open = lambda request, open=link.open: opened.append(request) or open(request)
    remote = RemoteDrafting(link, vocab_size=64, most_tokens=8, clock=lambda: 0.0)
    params = SamplingParams(max_tokens=9, seed=1)
    serial, ahead = (remote.open([n, 2, 3], params, "t") for n in (1, 2))
    assert [(item.length, item.runs_ahead) for item in opened] == [(5, False), (3, True)]
    link.receive = lambda timeout_s: waits.append(timeout_s) or ([], [])
    link.is_answering = lambda session: len(waits) < 2
    for source in (serial, ahead):
        waits.clear()
        remote.gather([Await(source, 8, [0.9] * 8)], rate=1.0, step_s=0.004)
        assert waits[1:] == [30 * 0.004 if source is serial else 0.004]


def test_an_aborted_sequence_is_no_longer_drafted_for():
    engine = make(NearLink(drafter()))
    engine.add(submit(max_tokens=100))
    for _ in range(5):
        engine.step()
    assert engine.remote._link.engine.sessions == 1
    engine.abort("a")
    engine.idle()
    assert engine.remote._link.engine.sessions == 0


def test_a_sequence_that_fails_is_no_longer_drafted_for():
    engine = make(NearLink(drafter()))
    backend = engine._loop._backend
    for name in ("a", "b"):
        engine.add(submit(name, max_tokens=100))
    while engine.remote._link.engine.sessions < 2:
        engine.step()
    backend.poisoned.update(range(64))
    while engine.has_work:
        engine.step()
    engine.idle()
    assert engine.remote._link.engine.sessions == 0 and not engine.remote._sources


def test_a_sequence_whose_drafter_was_lost_gets_another_after_a_while():
    now = [0.0]
    link = NearLink(drafter())
    engine = make(link, drafters="remote", clock=lambda: now[0])
    engine.add(submit(max_tokens=100))
    for _ in range(5):
        engine.step()
    link.engine.close(1)
    for _ in range(3):
        engine.step()
    assert link.engine.sessions == 0 and engine.remote.counts.lost + 1
    now[0] = 2.0
    for _ in range(3):
        engine.step()
    assert link.engine.sessions == 1


class EvilLink:
    """Proposes anything, for anybody, of any shape that frames can have."""

    ready = 1

    def __init__(self, rng):
        self.rng = rng
        self.sessions: list[int] = []
        self.length = 0

    def assign(self, session, length):
        if self.rng.random() < 0.1:
            return None
        return Offer(Terms(overlaps=self.rng.random() < 0.5), self.rng.choice((0, 10, 10**9)))

    def open(self, request):
        self.sessions.append(request.session)
        self.length = len(request.tokens)

    def commit(self, commit):
        self.length = commit.base + len(commit.tokens)

    def close(self, session):
        pass

    def flush(self):
        pass

    def receive(self, timeout_s):
        rng = self.rng
        gone = [rng.randrange(8)] if rng.random() < 0.05 else []
        return [self.proposal() for _ in range(rng.randrange(4))], gone

    def proposal(self):
        rng = self.rng
        session = rng.choice([*self.sessions, 99])
        base = self.length + rng.choice((0, 0, 0, -1, -5, 1, -(10**9), 2**40))
        lines = []
        for _ in range(rng.randrange(4)):
            count = rng.randrange(6)
            tokens = [
                rng.choice((rng.randrange(64), rng.randrange(64), -1, 2**60)) for _ in range(count)
            ]
            strengths = bytes(rng.randrange(9) for _ in range(count + (rng.random() < 0.1)))
            lines.append(Line(rng.choice((0, 0, 1, 3, -2, 999)), tuple(tokens), strengths))
        seconds = rng.choice((0.0, 1e-3, -5.0, float("inf"), float("nan")))
        return Proposal(session, base, tuple(lines), seconds, seconds)

    def is_answering(self, session):
        return self.rng.random() < 0.5

    def was_late(self, sessions):
        pass


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), params=st.sampled_from(PARAMS))
def test_nonsense_changes_no_token_and_raises_nothing(seed, params):
    engine = make(EvilLink(random.Random(seed)))
    items = [submit(f"r{i}", prompt=(i, 2, 3), max_tokens=30, **params) for i in range(1, 4)]
    tokens, _ = run(engine, items)
    for item in items:
        assert tokens[item.request_id] == solo(item)


def source(tokens, **fields):
    made = RemoteSource(
        tokens, SamplingParams(max_tokens=9, seed=1), "t", vocab_size=64, most_tokens=8
    )
    made.begin(1, Offer(Terms(), max_context=512))
    return made


def line(*tokens, at=0):
    return Line(at, tokens, bytes([5] * len(tokens)))


def test_a_proposal_that_comes_late_is_used_as_far_as_it_agrees():
    text = [1, 2, 3]
    made = source(text)
    assert made.take(Proposal(1, 3, (line(4, 5, 6, 7), line(9, 8, at=1)), 0.0, 0.0))
    assert made.propose(8) == [4, 5, 6, 7]
    text += [4, 5]
    assert made.propose(8) == [6, 7] and made.strengths() == [5, 5]
    text[-1] = 9
    assert made.propose(8) == [8]
    text[-1] = 10
    assert made.propose(8) == [] and made.ready == 0


def test_a_proposal_older_than_the_last_one_is_stale():
    made = source([1, 2, 3, 4])
    assert made.take(Proposal(1, 4, (line(5),), 0.0, 0.0))
    assert not made.take(Proposal(1, 3, (line(4, 6),), 0.0, 0.0))
    assert made.propose(8) == [5]


class WaitingLink(NearLink):
    """Nothing comes until `at`; records how long it was waited for."""

    def __init__(self, clock, at, overlaps):
        super().__init__(drafter(), overlaps=overlaps)
        self.now, self.at = clock, at
        self.late: list = []
        self.proposals: list = []

    def receive(self, timeout_s):
        if timeout_s > 0 and self.now[0] < self.at:
            self.now[0] = min(self.now[0] + timeout_s, self.at)
        found, self.proposals = (
            (self.proposals, []) if self.now[0] >= self.at else ([], self.proposals)
        )
        return found, []

    def was_late(self, sessions):
        self.late.append(list(sessions))


@pytest.mark.parametrize("overlaps", [True, False], ids=["overlapped", "serial"])
@pytest.mark.parametrize("end", ["stop token", "context"])
def test_nothing_is_waited_for_once_the_draft_has_ended(end, overlaps):
    engine = drafter(noise=0.0)
    expected = continuation([5, 6, 7], 3)
    if end == "context":
        engine.max_context = 6
    params = SamplingParams(
        max_tokens=64,
        seed=1,
        temperature=0.0,
        stop_token_ids=(expected[2],) if end == "stop token" else (),
    )
    link = NearLink(engine, overlaps=overlaps)
    waits = [0.0]
    link.receive = lambda timeout_s, then=link.receive: waits.append(timeout_s) or then(timeout_s)
    remote = RemoteDrafting(link, vocab_size=64, most_tokens=8, clock=lambda: sum(waits))
    source = remote.open([5, 6, 7], params, "t")
    wanted = [Await(source, 8, [0.9] * 8)]
    assert wanted[0].is_short
    remote.gather(wanted, rate=1.0, step_s=0.02)
    assert source.propose(8) == expected
    waits.clear()
    remote.gather(wanted, rate=1.0, step_s=0.02)
    assert waits == [0.0] and remote.counts.late == 0


def wait(at, rate, step_s, overlaps=True, latency_s=0.004):
    now = [0.0]
    link = WaitingLink(now, at, overlaps)
    remote = RemoteDrafting(link, vocab_size=64, most_tokens=8, clock=lambda: now[0])
    made = remote.open([1, 2, 3], SamplingParams(max_tokens=9, seed=1), "t")
    made.latency_s = made.pace_s = latency_s
    link.proposals = [
        Proposal(made.session, 3, (line(4, 5, 6, 7, 8, 9, 1, 2),), latency_s, latency_s)
    ]
    remote.gather([Await(made, 8, [0.9**n for n in range(1, 33)])], rate, step_s)
    return now[0], made.ready, link.late


def test_a_draft_is_waited_for_where_it_brings_more_than_the_time_is_worth():
    assert wait(at=0.003, rate=50.0, step_s=0.020) == (0.003, 8, [])
    assert wait(at=0.003, rate=300.0, step_s=0.020) == (0.0, 0, [])


def test_it_is_never_waited_for_longer_than_a_step_of_the_verifier():
    waited, ready, late = wait(at=1.0, rate=10.0, step_s=0.008)
    assert waited == pytest.approx(0.008) and ready == 0 and late == [[1]]
    waited, _, _ = wait(at=1.0, rate=10.0, step_s=0.100)
    assert waited == pytest.approx(0.012), "three times as long as usual is enough"


def test_without_overlap_the_whole_proposal_is_waited_for():
    assert wait(at=0.1, rate=300.0, step_s=0.020, overlaps=False)[:2] == (0.1, 8)
