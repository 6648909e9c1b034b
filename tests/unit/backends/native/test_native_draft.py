"""The native draft head beside plain numpy, and what it promises about batches and its cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from mirror_sd import _native
from mirror_sd.backends import draft_registry
from mirror_sd.backends.native.native_backend import NativeBackend
from mirror_sd.backends.native.native_draft import PLANS, NativeDraftHead
from mirror_sd.errors import UnsupportedModel
from mirror_sd.uir.draft_file import Precision
from tests.unit.backends.drafts import (
    ODD,
    PlainDraft,
    Story,
    draft_batch,
    of_precision,
    random_draft,
)
from tests.unit.backends.native.batches import Run, advance, batch_of, ints
from tests.unit.backends.native.models import FP32, INT8, native, random_weights
from tests.unit.backends.native.models import ODD as TARGET

ISAS = _native.available_isas()
SHUFFLED = np.random.default_rng(1).permutation(60)


def head_of(
    precision: Precision = "fp32", *, isa: str | None = None, threads: int = 2, seed: int = 11
) -> NativeDraftHead:
    program = random_draft(replace(ODD, precision=precision), seed)
    head = NativeDraftHead(program, native(TARGET, FP32, isa=isa, threads=threads))
    head.allocate_kv(60, 16)
    return head


def plain_of(precision: Precision = "fp32") -> PlainDraft:
    return PlainDraft(of_precision(precision), random_weights(TARGET)["embedding"])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("length", [1, 2, 17, 300])
def test_fp32_drafts_equal_those_of_plain_numpy(isa: str, length: int) -> None:
    story = Story(length, SHUFFLED[:20])
    tokens, probabilities = head_of(isa=isa).draft(draft_batch([(story, 0, length)], 6))
    expected, chances = plain_of().draft(story.ids, story.features, 6)
    assert tokens[0].tolist() == expected
    assert np.allclose(probabilities[0], chances, atol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", ["int8", "bf16", "fp16"])
def test_short_precisions_draft_nearly_the_same(isa: str, precision: Precision) -> None:
    head, plain = head_of(precision, isa=isa), plain_of(precision)
    same = 0
    for seed in range(40):
        story = Story(30, SHUFFLED[:4], seed=seed)
        tokens, probabilities = head.draft(draft_batch([(story, 0, 30)], 1))
        expected, chances = plain.draft(story.ids, story.features, 1)
        same += tokens[0].tolist() == expected
        if tokens[0].tolist() == expected:
            assert abs(probabilities[0, 0] - chances[0]) < 0.1
    assert same >= 35


def test_codes_of_the_file_stay_as_they_are() -> None:
    """Weights that are fixed points of packing: logits then equal those of the fp32 values up to
    what the activations lose."""
    matrix = of_precision("int8").weights["head"]
    packed = np.zeros(_native.packed_bytes("int8", *matrix.shape), np.uint8)
    multiplier = _native.pack(matrix, "int8", 1, packed)
    groups = packed.reshape(-1, 1152)  # one strip of 16 outputs and 64 inputs each
    for row in range(len(matrix)):
        lane, group = row % 16, groups[row // 16]
        for half in range(2):
            codes = group[512 * half : 512 * (half + 1)].reshape(8, 16, 4)[:, lane].reshape(-1)
            scale = group[1024 + 32 * half :][:32].view(np.float16)[lane]
            offset = group[1088:].view(np.uint16).reshape(16, 2)[lane, half]
            wanted = matrix[row, 32 * half : 32 * half + 32]
            values = (codes.astype(np.float32) - 128) * np.float32(scale) * np.float32(multiplier)
            assert offset == 0
            assert np.array_equal(values[: len(wanted)], wanted)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_drafts_go_on_from_the_cache_as_if_computed_anew(precision: Precision) -> None:
    """Tokens come in as a decode loop brings them, after drafts that were mostly wrong."""
    head, anew = head_of(precision), head_of(precision)
    story = Story(60, SHUFFLED[:5])
    done = 0
    for count in (20, 1, 3, 1, 2, 9, 1):
        got = head.draft(draft_batch([(story, done, done + count)], 5))
        done += count
        expected = anew.draft(draft_batch([(story, 0, done)], 5))
        assert np.array_equal(got[0], expected[0])
        assert np.array_equal(got[1], expected[1])


def test_drafted_positions_are_overwritten_by_the_tokens_that_take_them() -> None:
    head, story = head_of(), Story(40, SHUFFLED[:5])
    head.draft(draft_batch([(story, 0, 20)], 12))
    tokens, _ = head.draft(draft_batch([(story, 20, 40)], 4))
    expected, _ = plain_of().draft(story.ids, story.features, 4)
    assert tokens[0].tolist() == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_drafts_of_a_batch_have_the_bits_of_those_alone(precision: Precision, threads: int) -> None:
    lengths, steps = [5, 1, 40, 18, 2, 33], [4, 0, 6, 1, 3, 6]
    settings = {"floors": [0, 0, 0, 0, 0.02, 0], "temperatures": [0, 0, 1, 0.7, 0, 3]}
    stories = [
        Story(length, SHUFFLED[4 * i : 4 * i + 4], seed=i) for i, length in enumerate(lengths)
    ]
    seeds = list(range(2**63, 2**63 + 6))
    together, alone = head_of(precision, threads=threads), head_of(precision, threads=1)
    for half in (False, True):  # in two portions, the second after drafts of the first
        parts = [
            (s, (len(s.ids) + 1) // 2, len(s.ids)) if half else (s, 0, (len(s.ids) + 1) // 2)
            for s in stories
        ]
        kept = [i for i, (_, first, end) in enumerate(parts) if end > first]
        tokens, chances = together.draft(
            draft_batch(
                [parts[i] for i in kept],
                [steps[i] for i in kept],
                seeds=[seeds[i] for i in kept],
                **{name: [values[i] for i in kept] for name, values in settings.items()},
            )
        )
        for place, i in enumerate(kept):
            single = alone.draft(
                draft_batch(
                    [parts[i]],
                    steps[i],
                    seeds=seeds[i],
                    **{name: values[i] for name, values in settings.items()},
                )
            )
            assert np.array_equal(tokens[place, : steps[i]], single[0][0])
            assert np.array_equal(chances[place, : steps[i]], single[1][0])
            assert (tokens[place, steps[i] :] == -1).all()
            assert not chances[place, steps[i] :].any()


@pytest.mark.parametrize("isa", ISAS)
def test_drawn_tokens_are_those_of_the_targets_noise(isa: str) -> None:
    head, plain = head_of(isa=isa), plain_of()
    stories = [Story(12, SHUFFLED[2 * i : 2 * i + 2], seed=i) for i in range(20)]
    temperatures = np.resize([0.3, 1.0, 2.5], 20).tolist()
    seeds = [7 * i + (i << 40) for i in range(20)]
    batch = draft_batch([(s, 0, 12) for s in stories], 4, temperatures=temperatures, seeds=seeds)
    tokens, chances = head.draft(batch)
    for i, story in enumerate(stories):
        expected, probabilities = plain.draft(
            story.ids, story.features, 4, temperature=temperatures[i], seed=seeds[i]
        )
        assert tokens[i].tolist() == expected
        assert np.allclose(chances[i], probabilities, atol=1e-4)


def test_drafting_ends_at_the_floor() -> None:
    head, plain = head_of(), plain_of()
    lengths = set()
    for seed in range(30):
        story = Story(9, SHUFFLED[:2], seed=seed)
        tokens, chances = head.draft(draft_batch([(story, 0, 9)], 8, floors=0.05))
        expected, _ = plain.draft(story.ids, story.features, 8, floor=0.05)
        assert [token for token in tokens[0].tolist() if token >= 0] == expected
        assert np.prod(chances[0][: len(expected)]) >= 0.05
        lengths.add(len(expected))
    assert len(lengths) > 2
    impossible = head.draft(draft_batch([(Story(9, SHUFFLED[:2]), 0, 9)], 8, floors=float("nan")))
    assert (impossible[0] == -1).all()


def test_no_steps_take_tokens_in_without_a_draft() -> None:
    head, story = head_of(), Story(31, SHUFFLED[:3])
    tokens, probabilities = head.draft(draft_batch([(story, 0, 30)], 0))
    assert tokens.shape == probabilities.shape == (1, 0)
    tokens, _ = head.draft(draft_batch([(story, 30, 31)], 3))
    assert tokens[0].tolist() == plain_of().draft(story.ids, story.features, 3)[0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("precision", ["fp32", "int8", "bf16"])
def test_features_that_are_no_numbers_end_only_their_own_draft(
    value: float, precision: Precision
) -> None:
    head = head_of(precision)
    sound, broken = Story(12, SHUFFLED[:2]), Story(12, SHUFFLED[2:4], seed=1)
    expected = head.draft(draft_batch([(sound, 0, 12)], 4, temperatures=1.0))
    broken.features[7, 3] = value
    for temperature in (0.0, 1.0):
        tokens, probabilities = head.draft(
            draft_batch([(broken, 0, 12), (sound, 0, 12)], 4, temperatures=[temperature, 1.0])
        )
        if not np.isfinite(value):
            assert (tokens[0] == -1).all() and not probabilities[0].any()
        assert np.array_equal(tokens[1], expected[0][0])


@pytest.mark.parametrize("temperature", [np.nan, np.inf, -1.0, 1e-30, 1e-3, 1e30])
def test_odd_temperatures_draft_without_harm(temperature: float) -> None:
    story = Story(12, SHUFFLED[:2])
    tokens, chances = head_of().draft(draft_batch([(story, 0, 12)], 3, temperatures=temperature))
    assert np.isin(tokens, of_precision("fp32").token_ids).all()
    assert ((chances > 0) & (chances <= 1)).all()


BAD = {
    "no tokens": {"token_ids": ints(), "positions": ints()},
    "a token beyond the vocabulary": {"token_ids": ints(1, 75, 2)},
    "a negative token": {"token_ids": ints(1, -1, 2)},
    "positions apart": {"positions": ints(0, 2, 3)},
    "a position beyond the context": {"positions": ints(4094, 4095, 4096)},
    "offsets short": {"sequence_offsets": ints(0, 2)},
    "offsets empty": {"sequence_offsets": ints(0)},
    "an empty sequence": {
        "sequence_offsets": ints(0, 0, 3),
        "block_tables": (ints(0), ints(1)),
    },
    "a short table": {"block_tables": (ints(),)},
    "a table too short for the draft": {"steps": ints(15)},
    "a block that is not there": {"block_tables": (ints(60),)},
    "a negative block": {"block_tables": (ints(-1),)},
    "negative steps": {"steps": ints(-1)},
    "far too many steps": {"steps": ints(2000), "block_tables": (np.arange(60, dtype=np.int32),)},
    "most steps there are": {"steps": ints(2**31 - 1)},
    "steps for two": {"steps": ints(1, 1)},
    "no floors": {"floors": np.zeros(0, np.float32)},
    "floors of another type": {"floors": np.zeros(1, np.float64)},
    "seeds of another type": {"seeds": np.zeros(1, np.int64)},
    "features short": {"features": np.zeros((2, 104), np.float32)},
    "features narrow": {"features": np.zeros((3, 52), np.float32)},
    "features of another type": {"features": np.zeros((3, 104), np.float64)},
    "features turned": {"features": np.zeros((104, 3), np.float32).T},
    "steps that are floats": {"steps": np.ones(1, np.float32)},
}


@pytest.mark.parametrize("wrong", BAD.values(), ids=BAD.keys())
def test_a_bad_batch_is_refused_and_the_cache_untouched(wrong: dict[str, object]) -> None:
    head, story = head_of(), Story(20, [0, 1])
    head.draft(draft_batch([(story, 0, 16)], 0))
    good = draft_batch([(Story(3, [0]), 0, 3)], 2)
    with pytest.raises((ValueError, TypeError)):
        head.draft(replace(good, **wrong))
    tokens, _ = head.draft(draft_batch([(story, 16, 20)], 4))
    assert tokens[0].tolist() == plain_of().draft(story.ids, story.features, 4)[0]


def test_a_block_written_by_two_sequences_is_refused() -> None:
    head = head_of()
    one, two = Story(15, [3, 4]), Story(10, [5, 4])
    head.draft(draft_batch([(one, 0, 15), (two, 0, 10)], 2))
    with pytest.raises(ValueError, match="two places"):  # both would draft into block 4
        head.draft(draft_batch([(one, 0, 15), (two, 0, 10)], [3, 8]))


def test_a_head_before_its_cache_or_weights_is_refused() -> None:
    target = native(TARGET, FP32)
    head = NativeDraftHead(random_draft(), target)
    with pytest.raises(ValueError, match="allocate_kv"):
        head.draft(draft_batch([(Story(3, [0]), 0, 3)], 2))
    bare = _native.DraftHead(
        target.decoder,
        feature_size=104,
        token_ids=ints(1, 2),
        intermediate_size=45,
        heads=4,
        kv_heads=2,
        head_dim=12,
        rms_eps=1e-5,
        frequencies=np.ones(6, np.float32),
        cache="fp32",
    )
    with pytest.raises(ValueError, match="missing"):
        bare.seal()


def test_a_draft_for_another_target_is_refused() -> None:
    target = native(TARGET, INT8)
    for change in ({"vocab_size": 76}, {"hidden_size": 64}, {"taps": (1, 3)}):
        with pytest.raises(UnsupportedModel):
            draft_registry.create(target, random_draft(replace(ODD, **change)), threads=None)


def test_target_and_draft_do_not_disturb_each_other() -> None:
    """They share threads and embedding, but neither memory nor cache."""
    target = native(TARGET, INT8, threads=2)
    target.allocate_kv(8, 16)
    head = draft_registry.create(target, of_precision("int8"), threads=None)
    head.allocate_kv(8, 16)
    assert head.taps == (1, 2)
    lone = native(TARGET, INT8, threads=2)
    lone.allocate_kv(8, 16)
    story = Story(40, [0, 1, 2, 3])
    runs = [Run(story.ids, story.table) for _ in range(2)]
    done = 0
    for count in (7, 1, 4, 9):
        advance(target, [(runs[0], count)])
        advance(lone, [(runs[1], count)])
        head.draft(draft_batch([(story, done, done + count)], 5))
        done += count
    assert np.array_equal(runs[0].logits, runs[1].logits)


def test_drafts_and_forwards_of_several_threads_take_turns() -> None:
    target = native(TARGET, INT8, threads=2)
    target.allocate_kv(8, 16)
    heads = [NativeDraftHead(of_precision("int8"), target) for _ in range(2)]
    story, run = Story(40, [0, 1, 2, 3]), Run(Story(40, [0]).ids, ints(0, 1, 2))
    batch, forward = draft_batch([(story, 0, 40)], 6), batch_of([(run, 40)])
    for head in heads:
        head.allocate_kv(8, 16)
    expected, logits = heads[0].draft(batch), target.forward(forward).copy()

    def work(index: int) -> bool:
        if index % 3 == 0:
            return np.array_equal(target.forward(forward), logits)
        return np.array_equal(heads[index % 3 - 1].draft(batch)[1], expected[1])

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(120)))


def test_the_head_keeps_its_target_alive() -> None:
    story = Story(10, SHUFFLED[:2])
    head = head_of()  # its target is held by nothing else
    tokens, _ = head.draft(draft_batch([(story, 0, 10)], 3))
    assert tokens[0].tolist() == plain_of().draft(story.ids, story.features, 3)[0]


def test_kv_bytes_count_one_layer() -> None:
    head = NativeDraftHead(random_draft(), native(TARGET, FP32))
    assert head.kv_bytes_per_block(16) == 2 * 2 * 16 * 16 * 4  # heads are padded to 16
    assert set(PLANS) == {"int8", "fp16", "bf16", "fp32"}
    assert isinstance(native(TARGET, FP32), NativeBackend)
