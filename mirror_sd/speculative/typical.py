"""Typical acceptance: a verification that keeps drafts which the target alone would not have said.

A drafted token x that is not the target's own choice is kept where the target finds it likely
enough, p(x) > min(epsilon, delta * exp(-entropy(p))): the less certain the target, the lower the
bar (Cai et al., Medusa, arXiv 2401.10774, section 2.3.1). Answers are then not those of the target:
they depend on the drafts. It is used only where somebody asked for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from mirror_sd.backends.protocol import Float32
from mirror_sd.messages import SamplingParams
from mirror_sd.philox import GREEDY_BELOW
from mirror_sd.speculative.sampling import Judgement, TokenChooser, judge_rows

# Of Medusa's experiments; delta is the root of epsilon.
EPSILON, DELTA = 0.09, 0.3


class TypicalChooser:
    """A `sampling.TokenChooser` around an exact one. `departures` counts the tokens emitted that
    are not the target's choice."""

    def __init__(self, exact: TokenChooser, params: SamplingParams) -> None:
        self._exact = exact
        # A greedy request has no temperature; the distribution judged by is then the model's own.
        self._temperature = params.temperature if params.temperature >= GREEDY_BELOW else 1.0
        self._stops: Collection[int] = frozenset(params.stop_token_ids)
        self.departures = 0

    def commit(self, token: int) -> None:
        self._exact.commit(token)

    def choose(self, logits: Float32, position: int) -> int:
        return self._exact.choose(logits, position)

    def judge(self, logits: Float32, draft: Sequence[int], position: int, room: int) -> Judgement:
        return judge_rows(self, logits, draft, position, room, stops=self._stops, keeps=self._keeps)

    def _keeps(self, logits: Float32, drafted: int, chosen: int) -> bool:
        if drafted == chosen:
            return True
        # Where an answer ends stays the target's affair.
        is_kept = drafted not in self._stops and is_typical(logits, drafted, self._temperature)
        self.departures += is_kept
        return is_kept


def is_typical(logits: Float32, token: int, temperature: float = 1.0) -> bool:
    """Whether the row of logits makes `token` likely enough."""
    scores = logits.astype(np.float64) / temperature
    weights = np.exp(scores - scores.max())
    shares = weights / weights.sum()
    some = shares[shares > 0]
    entropy = float(-(some * np.log(some)).sum())
    return bool(shares[token] > min(EPSILON, DELTA * np.exp(-entropy)))
