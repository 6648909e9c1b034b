"""The draft head on ONNX Runtime beside plain numpy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import pytest

from mirror_sd.backends import draft_registry
from mirror_sd.backends.onnx import draft_graph
from mirror_sd.backends.onnx.onnx_draft import OnnxDraftHead
from mirror_sd.backends.onnx.products import Precision, Products
from mirror_sd.backends.onnx.providers import PROVIDERS
from mirror_sd.backends.protocol import DraftHead
from mirror_sd.bench.decode import greedy, run_engine
from mirror_sd.config import EngineConfig
from mirror_sd.config_speculation import SpeculationConfig
from mirror_sd.engine import Engine
from mirror_sd.errors import ConfigError, UnsupportedModel
from mirror_sd.model_store import ModelFiles
from tests.unit.backends.drafts import (
    ODD,
    PlainDraft,
    Story,
    check_drafts,
    draft_batch,
    random_draft,
)
from tests.unit.backends.native.models import PLAIN, random_weights, reference
from tests.unit.backends.test_onnx_backend import form_of, onnx_backend

EMBEDDING = random_weights(PLAIN)["embedding"]
PLAIN_DRAFT = PlainDraft(random_draft(), EMBEDDING)
TARGET = reference(PLAIN).capabilities


def head_of(precision: Precision = "fp32", provider: str = "cpu") -> DraftHead:
    made = OnnxDraftHead(
        random_draft(),
        TARGET,
        EMBEDDING,
        provider=form_of(provider),
        precision=precision,
        threads=1,
    )
    made.allocate_kv(60, 16)
    return made


def test_drafts_equal_those_of_plain_numpy() -> None:
    check_drafts(head_of(), PLAIN_DRAFT)


@pytest.mark.parametrize("provider", ["cpu", "cuda", "trt", "openvino"])
@pytest.mark.parametrize(("precision", "most"), [("fp16", 1e-3), ("bf16", 0.02), ("int8", 0.1)])
def test_narrow_weights_hardly_change_the_chances(
    precision: Precision, most: float, provider: str
) -> None:
    head, story = head_of(precision, provider), Story(30, range(4))
    tokens, chances = head.draft(draft_batch([(story, 0, 30)], 1))
    expected, probabilities = PLAIN_DRAFT.draft(story.ids, story.features, 1)
    assert tokens[0].tolist() == expected
    assert 0 < abs(chances[0, 0] - probabilities[0]) < most


def test_what_is_taken_in_without_drafting_is_kept() -> None:
    head, story = head_of(), Story(40, range(4))
    head.draft(draft_batch([(story, 0, 30)], 0))
    tokens, _ = head.draft(draft_batch([(story, 30, 40)], 3))
    assert tokens[0].tolist() == PLAIN_DRAFT.draft(story.ids, story.features, 3)[0]


def test_features_that_are_no_numbers_end_the_draft() -> None:
    story, other = Story(9, [0]), Story(9, [1], seed=2)
    story.features[3] = np.nan
    tokens, _ = head_of().draft(draft_batch([(story, 0, 9), (other, 0, 9)], 3))
    assert (tokens[0] == -1).all() and (tokens[1] >= 0).all()


@pytest.mark.parametrize(
    "change",
    [
        {"steps": np.array([-1], np.int32)},
        {"features": np.zeros((3, 7), np.float32)},
        {"block_tables": (np.array([60], np.int32),)},
        {"token_ids": np.array([1, 75, 2], np.int32)},
    ],
)
def test_a_bad_batch_is_refused_and_the_cache_untouched(change: dict[str, object]) -> None:
    head, story = head_of(), Story(20, [0, 1])
    head.draft(draft_batch([(story, 0, 16)], 0))
    good = draft_batch([(Story(3, [0]), 0, 3)], 2)
    with pytest.raises(ValueError):
        head.draft(replace(good, **change))
    tokens, _ = head.draft(draft_batch([(story, 16, 20)], 4))
    assert tokens[0].tolist() == PLAIN_DRAFT.draft(story.ids, story.features, 4)[0]


def test_a_target_on_onnxruntime_gets_its_head_from_there() -> None:
    head = draft_registry.create(onnx_backend(PLAIN), random_draft(), threads=None)
    head.allocate_kv(4, 16)
    story = Story(20, range(4))
    tokens, _ = head.draft(draft_batch([(story, 0, 20)], 3))
    assert tokens[0].tolist() == PLAIN_DRAFT.draft(story.ids, story.features, 3)[0]


@pytest.mark.parametrize("drafter", ["head", "history"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_speculation_changes_no_token(
    precision: Precision, drafter: Literal["head", "history"]
) -> None:
    backend = onnx_backend(PLAIN, precision)
    engine = Engine(
        backend,
        EngineConfig(kv_cache_mb=8),
        SpeculationConfig(min_tokens=3, drafter=drafter),
        model_name="random",
        device_class="cpu",
        slots=8,
        head=draft_registry.create(backend, random_draft(), threads=None),
    )
    random = np.random.default_rng(3)
    prompts = [tuple(random.integers(0, 75, n).tolist()) * 3 for n in (4, 9, 1, 60)]
    plain = run_engine(engine, prompts, greedy(24, (), speculation=False), tag="plain")
    for streams in (1, 4):
        drafted = run_engine(
            engine, prompts, greedy(24, (), speculation=True), concurrency=streams, tag="drafted"
        )
        sources = {source for usage in drafted.usages for source in usage.draft_sources}
        assert drafter in sources
        assert drafted.tokens == plain.tokens
    engine.check_integrity()


def test_a_draft_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UnsupportedModel):
        draft_registry.create(
            onnx_backend(PLAIN), random_draft(replace(ODD, taps=(1, 3))), threads=1
        )


def test_an_absent_provider_fails_before_any_weight_is_read(tmp_path: Path) -> None:
    nowhere = ModelFiles("none", tmp_path, "safetensors")
    with pytest.raises(ConfigError, match="onnxruntime-openvino"):
        draft_registry.create_on_onnxruntime(
            TARGET, nowhere, random_draft(), provider="openvino", precision="int8", threads=1
        )


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("provider", ["cpu", "trt"])
def test_the_graphs_are_valid_onnx(precision: Precision, provider: str, tmp_path: Path) -> None:
    products = Products(precision, PROVIDERS[provider])
    (tmp_path / "weights").touch()
    for graph in (
        draft_graph.fusion(random_draft(), products),
        draft_graph.layer(random_draft(), EMBEDDING, products),
    ):
        path = str(tmp_path / "model.onnx")
        onnx.save(graph.model(), path)
        onnx.checker.check_model(path, full_check=True)
