"""Random numbers, the sampling chain, verification and draft length."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from mirror_sd.philox import MAX_GUMBEL, gumbel, philox4x32
from mirror_sd.speculative import numpy_sampling, sampler
from mirror_sd.speculative.drafters.lookup import LookupDrafter
from mirror_sd.speculative.length_controller import WindowController
from mirror_sd.speculative.sampling import InvalidLogits
from mirror_sd.speculative.verifier import verify
from tests.unit.speculative.choosers import params, with_every_chooser

CONTRACT = json.loads((Path(__file__).parents[2] / "contracts/philox.json").read_text())


@pytest.mark.parametrize("vector", CONTRACT["vectors"])
def test_philox_gives_the_published_words(vector):
    counter = tuple(np.array([word], dtype=np.uint32) for word in vector["counter"])
    words = philox4x32(counter, tuple(vector["key"]))[0]
    assert [f"{word:08x}" for word in words] == vector["words"]


@pytest.mark.parametrize("cell", CONTRACT["gumbel"])
def test_the_noise_of_a_cell_is_the_contract_s(cell):
    noise = gumbel(cell["seed"], cell["position"], np.array([cell["token"]]))[0]
    assert noise == pytest.approx(cell["noise"], rel=1e-15)


def test_the_noise_of_a_cell_does_not_depend_on_which_others_are_asked():
    all_at_once = gumbel(123, 45, np.arange(1000))
    some = np.array([999, 3, 500, 4, 7])
    assert (gumbel(123, 45, some) == all_at_once[some]).all()
    assert all_at_once.max() < MAX_GUMBEL


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


@with_every_chooser
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.5, 8, 1.0), (1.0, 0, 0.8), (0.8, 12, 0.9)],
)
def test_samples_follow_the_target_s_masked_softmax(open_chooser, temperature, top_k, top_p):
    logits = np.random.default_rng(5).normal(0, 2, 40).astype(np.float32)
    p = softmax(logits.astype(np.float64) / temperature)
    order = np.argsort(-p, kind="stable")
    kept = order[:top_k] if top_k else order
    mass = np.cumsum(p[kept] / p[kept].sum())
    kept = kept[: int((mass < top_p).sum()) + 1] if top_p < 1 else kept
    expected = np.zeros_like(p)
    expected[kept] = p[kept] / p[kept].sum()
    draws = 20_000
    counts = np.zeros_like(p)
    for seed in range(draws):
        chooser = open_chooser(params(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p))
        counts[chooser.choose(logits, position=17)] += 1
    assert counts[expected == 0].sum() == 0
    # Cells expected fewer than 5 times are joined, as the test demands.
    rare = (expected > 0) & (expected * draws < 5)
    f_obs = np.append(counts[(expected > 0) & ~rare], counts[rare].sum())
    f_exp = np.append(expected[(expected > 0) & ~rare], expected[rare].sum()) * draws
    assert chisquare(f_obs[f_exp > 0], f_exp[f_exp > 0]).pvalue > 1e-4


def test_the_chi_square_test_notices_a_wrong_distribution():
    counts = np.array([5200, 4800])
    assert chisquare(counts, [5000, 5000]).pvalue < 1e-4 * 2


@with_every_chooser
@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**64 - 1), st.floats(0.05, 5), st.integers(0, 10**6))
def test_pruned_noise_gives_the_winner_of_full_noise(open_chooser, seed, temperature, position):
    logits = np.random.default_rng(seed % 1000).normal(0, 3, 5000).astype(np.float32)
    scaled = logits.astype(np.float64) / temperature
    full = scaled + gumbel(seed, position, np.arange(5000))
    chooser = open_chooser(params(seed=seed, temperature=temperature))
    assert chooser.choose(logits, position) == int(full.argmax())


@with_every_chooser
def test_ties_go_to_the_lower_token_in_every_mode(open_chooser):
    flat = np.zeros(10, dtype=np.float32)
    assert open_chooser(params(temperature=0.0)).choose(flat, 0) == 0
    chosen = {
        open_chooser(params(seed=seed, temperature=1.0, top_k=3)).choose(flat, 0)
        for seed in range(100)
    }
    assert chosen == {0, 1, 2}
    chosen = {
        open_chooser(params(seed=seed, temperature=1.0, top_p=0.35)).choose(flat, 0)
        for seed in range(200)
    }
    assert chosen == {0, 1, 2, 3}


@with_every_chooser
@pytest.mark.parametrize(
    "temperature", [0.0, 5e-324, 1e-310, 1e-300, 1e-100, 1e-16, 1e-15, 1e-9, 1e-5, 1.1e-5, 1e-3]
)
@pytest.mark.parametrize("masks", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_any_small_temperature_gives_the_most_likely_token(open_chooser, temperature, masks):
    logits = np.random.default_rng(1).normal(0, 3, 100).astype(np.float32)
    chooser = open_chooser(params(temperature=temperature, seed=9, **masks))
    assert chooser.choose(logits, 4) == int(logits.argmax())


@with_every_chooser
def test_logits_of_any_size_have_a_winner(open_chooser):
    logits = np.array([3e38, -3e38, 1.0], dtype=np.float32)
    assert open_chooser(params(temperature=2e-5, seed=9)).choose(logits, 4) == 0


@with_every_chooser
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_an_error(open_chooser, temperature, value):
    logits = np.zeros(10, dtype=np.float32)
    logits[3] = value
    with pytest.raises(InvalidLogits):
        open_chooser(params(temperature=temperature)).choose(logits, 0)


@with_every_chooser
def test_penalties_use_the_accepted_prefix_of_each_row(open_chooser):
    logits = np.zeros((3, 4), dtype=np.float32)
    logits[:, 1] = 0.5
    greedy = params(temperature=0.0, presence_penalty=1.0)
    verdict = verify(logits, [1, 0], open_chooser(greedy), greedy, position=5, room=9)
    # Row 0 takes token 1, which is then penalised below the rest: 0, then 2.
    assert verdict.tokens == [1, 0, 2] and verdict.accepted == 2


@with_every_chooser
def test_the_row_of_the_first_mismatch_gives_the_replacement(open_chooser):
    logits = np.zeros((4, 4), dtype=np.float32)
    for row, token in enumerate([1, 2, 3, 0]):
        logits[row, token] = 1
    greedy = params(temperature=0.0)
    verdict = verify(logits, [1, 0, 3], open_chooser(greedy), greedy, position=0, room=9)
    assert verdict.tokens == [1, 2] and verdict.accepted == 1 and verdict.reason is None


@with_every_chooser
@pytest.mark.parametrize(
    ("room", "tokens", "reason"), [(1, [1], "length"), (2, [1, 2], "length"), (3, [1, 2], "stop")]
)
def test_an_accepted_run_is_cut_at_the_cap_or_the_stop(open_chooser, room, tokens, reason):
    logits = np.zeros((4, 5), dtype=np.float32)
    for row, token in enumerate([1, 2, 3, 4]):
        logits[row, token] = 1
    greedy = params(temperature=0.0, stop_token_ids=(3,))
    verdict = verify(logits, [1, 2, 3], open_chooser(greedy), greedy, position=0, room=room)
    assert (verdict.tokens, verdict.reason) == (tokens, reason)


@pytest.mark.parametrize("source", [sampler, numpy_sampling], ids=["default", "numpy"])
def test_logprobs_are_a_log_softmax(source):
    logits = np.random.default_rng(0).normal(size=100).astype(np.float32)
    entry = source.token_logprob(logits, 7, 5)
    expected = np.log(softmax(logits.astype(np.float64)))
    assert entry.logprob == pytest.approx(expected[7])
    assert [t for t, _ in entry.top] == np.argsort(-expected)[:5].tolist()
    assert source.token_logprob(logits, 7, 0).top == ()
    assert len(source.token_logprob(logits, 7, 200).top) == 100


@pytest.mark.parametrize("source", [sampler, numpy_sampling], ids=["default", "numpy"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logprobs_of_what_is_no_distribution_are_an_error(source, value):
    with pytest.raises(InvalidLogits):
        source.token_logprob(np.array([0, value, 1], dtype=np.float32), 0, 1)


def test_the_window_rule_adds_two_above_and_subtracts_one_else_within_bounds():
    rule = WindowController(minimum=1, maximum=8, initial=4, window=10, grow_above=0.8)
    rule.observe(4, 4)
    assert rule.length == 6
    rule.observe(6, 6)
    rule.observe(8, 8)
    assert rule.length == 8
    rule.observe(5, 1)  # mean (3 + 0.2) / 4 = 0.8 is not above 0.8
    assert rule.length == 7
    for _ in range(20):
        rule.observe(7, 0)
    assert rule.length == 1
    rule.observe(0, 0)
    assert rule.length == 1


def test_lookup_proposes_what_followed_the_latest_longest_match():
    source = LookupDrafter(ngram_min=2, ngram_max=3).open(
        [1, 2, 3, 9, 8, 2, 3, 7, 1, 2, 3], tenant="t", prompt_length=0
    )
    assert source.propose(3) == [9, 8, 2]  # 1 2 3 beats the later 2 3
    assert source.propose(0) == []
    source.commit([7])
    assert source.propose(2) == [1, 2]
    assert (
        LookupDrafter(ngram_min=2, ngram_max=3)
        .open([1, 2, 3], tenant="t", prompt_length=0)
        .propose(4)
        == []
    )


def test_lookup_goes_round_a_loop():
    source = LookupDrafter(ngram_min=2, ngram_max=4).open([5, 6, 5, 6], tenant="t", prompt_length=0)
    assert source.propose(5) == [5, 6, 5, 6, 5]
