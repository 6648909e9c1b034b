"""The torch draft head beside plain numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mirror_sd.backends import draft_registry
from mirror_sd.backends.protocol import DraftHead
from mirror_sd.backends.reference_backend import ReferenceBackend
from mirror_sd.backends.torch_backend import TorchBackend
from mirror_sd.errors import UnsupportedModel
from mirror_sd.uir.precision_plan import PrecisionPlan
from tests.unit.backends.drafts import (
    ODD,
    PlainDraft,
    Story,
    check_drafts,
    draft_batch,
    random_draft,
)
from tests.unit.backends.native.models import PLAIN, program_of, random_weights

PLAIN_DRAFT = PlainDraft(random_draft(), random_weights(PLAIN)["embedding"])


@pytest.fixture(scope="module")
def target() -> TorchBackend:
    return TorchBackend(program_of(PLAIN, PrecisionPlan.of("fp32")), "cpu", "fp32")


@pytest.fixture
def head(target: TorchBackend) -> DraftHead:
    made = draft_registry.create(target, random_draft(), threads=1)
    made.allocate_kv(60, 16)
    return made


def test_drafts_equal_those_of_plain_numpy(head: DraftHead) -> None:
    check_drafts(head, PLAIN_DRAFT)


def test_features_that_are_no_numbers_end_the_draft(head: DraftHead) -> None:
    story, other = Story(9, [0]), Story(9, [1], seed=2)
    story.features[3] = np.nan
    tokens, _ = head.draft(draft_batch([(story, 0, 9), (other, 0, 9)], 3))
    assert (tokens[0] == -1).all() and (tokens[1] >= 0).all()


@pytest.mark.parametrize(
    "change",
    [
        {"steps": np.array([-1], np.int32)},
        {"steps": np.array([15], np.int32)},
        {"steps": np.array([2, 2], np.int32)},
        {"features": np.zeros((3, 7), np.float32)},
        {"block_tables": (np.array([60], np.int32),)},
        {"positions": np.array([4094, 4095, 4096], np.int32)},
        {"token_ids": np.array([1, 75, 2], np.int32)},
    ],
)
def test_a_bad_batch_is_refused_and_the_cache_untouched(
    head: DraftHead, change: dict[str, object]
) -> None:
    story = Story(20, [0, 1])
    head.draft(draft_batch([(story, 0, 16)], 0))
    good = draft_batch([(Story(3, [0]), 0, 3)], 2)
    with pytest.raises(ValueError):
        head.draft(replace(good, **change))
    tokens, _ = head.draft(draft_batch([(story, 16, 20)], 4))
    assert tokens[0].tolist() == PLAIN_DRAFT.draft(story.ids, story.features, 4)[0]


def test_a_draft_that_does_not_fit_is_refused(target: TorchBackend) -> None:
    with pytest.raises(UnsupportedModel):
        draft_registry.create(target, random_draft(replace(ODD, taps=(1, 3))), threads=1)
    plain = ReferenceBackend(program_of(PLAIN, PrecisionPlan.of("fp32")))
    with pytest.raises(UnsupportedModel, match="reference"):
        draft_registry.create(plain, random_draft(), threads=1)
