"""The draft head on XLA beside plain numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mirror_sd.backends import draft_registry
from mirror_sd.backends.protocol import DraftHead
from mirror_sd.backends.xla import runtime
from mirror_sd.backends.xla.xla_backend import XlaBackend
from mirror_sd.errors import UnsupportedModel
from mirror_sd.uir.precision_plan import PrecisionPlan
from tests.unit.backends.drafts import ODD, PlainDraft, Story, draft_batch, random_draft
from tests.unit.backends.native.models import PLAIN, program_of, random_weights


@pytest.fixture(scope="module")
def target() -> XlaBackend:
    program = program_of(PLAIN, PrecisionPlan.of("fp32"))
    return XlaBackend(program, runtime.open_device("cpu", 2), "fp32")


@pytest.fixture(scope="module")
def head(target: XlaBackend) -> DraftHead:
    made = draft_registry.create(target, random_draft(), threads=1)
    made.allocate_kv(60, 16)
    return made


def test_drafts_equal_those_of_plain_numpy_and_nothing_is_compiled(
    head: DraftHead, target: XlaBackend
) -> None:
    plain = PlainDraft(random_draft(), random_weights(PLAIN)["embedding"])
    # The first forward is longer than any program, and one sequence than one chunk of keys.
    stories = [Story(20 + 3 * i, range(4 * i, 4 * i + 4), seed=i) for i in range(5)]
    stories.append(Story(150, range(30, 42), seed=9))
    steps, temperatures = [5, 0, 3, 5, 1, 4], [0.0, 0.0, 1.0, 0.4, 0.0, 2.0]
    before = target.compilations
    head.draft(draft_batch([(s, 0, len(s.ids) - 5) for s in stories], 2))
    tokens, chances = head.draft(
        draft_batch(
            [(s, len(s.ids) - 5, len(s.ids)) for s in stories],
            steps,
            temperatures=temperatures,
            seeds=list(range(6)),
        )
    )
    assert target.compilations == before
    for i, story in enumerate(stories):
        expected, probabilities = plain.draft(
            story.ids, story.features, steps[i], temperature=temperatures[i], seed=i
        )
        assert tokens[i, : steps[i]].tolist() == expected
        assert np.allclose(chances[i, : steps[i]], probabilities, atol=1e-4)
        assert (tokens[i, steps[i] :] == -1).all()


def test_features_that_are_no_numbers_harm_one_draft_alone(head: DraftHead) -> None:
    story, other = Story(9, [0]), Story(9, [1], seed=2)
    story.features[3] = np.nan
    tokens, _ = head.draft(draft_batch([(story, 0, 9), (other, 0, 9)], 3))
    assert (tokens[0] == -1).all() and (tokens[1] >= 0).all()
    # The block holds no numbers behind the new sequence's tokens.
    tokens, _ = head.draft(draft_batch([(Story(3, [0], seed=3), 0, 3)], 1))
    assert tokens[0, 0] >= 0


def test_a_draft_that_does_not_fit_is_refused(target: XlaBackend) -> None:
    with pytest.raises(UnsupportedModel):
        draft_registry.create(target, random_draft(replace(ODD, taps=(1, 3))), threads=1)
