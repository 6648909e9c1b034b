"""The C++ sampling against numpy's, and against bad input.

The two differ in the last bit of exp and log. A test that compares tokens therefore leaves out the
rows where that could decide, and says which: two noisy scores, or a nucleus's probability and
top_p, that agree to 12 digits. Where no rounding takes place (greedy, equal logits) none is left
out. Among the instruction sets results are the same bits, always.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies

from mirror_sd.philox import gumbel
from mirror_sd.speculative import numpy_sampling
from mirror_sd.speculative.numpy_sampling import NumpyChooser
from mirror_sd.speculative.sampler import NATIVE_ISA, NativeChooser
from mirror_sd.speculative.sampling import InvalidLogits
from tests.unit.speculative.choosers import ISAS, needs_native, params

if NATIVE_ISA is not None:
    from mirror_sd import _native

pytestmark = needs_native
ROOT = Path(__file__).resolve().parents[3]
CONTRACT = json.loads((ROOT / "tests/contracts/philox.json").read_text())

# Few values, so that ties abound; sizes about the block of 64 tokens that the kernels take.
few = st.sampled_from([0.0, -0.0, 1.0, 1.5, 20.0, -1.0, -30.0, -np.inf, 3e38, -3e38, 1e-40])
ordinary = st.floats(-40, 40, width=32)
sizes = st.sampled_from([1, 2, 3, 5, 63, 64, 65, 127, 128, 129, 200])


def rows(elements):
    return sizes.flatmap(lambda size: numpy_strategies.arrays(np.float32, size, elements=elements))


temperatures = st.one_of(
    st.floats(1e-5, 3), st.sampled_from([0.0, 5e-324, 9e-6, 1e-5, 1.0, 100.0, 1e20, 1e300])
)
masks = st.fixed_dictionaries(
    {
        "top_k": st.sampled_from([0, 1, 2, 3, 50, 64, 199, 10**9]),
        "top_p": st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1e-12, 0.5, 0.999999, 1.0])),
    }
)


def outcome(chooser, row, position):
    try:
        return chooser.choose(row, position)
    except InvalidLogits as error:
        return str(error)


def is_decided(row, wanted, position):
    """False where the last bit of exp or log may decide the token; see above."""
    scaled = row.astype(np.float64) / wanted.temperature
    order = np.argsort(-scaled, kind="stable")
    if 0 < wanted.top_k < row.size:
        order = order[: wanted.top_k]
    if wanted.top_p < 1:
        weights = np.exp(scaled[order] - scaled.max())
        cumulative = np.cumsum(weights) / weights.sum()
        if (abs(cumulative - wanted.top_p) < 1e-12).any():
            return False
        order = order[: int((cumulative < wanted.top_p).sum()) + 1]
    scores = np.sort(scaled[order] + gumbel(wanted.seed, position, order))[-2:]
    return scores.size < 2 or scores[1] - scores[0] > 1e-12 * max(1.0, abs(scores[1]))


@settings(max_examples=300, deadline=None)
@given(
    row=st.one_of(rows(ordinary), rows(few), rows(st.one_of(few, ordinary))),
    temperature=temperatures,
    masks=masks,
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**32 - 1),
)
@example(
    row=np.array([0, 1e-40], dtype=np.float32),
    temperature=1e300,
    masks={"top_k": 0, "top_p": 0.0},
    seed=0,
    position=0,
)
def test_every_instruction_set_chooses_as_numpy_does(row, temperature, masks, seed, position):
    wanted = params(temperature=temperature, seed=seed, **masks)
    expected = outcome(NumpyChooser(wanted), row, position)
    found = {outcome(NativeChooser(wanted, isa=isa), row, position) for isa in ISAS}
    assert len(found) == 1
    if isinstance(expected, int) and temperature >= 1e-5:
        assume(is_decided(row, wanted, position))
    assert found == {expected}


@settings(max_examples=100, deadline=None)
@given(
    size=sizes,
    value=st.sampled_from([0.0, -7.25, 1e30]),
    masks=masks,
    seed=st.integers(0, 2**64 - 1),
)
@example(size=4, value=0.0, masks={"top_k": 0, "top_p": 0.25}, seed=1)
@example(size=10, value=0.0, masks={"top_k": 0, "top_p": 0.3}, seed=1)
def test_of_equal_logits_the_same_ones_are_kept_and_chosen(size, value, masks, seed):
    row = np.full(size, value, dtype=np.float32)
    wanted = params(temperature=1.0, seed=seed, **masks)
    chosen = NumpyChooser(wanted).choose(row, 3)
    assert [NativeChooser(wanted, isa=isa).choose(row, 3) for isa in ISAS] == [chosen] * len(ISAS)


@settings(max_examples=200, deadline=None)
@given(
    row=rows(ordinary),
    bias=st.dictionaries(st.integers(0, 199), st.floats(-100, 100), max_size=5),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    completion=st.lists(st.integers(0, 199), max_size=20),
)
def test_bias_and_penalties_are_applied_as_numpy_does(row, bias, presence, frequency, completion):
    wanted = params(
        temperature=0.0,
        logit_bias={token % row.size: value for token, value in bias.items()},
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    completion = [token % row.size for token in completion]
    expected = NumpyChooser(wanted, completion).choose(row, 0)
    assert {NativeChooser(wanted, completion, isa).choose(row, 0) for isa in ISAS} == {expected}


@settings(max_examples=100, deadline=None)
@given(
    row=rows(ordinary),
    bad=st.lists(
        st.tuples(st.integers(0, 199), st.sampled_from([np.nan, -np.nan, np.inf])),
        min_size=1,
        max_size=3,
    ),
    temperature=st.sampled_from([0.0, 0.5]),
)
def test_a_row_that_is_no_distribution_is_refused_in_the_same_words(row, bad, temperature):
    for token, value in bad:
        row[token % row.size] = value
    wanted = params(temperature=temperature)
    expected = outcome(NumpyChooser(wanted), row, 0)
    assert expected.startswith("logit ")
    assert {outcome(NativeChooser(wanted, isa=isa), row, 0) for isa in ISAS} == {expected}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("penalty", [0.0, 0.6])
def test_drafts_are_judged_as_numpy_does(temperature, penalty):
    generator = np.random.default_rng(2)
    for seed in range(200):
        wanted = params(
            temperature=temperature,
            seed=seed,
            frequency_penalty=penalty,
            stop_token_ids=(3, 4),
            top_p=0.9,
        )
        logits = generator.normal(0, 3, (5, 70)).astype(np.float32)
        draft = NumpyChooser(wanted).judge(logits, [0] * 4, 9, 5).tokens[:1]
        draft += generator.integers(0, 70, 3).tolist()
        for right in range(4):  # draft more and more of what will be chosen
            expected = NumpyChooser(wanted).judge(logits, draft[:4], 9, 4)
            assert NativeChooser(wanted).judge(logits, draft[:4], 9, 4) == expected
            draft[: right + 1] = expected.tokens[: right + 1]


@settings(max_examples=100, deadline=None)
@given(row=st.one_of(rows(ordinary), rows(st.one_of(few, ordinary))), best=st.integers(0, 250))
def test_logprobs_are_numpy_s_but_for_the_last_bits(row, best):
    assume(row.max() > -np.inf)
    with np.errstate(all="ignore"):
        expected = numpy_sampling.token_logprob(row, row.size - 1, best)
    found = [_native.token_logprob(row, row.size - 1, best, isa) for isa in ISAS]
    assert all(one == found[0] for one in found)
    logprob, top = found[0]
    # log(sum(exp(x))) is rounded where its size is the peak's, and so are the differences from it.
    last_bits = 4 * np.spacing(abs(float(row.max())) + 10)
    assert logprob == pytest.approx(expected.logprob, rel=2e-15, abs=last_bits)
    assert [value for _, value in top] == pytest.approx(
        [value for _, value in expected.top], rel=2e-15, abs=last_bits
    )
    # Logits closer than that may tie in one and not in the other.
    chosen = [float(row[token]) for token, _ in top]
    assert chosen == pytest.approx([float(row[t]) for t, _ in expected.top], rel=0, abs=last_bits)


@pytest.mark.parametrize("vector", CONTRACT["vectors"])
def test_philox_gives_the_published_words(vector):
    words = _native.philox_words(vector["counter"], vector["key"])
    assert [f"{word:08x}" for word in words] == vector["words"]


@pytest.mark.parametrize("cell", CONTRACT["gumbel"])
def test_the_noise_of_a_cell_is_the_contract_s(cell):
    noise = _native.gumbel(cell["seed"], cell["position"], cell["token"])
    assert noise == pytest.approx(cell["noise"], rel=1e-15)


def test_noise_is_numpy_s_to_the_last_bits():
    tokens = np.arange(100_000)
    expected = gumbel(77, 5, tokens)
    found = np.array([_native.gumbel(77, 5, int(token)) for token in tokens])
    # The inner log is off by at most an ulp on each side, which is absolute for the outer one.
    assert np.abs(found - expected).max() <= 8e-16 + 2 * np.spacing(23.0)


@pytest.mark.parametrize("vocab", [49152, 151_936, 1000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
def test_large_rows_are_sampled_as_numpy_does(vocab, spread):
    row = np.random.default_rng(vocab).normal(0, spread, vocab).astype(np.float32)
    for masks in (
        {},
        {"top_k": 40},
        {"top_p": 0.95},
        {"top_p": 0.3},
        {"top_k": 5000, "top_p": 0.9},
    ):
        for seed in range(3):
            wanted = params(temperature=0.9, seed=seed, **masks)
            assert is_decided(row, wanted, 8)
            expected = NumpyChooser(wanted).choose(row, 8)
            assert {NativeChooser(wanted, isa=isa).choose(row, 8) for isa in ISAS} == {expected}


@pytest.mark.parametrize("top_p", [0.0005, 0.001, 0.0043, 0.02])
def test_a_nucleus_is_cut_at_the_same_token_among_thousands_of_candidates(top_p):
    # A few of 5000 nearly equal tokens: one too many, or one too few, is soon noticed.
    row = np.random.default_rng(3).permutation(-np.arange(5000) / 1000).astype(np.float32)
    for seed in range(150):
        wanted = params(temperature=1.0, seed=seed, top_p=top_p)
        assert NativeChooser(wanted).choose(row, 1) == NumpyChooser(wanted).choose(row, 1)


def chooser(**fields):
    return NativeChooser(params(**fields))


FLAT = np.zeros((2, 8), dtype=np.float32)
UNALIGNED = np.zeros(33, dtype=np.uint8)[1:].view(np.float32)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: chooser().choose(FLAT[0].astype(np.float64), 0), TypeError),
        (lambda: chooser().choose(FLAT[0].astype(np.int32), 0), TypeError),
        (lambda: chooser().choose(FLAT, 0), TypeError),
        (lambda: chooser().choose(FLAT[:, 0], 0), TypeError),
        (lambda: chooser().choose(FLAT[0][::-1], 0), TypeError),
        (lambda: chooser().choose(None, 0), TypeError),
        (lambda: chooser().choose(FLAT[0], 2**80), TypeError),
        (lambda: chooser().choose(FLAT[0][:0], 0), ValueError),
        (lambda: chooser().choose(UNALIGNED, 0), ValueError),
        (lambda: chooser().judge(UNALIGNED[None], [], 0, 1), ValueError),
        (lambda: _native.token_logprob(UNALIGNED, 0, 0), ValueError),
        (lambda: chooser(logit_bias={8: 1.0}).choose(FLAT[0], 0), ValueError),
        (lambda: chooser(logit_bias={-1: 1.0}).choose(FLAT[0], 0), ValueError),
        (lambda: NativeChooser(params(presence_penalty=1.0), [8]).choose(FLAT[0], 0), ValueError),
        (lambda: chooser().judge(FLAT, [1, 2], 0, 9), ValueError),
        (lambda: chooser().judge(FLAT, [1], 0, 0), ValueError),
        (lambda: chooser().judge(FLAT[0], [], 0, 1), TypeError),
        (lambda: chooser().judge(FLAT[:, ::2], [1], 0, 1), TypeError),
        (lambda: chooser().judge(FLAT[:0], [], 0, 1), ValueError),
        (lambda: chooser().judge(FLAT, ["1"], 0, 1), TypeError),
        (lambda: chooser(temperature=float("nan")), ValueError),
        (lambda: chooser(temperature=float("inf")), ValueError),
        (lambda: chooser(top_p=float("nan")), ValueError),
        (lambda: NativeChooser(params(), isa="mmx"), ValueError),
        (lambda: _native.token_logprob(FLAT[0], 8, 0), ValueError),
        (lambda: _native.token_logprob(FLAT[0], -1, 0), ValueError),
        (lambda: _native.token_logprob(FLAT[0].astype(np.float16), 0, 0), TypeError),
    ],
)
def test_bad_arguments_raise(call, error):
    with pytest.raises(error):
        call()


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", **environment},
        timeout=60,
        check=False,
    )


def test_where_the_environment_names_no_instruction_set_numpy_samples_and_says_so():
    done = run(
        "from mirror_sd.speculative.sampler import NATIVE_ISA; print(NATIVE_ISA)",
        MIRROR_SD_ISA="sse9",
    )
    assert done.stdout.strip() == "None"
    assert "instruction set 'sse9' is not one of" in done.stderr


@pytest.mark.parametrize("isa", ISAS)
def test_the_environment_forces_an_instruction_set(isa):
    done = run(
        "from mirror_sd.speculative.sampler import NATIVE_ISA; print(NATIVE_ISA)", MIRROR_SD_ISA=isa
    )
    assert done.stdout.strip() == isa, done.stderr


def test_without_the_extension_numpy_samples_and_says_so():
    done = run(
        "import logging, sys; logging.basicConfig()\n"
        "sys.modules['mirror_sd._native'] = None\n"
        "import numpy as np\n"
        "from mirror_sd.messages import SamplingParams\n"
        "from mirror_sd.speculative import sampler\n"
        "row = np.arange(5, dtype=np.float32)\n"
        "chooser = sampler.open_chooser(SamplingParams(max_tokens=1, seed=0, temperature=0.0))\n"
        "print(chooser.choose(row, 0), len(sampler.token_logprob(row, 1, 2).top))\n"
    )
    assert done.stdout.split() == ["4", "2"], done.stderr
    assert "sampling in numpy" in done.stderr
