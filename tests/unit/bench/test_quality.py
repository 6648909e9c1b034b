"""The quality benchmark's values: known by arithmetic, by a stand-in target, by the real model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
from typer.testing import CliRunner

from mirror_sd import model_store
from mirror_sd.backends.protocol import Capabilities, Float32, RaggedBatch
from mirror_sd.bench import quality
from mirror_sd.bench.cli import app
from mirror_sd.bench.quality import Subject, rouge_l
from mirror_sd.bench.teacher_forcing import Passage, Tally, pieces, score
from mirror_sd.config import EngineConfig
from mirror_sd.config_speculation import SpeculationConfig
from mirror_sd.engine import Engine
from mirror_sd.errors import ConfigError, ModelError
from tests.unit.speculative.hash_target import HashTarget

DEFAULT = "smollm2-135m-instruct"
SHARP = (1 / 2, 1 / 4, 1 / 4)
TURNED = (1 / 4, 1 / 2, 1 / 4)


class Constant:
    """The same distribution at every position; any constant may be added to logits."""

    def __init__(self, probabilities: Sequence[float], shift: float = 0.0) -> None:
        self._row = np.log(np.array(probabilities, np.float32)) + np.float32(shift)
        self.capabilities = Capabilities("constant", "cpu", "fp32", len(probabilities), 64, True)

    def kv_bytes_per_block(self, block_size: int) -> int:
        return 1

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        pass

    def forward(self, batch: RaggedBatch) -> Float32:
        return np.tile(self._row, (len(batch.logit_rows), 1))


class Backwards(HashTarget):
    """Another model: its logits are those of the target in reverse order of the vocabulary."""

    def forward(self, batch: RaggedBatch) -> Float32:
        return super().forward(batch)[:, ::-1].copy()


def passages(*lengths: int, scored_from: int = 1) -> list[Passage]:
    random = np.random.default_rng(1)
    return [Passage(tuple(random.integers(0, 64, n).tolist()), scored_from) for n in lengths]


def compared(reference: HashTarget, other: HashTarget, items: list[Passage]) -> Tally:
    for backend in (reference, other):
        backend.allocate_kv(16, 4)
    return score(reference, [other], items, num_blocks=16, block_size=4)[0]


def test_known_distributions_give_the_known_divergence_and_perplexities():
    passage = Passage((2, 0, 0, 0), scored_from=1)
    reference, other = Constant(SHARP), Constant(TURNED, shift=3.0)
    row = score(reference, [other], [passage], num_blocks=4, block_size=4)[0].row()
    assert row["positions"] == 3
    assert row["mean_kl"] == pytest.approx(math.log(2) / 4, abs=1e-6)
    assert row["top1_agreement"] == 0.0
    assert row["reference_perplexity"] == pytest.approx(2, abs=1e-5)
    assert row["perplexity"] == pytest.approx(4, abs=1e-5)
    assert row["perplexity_ratio"] == pytest.approx(2, abs=1e-5)


def test_the_divergence_is_that_of_the_reference_from_the_other():
    skewed, flat = (0.7, 0.2, 0.1), (1 / 3, 1 / 3, 1 / 3)
    passage = Passage((0, 1, 2))
    forth = score(Constant(skewed), [Constant(flat)], [passage], num_blocks=4, block_size=4)[0]
    expected = sum(p * math.log(p / q) for p, q in zip(skewed, flat, strict=True))
    assert forth.row()["mean_kl"] == pytest.approx(expected, abs=1e-6)


def test_the_same_back_end_differs_in_nothing():
    row = compared(HashTarget(), HashTarget(), passages(9, 2, 40, 17)).row()
    assert row["positions"] == 8 + 1 + 39 + 16
    assert row["mean_kl"] == 0.0
    assert row["top1_agreement"] == row["perplexity_ratio"] == 1.0


def test_another_model_agrees_no_more_than_by_chance():
    row = compared(HashTarget(), Backwards(), passages(60, 60, 60)).row()
    assert row["mean_kl"] > 0.3 and row["top1_agreement"] < 0.15


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("tokens_at_once", [1, 5, 32, 1000])
@pytest.mark.parametrize("spare_blocks", [0, 1, 50])
def test_every_position_is_read_in_its_own_context(block_size, tokens_at_once, spare_blocks):
    target = HashTarget()
    items = [*passages(23, 2, 9, 31, 7), *passages(31, 12, 6, scored_from=5)]
    blocks = -(-30 // block_size) + spare_blocks
    target.allocate_kv(blocks, block_size)
    found, targets = [], []
    for piece in pieces(
        items, num_blocks=blocks, block_size=block_size, tokens_at_once=tokens_at_once
    ):
        assert len(piece.batch.token_ids) <= tokens_at_once
        used = np.concatenate(piece.batch.block_tables)
        assert len(set(used.tolist())) == len(used)
        found.extend(target.forward(piece.batch))
        targets.extend(piece.targets.tolist())
    expected = [
        (target.row(np.array(item.tokens[:end], np.int64)), item.tokens[end])
        for item in items
        for end in range(item.scored_from, len(item.tokens))
    ]
    np.testing.assert_array_equal(found, [row for row, _ in expected])
    assert targets == [token for _, token in expected]


def test_a_passage_that_does_not_fit_is_refused():
    backend = Constant(SHARP)
    for num_blocks, context in ((4, 16), (100, 64)):
        score(
            backend, [backend], [Passage((0,) * (context + 1))], num_blocks=num_blocks, block_size=4
        )
        with pytest.raises(ConfigError, match=f"conversation of {context + 1} tokens"):
            score(
                backend,
                [backend],
                [Passage((0,) * (context + 2))],
                num_blocks=num_blocks,
                block_size=4,
            )


def test_logits_that_are_not_finite_are_an_error_not_a_figure():
    with np.errstate(divide="ignore"):
        broken = Constant((1.0, 0.0, 0.0))
    with pytest.raises(ModelError, match="not finite"):
        score(Constant(SHARP), [broken], [Passage((0, 1))], num_blocks=4, block_size=4)


def test_no_position_gives_no_figure():
    row = Tally().row()
    assert row.pop("positions") == 0 and set(row.values()) == {None} and len(row) == 5


@pytest.mark.parametrize(
    ("reference", "answer", "value"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 1.0),
        ([1, 2, 3, 4], [1, 9, 3, 4], 0.75),
        ([1, 2, 3, 4], [4, 3, 2, 1], 0.25),
        ([1, 2, 3, 4, 5, 6], [2, 4], 2 * 2 / 8),
        ([1, 1, 1], [1], 2 / 4),
        ([1, 2], [3, 4], 0.0),
        ([], [1], 0.0),
        ([], [], 1.0),
    ],
)
def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence(reference, answer, value):
    assert rouge_l(reference, answer) == pytest.approx(value)
    assert rouge_l(answer, reference) == pytest.approx(value)


def subject(target: HashTarget) -> Subject:
    engine = Engine(
        target,
        EngineConfig(block_size=4, kv_cache_mb=64, prefill_chunk=16),
        SpeculationConfig(),
        model_name="m",
        device_class="cpu",
        slots=4,
    )
    return Subject(target, engine)


def test_answers_and_texts_are_measured_apart():
    prompts = [(1, 2, 3), (4, 5), (6, 7, 8, 9), (10,), (11, 12)]
    same, other = quality.measure(
        subject(HashTarget(memory=1)),
        [subject(HashTarget(memory=1)), subject(Backwards(memory=1))],
        prompts,
        [(5, 6, 7), (8,)],
        max_tokens=10,
        stop=(),
        block_size=4,
    )
    assert same["answers"]["positions"] == other["answers"]["positions"] == 50
    assert same["text"]["positions"] == 2
    assert same["answers"]["mean_kl"] == same["text"]["mean_kl"] == 0.0
    assert same["rouge_l"] == same["identical_answers"] == 1.0
    assert other["answers"]["top1_agreement"] < 0.5
    assert other["rouge_l"] < 0.5 and other["identical_answers"] == 0.0


@pytest.fixture(scope="module")
def default_model() -> None:
    try:
        model_store.resolve(DEFAULT)
    except ModelError:
        model_store.pull(DEFAULT, print)


def test_the_command_measures_several_precisions_of_the_real_model(default_model):
    options = ["--limit", "1", "--max-tokens", "12", "--text-tokens", "24"]
    settings = ["--set", "pools.cpu.engine=torch", "--set", "engine.kv_cache_mb=64"]
    wanted = ["--precision", "fp32,bf16", *settings, "--json"]
    result = CliRunner().invoke(app, ["quality", *options, *wanted], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["model"] == DEFAULT and report["machine"]["cpu"]
    assert report["reference"]["precision"] == "fp32"
    fp32, bf16 = report["runs"]
    assert (fp32["precision"], bf16["precision"]) == ("fp32", "bf16")
    for part in ("answers", "text"):
        assert fp32[part]["mean_kl"] == 0.0
        assert fp32[part]["top1_agreement"] == fp32[part]["perplexity_ratio"] == 1.0
        assert 1e-7 < bf16[part]["mean_kl"] < 1e-2
        assert bf16[part]["perplexity_ratio"] == pytest.approx(1, abs=0.05)
    assert fp32["rouge_l"] == fp32["identical_answers"] == 1.0


def test_an_unknown_precision_is_told_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr("mirror_sd.bench.quality.create_backend", lambda *_: pytest.fail("loaded"))
    result = CliRunner().invoke(app, ["quality", "--limit", "1", "--precision", "int3"])
    assert result.exit_code == 2
    told = " ".join(result.output.replace("│", " ").split())
    assert "--precision: takes a comma list of auto, fp32, bf16, fp16, int8" in told
