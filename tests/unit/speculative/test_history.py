"""Drafts from a tenant's other answers: what they give, and that no tenant sees another's."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror_sd.config import EngineConfig
from mirror_sd.config_speculation import SpeculationConfig
from mirror_sd.engine import Engine
from mirror_sd.messages import Finished
from mirror_sd.speculative import drafters
from mirror_sd.speculative.drafters import STRENGTHS
from mirror_sd.speculative.drafters.history import HistoryDrafter
from tests.unit.speculative.hash_target import HashTarget
from tests.unit.speculative.test_engine import free_time, run, solo, submit

PROMPT = [900, 901, 902, 903, 904]


def past(*answers, prompt=PROMPT, tenant="a", tokens=10_000, tenants=4):
    """A drafter that has seen these answers."""
    drafter = HistoryDrafter(tokens=tokens, tenants=tenants)
    for answer in answers:
        end(drafter, prompt, answer, tenant)
    return drafter


def begin(drafter, prompt=PROMPT, tenant="a"):
    return drafter.open(prompt, tenant=tenant, prompt_length=len(prompt))


def end(drafter, prompt, answer, tenant="a", source=None):
    drafter.close(source, [*prompt, *answer], tenant=tenant, prompt_length=len(prompt))


# What it drafts.


def test_the_answer_to_the_same_prompt_is_drafted_from_its_first_token_on():
    source = begin(past([1, 2, 3, 4, 5, 6]))
    assert source.propose(4) == [1, 2, 3, 4]
    source.commit([1, 2])
    assert source.propose(9) == [3, 4, 5, 6]
    source.commit([3, 4, 5, 6])
    assert source.propose(9) == []


def test_of_equal_matches_the_latest_is_followed_and_of_others_the_longest():
    drafter = past([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [8, 3, 4, 5, 9])
    source = begin(drafter)
    source.commit([1, 2, 3, 4, 5])
    assert source.propose(1) == [7]
    source = begin(drafter)
    source.commit([8, 3, 4, 5])
    assert source.propose(1) == [9]


def test_a_text_is_found_again_where_the_two_have_parted():
    source = begin(past(list(range(100, 140))))
    assert source.propose(3) == [100, 101, 102]
    source.commit([100, 101, 777])  # another order number
    assert source.propose(3) == []
    source.commit([103])
    assert source.propose(3) == []
    source.commit([104])
    assert source.propose(3) == [105, 106, 107]


def test_a_draft_ends_where_the_text_that_it_follows_ends():
    source = begin(past([1, 2, 3], [4, 5, 6]))
    source.commit([1, 2])
    assert source.propose(8) == [3]


def test_nothing_is_drafted_where_nothing_is_known_and_never_more_than_asked_for():
    assert begin(past()).propose(8) == []
    assert begin(past([1, 2]), prompt=[5]).propose(8) == []
    source = begin(past(range(50)))
    assert source.propose(0) == [] and source.propose(-1) == []
    assert len(source.propose(32)) == 32


def test_a_prompt_is_kept_only_near_its_answer():
    prompt = list(range(1000, 1200))
    drafter = past([1, 2, 3], prompt=prompt)
    assert begin(drafter, prompt=[1001, 1002, 1003, 1004, 1005]).propose(4) == []
    assert begin(drafter, prompt=prompt[-9:]).propose(4) == [1, 2, 3]


def test_a_sequence_that_ends_before_its_first_token_leaves_nothing():
    drafter = past()
    end(drafter, PROMPT, [])
    assert begin(drafter, prompt=PROMPT[:-1]).propose(4) == []


def test_an_answer_that_is_being_written_is_drafted_from():
    drafter = past()
    first, second = begin(drafter), begin(drafter)
    first.commit([1, 2, 3, 4, 5, 6, 7])
    assert first.propose(4) == [], "not from itself"
    assert second.propose(4) == [1, 2, 3, 4]
    second.commit([1, 2])
    first.commit([8])
    assert second.propose(9) == [3, 4, 5, 6, 7, 8]
    end(drafter, PROMPT, [1, 2, 3, 4, 5, 6, 7, 8], source=first)
    assert second.propose(2) == [3, 4], "it has ended since"
    assert begin(drafter).propose(2) == [1, 2]


def test_strength_grows_with_what_agrees():
    source = begin(past(range(100)), prompt=PROMPT[-2:])
    strengths = []
    for token in range(40):
        assert source.propose(1) == [token]
        strengths.append(source.strength())
        source.commit([token])
    assert strengths == sorted(strengths)
    assert (strengths[0], strengths[-1]) == (0, STRENGTHS - 1)


def test_the_oldest_answers_are_forgotten():
    drafter = past(*([n, n + 1, n + 2, n + 3, n + 4] for n in range(0, 5000, 10)), tokens=200)
    assert begin(drafter, prompt=[10, 11, 12]).propose(1) == []
    assert begin(drafter, prompt=[4990, 4991, 4992]).propose(1) == [4993]


def test_without_tokens_to_keep_there_is_no_history():
    assert "history" not in drafters.create(SpeculationConfig(drafter="auto", history_tokens=0))
    made = drafters.create(SpeculationConfig(drafter="auto", history_tokens=1))["history"]
    end(made, [1], [2])
    assert begin(made).propose(3) == []


def test_a_draft_costs_microseconds():
    rng = random.Random(4)
    base = [rng.randrange(49152) for _ in range(150)]

    def variant():
        return [token if rng.random() < 0.95 else rng.randrange(49152) for token in base]

    drafter = past(*(variant() for _ in range(300)), tokens=50_000)
    answer, least_us = variant(), 1e9
    for _ in range(5):
        source = begin(drafter)
        begun = time.process_time()
        for at in range(len(answer)):
            source.propose(8)
            source.commit(answer[at : at + 1])
        least_us = min(least_us, 1e6 * (time.process_time() - begun) / len(answer))
    assert least_us < 30, f"{least_us:.1f} us a token"


# Tenants.


def test_no_tenant_ever_sees_a_token_of_another():
    drafted = [play_tenants(random.Random(seed)) for seed in range(60)]
    assert sum(drafted) > 2000, "hardly anything was drafted"


def play_tenants(rng):
    """Tokens drafted while tenants, each with letters of its own, begin, ask, go on and end."""
    names = ["a", "b", "A", "", "a/b", "ä", "a" * 64]
    texts = [[10 * tenant + rng.randrange(6) for _ in range(40)] for tenant in range(len(names))]
    drafter = HistoryDrafter(tokens=rng.choice([30, 300, 3000]), tenants=rng.choice([1, 2, 5]))
    live, drafted = [], 0

    def draft(source, tenant):
        tokens = source.propose(8)
        assert all(token // 10 == tenant for token in tokens)
        return len(tokens)

    for _ in range(150):
        tenant = rng.randrange(len(names))
        own, cut = texts[tenant], rng.randrange(1, 10)
        if rng.random() < 0.3 or not live:
            source = drafter.open(own[:cut], tenant=names[tenant], prompt_length=cut)
            live.append((tenant, cut, cut, source))
        if rng.random() < 0.2:  # another's text as a prompt, to get at what followed it there
            stolen = texts[rng.randrange(len(names))][: rng.randrange(40)]
            probe = drafter.open(stolen, tenant=names[tenant], prompt_length=len(stolen))
            draft(probe, tenant)
            end(drafter, stolen, [], names[tenant], probe)
        tenant, cut, at, source = live.pop(rng.randrange(len(live)))
        drafted += draft(source, tenant)
        step = texts[tenant][at : at + rng.randrange(8)]
        source.commit(step)
        if at + len(step) < 40 and rng.random() < 0.9:
            live.append((tenant, cut, at + len(step), source))
        else:
            own = texts[tenant][: at + len(step)]
            drafter.close(source, own, tenant=names[tenant], prompt_length=cut)
    return drafted


def test_a_tenant_that_was_forgotten_begins_anew_and_the_latest_stay():
    drafter = HistoryDrafter(tokens=1000, tenants=2)
    for tenant, first in (("a", 10), ("b", 20)):
        end(drafter, PROMPT, [first, first + 1, first + 2], tenant)
    begin(drafter, tenant="a")
    waiting = begin(drafter, tenant="b")
    begin(drafter, tenant="a")
    end(drafter, PROMPT, [30, 31, 32], "c")  # takes the place of b
    assert begin(drafter, tenant="a").propose(2) == [10, 11]
    assert waiting.propose(2) == [20, 21], "what it was opened with stays its own"
    assert begin(drafter, tenant="b").propose(2) == []


def test_memory_is_bounded_by_tokens_and_tenants():
    drafter = HistoryDrafter(tokens=4096, tenants=3)
    rng = random.Random(3)
    for turn in range(3000):
        answer = [rng.randrange(49152) for _ in range(50)]
        end(drafter, PROMPT, answer, tenant=f"tenant {turn % 7}")
        assert drafter.nbytes == sum(texts.past.nbytes for texts in drafter._texts.values())
        assert drafter.nbytes <= 3 * 28 * 4096


def test_bounds_below_one_are_refused():
    for bounds in ({"tokens": 0, "tenants": 1}, {"tokens": 1, "tenants": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            HistoryDrafter(**bounds)


# In the engine.


def make_engine(**more):
    return Engine(
        HashTarget(memory=3),
        EngineConfig(block_size=4, kv_cache_mb=64, prefill_chunk=16),
        SpeculationConfig(**({"drafter": "history"} | more)),
        model_name="m",
        device_class="cpu",
        slots=16,
        clock=free_time,
    )


def of_tenant(item, tenant):
    item_fields = {name: getattr(item, name) for name in item.__struct_fields__}
    return type(item)(**(item_fields | {"tenant": tenant}))


def test_a_repeated_request_is_drafted_from_its_first_answer_and_another_tenants_is_not():
    engine = make_engine()
    first = submit("1", prompt=(1, 2, 3, 4), max_tokens=80)
    _, ends = run(engine, [of_tenant(first, "a")])
    assert ends["1"].usage.drafted_tokens == 0
    again = submit("2", prompt=(1, 2, 3, 4), max_tokens=80)
    others = submit("3", prompt=(1, 2, 3, 4), max_tokens=80)
    kept = engine.stats().history_bytes
    tokens, ends = run(engine, [of_tenant(again, "a"), of_tenant(others, "b")])
    assert engine.stats().history_bytes > kept > 0, "another tenant has a history of its own now"
    assert tokens["2"] == tokens["3"] == solo(first, memory=3)
    assert ends["2"].usage.accepted_tokens > 60
    assert ends["3"].usage.drafted_tokens == 0, "neither from a's past nor from a's running one"


def repeated_after(first, then, **more):
    """Usage of the same request again, after `first` was brought to an end by `then`."""
    engine = make_engine(**more)
    engine.add(first)
    then(engine)
    _, ends = run(engine, [submit("again", prompt=first.prompt, max_tokens=60)])
    return ends["again"].usage


def steps(engine, count=1000):
    while engine.has_work and count:
        engine.step()
        count -= 1


def test_an_answer_that_was_cut_by_a_stop_string_is_drafted_from_as_well():
    first = submit("1", prompt=(1, 2, 3, 4), max_tokens=60)

    def cut(engine):
        steps(engine, 30)
        engine.abort("1")

    assert 15 < repeated_after(first, cut).accepted_tokens < 40


def test_what_is_drafted_from_elsewhere_is_kept_too_and_what_wants_no_drafts_is_not():
    elsewhere = submit("1", prompt=(1, 2, 3, 4), max_tokens=60, draft_source="lookup")
    assert repeated_after(elsewhere, steps, drafter="auto").accepted_tokens > 30
    plain = submit("1", prompt=(1, 2, 3, 4), max_tokens=60, speculation=False)
    assert repeated_after(plain, steps).drafted_tokens == 0


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_history_changes_no_token(seed):
    rng = random.Random(seed)
    engine = make_engine(history_tokens=rng.choice([40, 400]), history_tenants=2)
    for turn in range(4):
        items = [
            of_tenant(
                submit(
                    f"{turn}-{n}",
                    prompt=(1, 2, rng.randrange(3), 4, 5),
                    max_tokens=rng.randrange(1, 40),
                    temperature=rng.choice([0.0, 1.0]),
                    seed=rng.randrange(2),
                ),
                rng.choice("abc"),
            )
            for n in range(rng.randrange(1, 5))
        ]
        tokens, ends = run(engine, items)
        for item in items:
            assert isinstance(ends[item.request_id], Finished)
            assert tokens[item.request_id] == solo(item, memory=3)
