"""The engine over a target whose logits betray any slip in its KV bookkeeping."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror_sd import telemetry
from mirror_sd.config import EngineConfig
from mirror_sd.config_speculation import SpeculationConfig
from mirror_sd.engine import Engine
from mirror_sd.errors import ContextLengthExceeded, InvalidRequest
from mirror_sd.messages import Chunk, Failed, Finished, SamplingParams, Submit
from mirror_sd.speculative.sequence_drafts import SequenceDrafts
from tests.unit.speculative.hash_target import HashTarget


def make_engine(
    blocks=64,
    slots=16,
    speculation=True,
    prefix_reuse=True,
    chunk=16,
    clock=time.monotonic,
    **target,
):
    return Engine(
        HashTarget(**target),
        EngineConfig(
            block_size=4, kv_cache_mb=max(blocks, 8), prefill_chunk=chunk, prefix_reuse=prefix_reuse
        ),
        SpeculationConfig(enabled=speculation, ngram_min=1, max_tokens=8),
        model_name="m",
        device_class="cpu",
        slots=slots,
        clock=clock,
    )


def free_time():
    """A clock by which nothing costs anything, so that drafts are as long as they may be."""
    return 0.0


def submit(
    name="a",
    prompt=(1, 2, 3),
    max_tokens=24,
    delivered=(),
    tier="standard",
    degrade_level=0,
    **params,
):
    params.setdefault("temperature", 0.0)
    return Submit(
        request_id=name,
        model="m",
        prompt=tuple(prompt),
        delivered=tuple(delivered),
        tier=tier,
        degrade_level=degrade_level,
        params=SamplingParams(max_tokens=max_tokens, seed=params.pop("seed", 7), **params),
    )


def run(engine, submits, collect=None):
    """Tokens of each request, checking that chunks are gapless; the last frame of each."""
    tokens = {s.request_id: list(s.delivered) for s in submits}
    ends, logprobs = {}, {s.request_id: [] for s in submits}
    for item in submits:
        engine.add(item)
    for _ in range(5000):
        if not engine.has_work:
            break
        for output in engine.step():
            if isinstance(output, Chunk):
                assert output.index == len(tokens[output.request_id])
                tokens[output.request_id].extend(output.tokens)
                if output.logprobs is not None:
                    assert len(output.logprobs) == len(output.tokens)
                    logprobs[output.request_id].extend(output.logprobs)
            else:
                assert output.request_id not in ends
                ends[output.request_id] = output
        engine.check_integrity()
    assert not engine.has_work, "the engine did not come to an end"
    assert engine.stats().kv_blocks_used == 0
    if collect is not None:
        collect.update(logprobs)
    return tokens, ends


def solo(item, **target):
    """The plain run of one request: no speculation, no reuse, nothing else beside it."""
    return run(make_engine(speculation=False, prefix_reuse=False, **target), [item])[0][
        item.request_id
    ]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"logit_bias": {5: 3.0, 6: -100.0}},
        {"temperature": 1.3, "top_k": 5, "frequency_penalty": 1.0},
    ],
)
def test_speculation_does_not_change_a_token(params):
    item = submit(max_tokens=120, **params)
    engine = make_engine(memory=1)
    tokens, ends = run(engine, [item])
    assert tokens["a"] == solo(item, memory=1)
    assert len(tokens["a"]) == 120 and ends["a"].reason == "length"


def test_drafts_are_accepted_and_save_forwards():
    engine = make_engine(memory=1)
    _, ends = run(engine, [submit(max_tokens=120)])
    usage = ends["a"].usage
    assert 0 < usage.accepted_tokens <= usage.drafted_tokens
    assert usage.verify_rounds + usage.accepted_tokens == 120
    assert engine.stats().steps == usage.verify_rounds < 120


def test_an_answer_that_goes_round_in_circles_gets_shorter_drafts_and_is_counted():
    engine = make_engine(memory=1, clock=free_time)
    before = telemetry.DRAFT_REPETITIONS.labels("cpu")._value.get()
    item = submit(max_tokens=400, draft_source="lookup")
    tokens, ends = run(engine, [item])
    assert tokens["a"] == solo(item, memory=1)
    assert telemetry.DRAFT_REPETITIONS.labels("cpu")._value.get() > before
    usage = ends["a"].usage
    assert usage.completion_tokens / usage.verify_rounds < 6, "drafts of 8 are cut to 4"


def test_a_source_that_fails_costs_no_request(caplog):
    engine = make_engine(memory=1)

    class Broken:
        nbytes = 0

        def open(self, tokens, *, tenant, prompt_length):
            raise RuntimeError("broken")

        def close(self, source, tokens, *, tenant, prompt_length):
            pass

    engine._drafters = {"lookup": Broken()}
    items = [submit(name, max_tokens=30) for name in "ab"]
    tokens, _ = run(engine, items)
    assert tokens["a"] == tokens["b"] == solo(items[0], memory=1)
    assert "goes on without drafts" in caplog.text


def test_speculation_off_drafts_nothing():
    _, ends = run(make_engine(memory=1), [submit(max_tokens=60, speculation=False)])
    assert ends["a"].usage.drafted_tokens == 0
    assert ends["a"].usage.verify_rounds == 60


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(11, 40), st.integers(1, 6))
def test_a_crowded_pool_changes_no_token(seed, blocks, slots):
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
        )
        for i in range(8)
    ]
    engine = make_engine(blocks=blocks, slots=slots, memory=1, chunk=rng.choice([16, 32]))
    tokens, ends = run(engine, items)
    for item in items:
        assert tokens[item.request_id] == solo(item, memory=1)
        assert isinstance(ends[item.request_id], Finished)


@pytest.mark.parametrize("cut", [0, 1, 7, 29])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"frequency_penalty": 0.9}])
def test_a_resumed_request_goes_on_as_if_undisturbed(cut, params):
    whole = solo(submit(max_tokens=30, **params))
    tokens, ends = run(make_engine(), [submit(max_tokens=30, delivered=whole[:cut], **params)])
    assert tokens["a"] == whole
    assert ends["a"].usage.completion_tokens == 30


def test_a_request_resumed_after_its_last_token_only_finishes():
    whole = solo(submit(max_tokens=5))
    tokens, ends = run(make_engine(), [submit(max_tokens=5, delivered=whole)])
    assert tokens["a"] == whole and ends["a"].reason == "length"


def test_a_request_resumed_at_the_context_limit_only_finishes():
    engine = make_engine(blocks=200, max_context=64)
    whole, _ = run(engine, [submit("first", [1] * 50, max_tokens=500)])
    tokens, ends = run(engine, [submit("a", [1] * 50, 500, delivered=whole["first"])])
    assert tokens["a"] == whole["first"] and ends["a"].reason == "length"


def test_a_stop_token_is_not_emitted_and_beats_the_length_cap():
    whole = solo(submit(max_tokens=40))
    stop = whole[20]
    first = whole.index(stop)
    tokens, ends = run(make_engine(), [submit(max_tokens=first + 1, stop_token_ids=(stop,))])
    assert tokens["a"] == whole[:first]
    assert ends["a"].reason == "stop" and ends["a"].usage.completion_tokens == first


def test_an_equal_prefix_is_reused_within_the_tenant_only():
    prompt = list(range(33))
    engine = make_engine()
    run(engine, [submit("a", prompt)])
    _, ends = run(engine, [submit("b", prompt)])
    assert ends["b"].usage.cached_tokens == 32
    other = submit("c", prompt)
    _, ends = run(
        engine,
        [
            Submit(
                **{f: getattr(other, f) for f in other.__struct_fields__ if f != "tenant"},
                tenant="other",
            )
        ],
    )
    assert ends["c"].usage.cached_tokens == 0


def test_aborting_frees_blocks_at_once_wherever_the_request_is():
    engine = make_engine(slots=1)
    engine.add(submit("running", max_tokens=100))
    engine.add(submit("queued", max_tokens=100))
    engine.step()
    assert engine.stats().running == 1 and engine.stats().waiting == 1
    engine.abort("queued")
    engine.abort("running")
    engine.abort("never seen")
    assert engine.stats().kv_blocks_used == 0 and not engine.has_work
    engine.check_integrity()


def test_logprobs_cover_every_token_and_are_those_of_the_raw_logits():
    logprobs: dict = {}
    item = submit(max_tokens=50, temperature=0.8, logprobs=3)
    tokens, _ = run(make_engine(memory=1), [item], logprobs)
    assert [entry.token_id for entry in logprobs["a"]] == tokens["a"]
    assert all(len(entry.top) == 3 and entry.logprob < 0 for entry in logprobs["a"])
    plain: dict = {}
    run(make_engine(memory=1, speculation=False), [item], plain)
    assert plain["a"] == logprobs["a"]


def test_prompt_logprobs_come_once_and_cover_the_prompt():
    prompt = list(range(40))
    engine = make_engine()
    run(engine, [submit("warm", prompt)])
    engine.add(submit("a", prompt, prompt_logprobs=True, logprobs=2, max_tokens=4))
    found = []
    while engine.has_work:
        found += [
            o.prompt_logprobs
            for o in engine.step()
            if isinstance(o, Chunk) and o.prompt_logprobs is not None
        ]
    assert len(found) == 1 and found[0][0] is None
    assert [entry.token_id for entry in found[0][1:]] == prompt[1:]


def test_bad_numbers_fail_one_sequence_and_spare_the_rest():
    engine = make_engine()
    engine._loop._backend.poisoned.add(63)
    good, bad = submit("good", (1, 2, 3), max_tokens=5), submit("bad", (4, 63), max_tokens=5)
    expected = solo(good)
    tokens, ends = run(engine, [good, bad])
    if 63 not in expected:
        assert tokens["good"] == expected
    assert isinstance(ends["bad"], Failed) and ends["bad"].code == "internal_error"


def test_an_error_in_one_sequence_fails_it_alone(monkeypatch):
    engine = make_engine()
    good, bad = submit("good", (1, 2, 3), max_tokens=5), submit("bad", (4, 5), max_tokens=5)
    expected = solo(good)
    advance = engine._loop._advance

    def break_one(piece, logits):
        if piece.sequence.request_id == "bad":
            raise ZeroDivisionError("of this test")
        return advance(piece, logits)

    monkeypatch.setattr(engine._loop, "_advance", break_one)
    tokens, ends = run(engine, [good, bad])
    assert tokens["good"] == expected
    assert isinstance(ends["bad"], Failed) and not ends["bad"].retryable


@pytest.mark.parametrize(
    ("item", "error", "says"),
    [
        (submit(prompt=()), InvalidRequest, "empty"),
        (submit(prompt=(1, 64)), InvalidRequest, "64 is outside"),
        (submit(prompt=(-1,)), InvalidRequest, "-1 is outside"),
        (submit(logit_bias={99: 1.0}), InvalidRequest, "99 is outside"),
        (submit(prompt=[1] * 512), ContextLengthExceeded, "512 tokens"),
        (submit(max_tokens=0), InvalidRequest, "max_tokens"),
    ],
)
def test_what_can_never_run_is_refused(item, error, says):
    engine = make_engine(blocks=200)
    with pytest.raises(error, match=says):
        engine.add(item)
    assert not engine.has_work


def test_the_context_limit_ends_a_sequence_by_length():
    engine = make_engine(blocks=200, max_context=64)
    tokens, ends = run(engine, [submit(prompt=[1] * 50, max_tokens=500)])
    assert len(tokens["a"]) == 14 and ends["a"].reason == "length"


def test_a_vip_is_the_last_to_be_displaced():
    engine = make_engine(blocks=8, slots=2)
    vip = submit("vip", [1] * 8, max_tokens=20, tier="vip")
    standard = submit("standard", [2] * 8, max_tokens=20)
    engine.add(standard)
    engine.step()
    engine.add(vip)
    order = []
    while engine.has_work:
        order += [o.request_id for o in engine.step() if isinstance(o, Finished)]
    assert order == ["vip", "standard"]


@pytest.mark.parametrize(
    ("drafter", "sources"),
    [("auto", ("lookup", "history")), ("lookup", ("lookup",)), ("head", ("lookup", "history"))],
)
def test_an_engine_without_a_head_drafts_from_text_where_a_head_is_wished_for(drafter, sources):
    engine = Engine(
        HashTarget(),
        EngineConfig(block_size=4, kv_cache_mb=8),
        SpeculationConfig(drafter=drafter),
        model_name="m",
        device_class="cpu",
        slots=1,
    )
    assert engine.draft_sources == sources


def test_dropping_a_request_closes_its_drafts_wherever_it_is(monkeypatch):
    closed = []
    close = SequenceDrafts.close

    def noted(drafts):
        closed.append(drafts)
        close(drafts)

    monkeypatch.setattr(SequenceDrafts, "close", noted)
    engine = make_engine(slots=1)
    for request_id in ("running", "queued", "behind"):
        engine.add(submit(request_id, max_tokens=50))
    engine.step()
    engine.abort("queued")
    assert len(closed) == 1
    engine.abort_all()
    assert len(set(map(id, closed))) == 3
    assert not engine.has_work
    engine.check_integrity()
