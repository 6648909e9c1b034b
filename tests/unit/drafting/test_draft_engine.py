"""The drafter's engine: it follows the target, runs ahead of it, and never loses a KV block."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror_sd.drafting.draft_engine import BLOCK_SIZE, DraftEngine, Refusal
from mirror_sd.drafting.frames import Commit
from mirror_sd.drafting.turns import shares
from mirror_sd.host_memory import HostMemory
from tests.unit.drafting.drafters import NearTarget, drafter, request


def continuation(tokens, count, model=None):
    """What the model says greedily after `tokens`."""
    model = model or NearTarget()
    text = list(tokens)
    for _ in range(count):
        text.append(int(model.row(np.array(text, dtype=np.int64)).argmax()))
    return text[len(tokens) :]


def settle(engine, key=1):
    """The last proposal after all that can be drafted now."""
    last = None
    while engine.has_work:
        for found, proposal in engine.step():
            last = proposal if found == key else last
        engine.check_integrity()
    return last


def test_a_proposal_is_what_the_model_goes_on_with():
    engine = drafter()
    engine.open(1, request([5, 6, 7], length=4))
    proposal = settle(engine)
    assert proposal.base == 3
    assert list(proposal.lines[0].tokens) == continuation([5, 6, 7], 10)
    assert len(proposal.lines[0].strengths) == 10 and max(proposal.lines[0].strengths) < 8


def test_without_running_ahead_it_stops_at_the_proposal_and_sends_it_whole():
    engine = drafter()
    engine.open(1, request([5, 6, 7], length=4, runs_ahead=False))
    sent = []
    while engine.has_work:
        sent += engine.step()
    [(_, proposal)] = sent
    assert len(proposal.lines) == 1
    assert list(proposal.lines[0].tokens) == continuation([5, 6, 7], 4)


def test_what_was_drafted_ahead_is_there_when_all_was_accepted():
    engine = drafter()
    engine.open(1, request([5, 6, 7], length=4))
    ahead = list(settle(engine).lines[0].tokens)
    steps = engine.steps
    engine.commit(1, Commit(1, 3, tuple(ahead[:5]), 4))
    proposal = engine.step()[0][1]
    assert engine.steps == steps + 1
    assert proposal.base == 8 and list(proposal.lines[0].tokens[:5]) == ahead[5:]
    assert list(proposal.lines[0].tokens) == continuation([5, 6, 7, *ahead[:5]], 6)


def test_a_correction_that_was_foreseen_finds_its_continuation_drafted():
    engine = drafter()
    engine.open(1, request([5, 6, 7], length=4))
    proposal = settle(engine)
    main, *branches = proposal.lines
    assert branches, "no second likeliest token was close"
    branch = branches[0]
    corrected = (*main.tokens[: branch.at], branch.tokens[0])
    engine.commit(1, Commit(1, 3, corrected, 4))
    after = engine.step()[0][1]
    text = [5, 6, 7, *corrected]
    assert after.base == len(text)
    assert list(after.lines[0].tokens[: len(branch.tokens) - 1]) == list(branch.tokens[1:])
    assert list(after.lines[0].tokens) == continuation(text, len(after.lines[0].tokens))


def test_after_a_correction_that_was_not_it_begins_anew_from_there():
    engine = drafter()
    engine.open(1, request([5, 6, 7], length=4))
    known = {line.tokens[0] for line in settle(engine).lines if line.at == 0}
    wrong = next(token for token in range(64) if token not in known)
    engine.commit(1, Commit(1, 3, (wrong,), 4))
    assert list(settle(engine).lines[0].tokens) == continuation([5, 6, 7, wrong], 10)


def test_sampled_drafts_are_drawn_with_the_noise_that_the_target_will_use():
    from mirror_sd.messages import SamplingParams
    from mirror_sd.speculative.sampler import open_chooser

    engine = drafter()
    engine.open(1, request([5, 6], length=6, params={"temperature": 0.9, "seed": 11, "top_k": 9}))
    chooser = open_chooser(SamplingParams(max_tokens=9, seed=11, temperature=0.9, top_k=9))
    text = [5, 6]
    for _ in range(6):
        text.append(chooser.choose(NearTarget().row(np.array(text, dtype=np.int64)), len(text)))
    assert list(settle(engine).lines[0].tokens[:6]) == text[2:]


def test_a_draft_ends_with_a_stop_token():
    expected = continuation([5, 6, 7], 3)
    engine = drafter()
    engine.open(1, request([5, 6, 7], length=8, params={"stop_token_ids": (expected[2],)}))
    assert list(settle(engine).lines[0].tokens) == expected


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (request([]), "sequence of 0 tokens"),
        (request([1] * 512), "sequence of 512 tokens"),
        (request([64]), "outside the vocabulary"),
        (request([-1]), "outside the vocabulary"),
        (request(length=0), "proposals of 0"),
        (request(length=33), "proposals of 33"),
        (request(params={"temperature": float("nan")}), "finite"),
        (request(params={"temperature": -1.0}), "negative"),
        (request(params={"top_p": float("inf")}), "finite"),
        (request(params={"logit_bias": {99: 1.0}}), "outside the vocabulary"),
        (request(params={"logit_bias": {9: float("nan")}}), "finite"),
        (request(params={"seed": 2**64}), "seed"),
    ],
)
def test_a_session_that_cannot_be_is_refused_and_harms_no_other(bad, reason):
    engine = drafter()
    engine.open("good", request([5, 6, 7]))
    with pytest.raises(Refusal, match=reason):
        engine.open("bad", bad)
    assert list(settle(engine, "good").lines[0].tokens) == continuation([5, 6, 7], 10)


@pytest.mark.parametrize(
    "commit",
    [
        Commit(1, 5, (1,), 4),
        Commit(1, -1, (1,), 4),
        Commit(1, 2, (9,), 4),
        Commit(1, 3, (64,), 4),
        Commit(1, 3, (1,), 0),
        Commit(1, 3, (1,) * 600, 4),
    ],
    ids=["gap", "before", "contradiction", "vocabulary", "length", "context"],
)
def test_a_commit_that_does_not_follow_ends_its_session_alone(commit):
    engine = drafter()
    engine.open(1, request([5, 6, 7]))
    engine.open(2, request([8, 9]))
    with pytest.raises(Refusal):
        engine.commit(1, commit)
    with pytest.raises(Refusal, match="no such session"):
        engine.commit(1, Commit(1, 3, (1,), 4))
    assert list(settle(engine, 2).lines[0].tokens) == continuation([8, 9], 10)


def test_a_sequence_that_breaks_the_forward_is_given_up_and_the_others_go_on():
    engine = drafter()
    model = engine._backend
    sound = model.forward

    def forward(batch):
        if ((batch.token_ids == 63) & (batch.positions == 0)).any():
            raise RuntimeError("device error")
        return sound(batch)

    model.forward = forward
    engine.open(1, request([63, 1]))
    engine.open(2, request([8, 9]))
    assert list(settle(engine, 2).lines[0].tokens)[:2] == continuation([8, 9], 2)
    assert [key for key, _ in engine.refused] == [1]


def test_a_device_that_computes_nothing_any_more_ends_the_process():
    engine = drafter()
    engine.warm_up()
    engine.open(1, request([8, 9]))
    engine.open(2, request([5, 6, 7]))
    engine.step()

    def forward(batch):
        raise RuntimeError("Array has been deleted")

    engine._backend.forward = forward
    with pytest.raises(RuntimeError, match="Array has been deleted"):
        engine.step()


def test_logits_that_are_no_numbers_cost_only_their_session():
    engine = drafter()
    text = continuation([8, 9], 11)
    engine._backend.poisoned = {next(token for token in range(64) if token not in text)}
    engine.open(1, request([*engine._backend.poisoned, 1]))
    engine.open(2, request([8, 9]))
    assert list(settle(engine, 2).lines[0].tokens) == text[:10]
    assert [key for key, _ in engine.refused] == [1]


def test_equal_prompts_of_a_tenant_are_read_once():
    engine = drafter()
    text = list(range(1, 41))
    engine.open(1, request(text, tenant="a"))
    settle(engine, 1)
    engine.open(2, request(text, tenant="a"))
    engine.open(3, request(text, tenant="b"))
    computed = {key: session.main.computed for key, session in engine._sessions.items()}
    assert computed[2] == 36 and computed[3] == 0


def test_sessions_that_fell_silent_are_given_up():
    now = [0.0]
    engine = drafter()
    engine._clock = lambda: now[0]
    engine.open(1, request([5, 6]))
    now[0] = 50.0
    engine.open(2, request([7, 8]))
    engine.close_silent(60)
    assert engine.sessions == 2
    now[0] = 61.0
    engine.close_silent(60)
    assert engine.sessions == 1 and [key for key, _ in engine.refused] == [1]


def test_a_long_prompt_keeps_no_other_waiting_and_is_not_kept_waiting_itself():
    engine = drafter(blocks=4096, max_context=4096)
    engine.open("long", request([n % 60 for n in range(2_000)]))
    first: dict = {}
    for step in range(1, 40):
        if step in (1, 5, 9):
            engine.open(f"short {step}", request([step] * 60))
            engine.open(f"tiny {step}", request([5, 6, step]))
        for key, _ in engine.step():
            first.setdefault(key, step)
    assert first["long"] <= 2 * 2_000 / 128 + 1
    for step in (1, 5, 9):
        assert first[f"tiny {step}"] == step and first[f"short {step}"] == step


@pytest.mark.parametrize(
    ("pending", "counts"),
    [
        ([], []),
        ([1, 8, 1], [1, 8, 1]),
        ([300], [128]),
        ([300, 1], [128, 1]),
        ([300, 20, 8], [108, 20, 8]),
        ([300, 20, 200, 60], [64, 20, 0, 44]),
        ([20, 300], [20, 108]),
    ],
)
def test_prompts_share_a_forward_by_age_and_by_length(pending, counts):
    assert shares(pending, 128) == counts


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.integers(8, 60))
def test_whatever_verifiers_do_no_block_is_lost_and_lines_are_the_models_own(seed, blocks):
    rng = random.Random(seed)
    engine = drafter(blocks=blocks, sessions=5, max_context=96)
    model = NearTarget()
    texts: dict[int, list[int]] = {}
    for turn in range(60):
        session = rng.randrange(6)
        action = rng.random()
        try:
            if session not in texts or action < 0.1:
                text = [rng.randrange(64) for _ in range(rng.randrange(1, 60))]
                engine.open(session, request(text, session=session, length=rng.randrange(1, 8)))
                texts[session] = text
            elif action < 0.2:
                engine.close(session)
                del texts[session]
            elif action < 0.7:
                text = texts[session]
                fresh = continuation(text, rng.randrange(1, 6), model)
                if rng.random() < 0.4:
                    fresh[-1] = rng.randrange(64)
                if len(text) + len(fresh) < 96:
                    engine.commit(session, Commit(session, len(text), tuple(fresh), 4))
                    text += fresh
        except Refusal:
            texts.pop(session, None)
        for key, proposal in engine.step():
            text = texts[key]
            assert proposal.base == len(text)
            main = list(proposal.lines[0].tokens)
            assert main == continuation(text, len(main), model)
            for line in proposal.lines[1:]:
                begin = [*text, *main[: line.at], line.tokens[0]]
                assert list(line.tokens[1:]) == continuation(begin, len(line.tokens) - 1, model)
        engine.check_integrity()
        for key, _ in engine.refused:
            texts.pop(key, None)
        engine.refused.clear()
        del turn
    for session in list(texts):
        engine.close(session)
    assert engine._pool.used == 0


class Host(HostMemory):
    def free_bytes(self) -> int:
        return 40 * 2**20


def test_the_cache_of_a_drafter_fits_the_memory_that_is_free() -> None:
    target = NearTarget(max_context=4096)
    mb = target.kv_bytes_per_block(BLOCK_SIZE) / 2**20
    engine = DraftEngine(target, kv_cache_mb=4096, most_sessions=8, host=Host())
    assert 0 < engine.max_context * mb / BLOCK_SIZE <= 40
    free = DraftEngine(NearTarget(max_context=4096), kv_cache_mb=4096, most_sessions=8)
    assert free.max_context > engine.max_context
