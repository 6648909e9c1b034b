"""How many tokens a draft is worth, on conversations that it was not trained on.

The target's greedy answer is known. A draft counts up to its first token that differs, and until
then it was made after the very tokens of the answer: so one unrolled pass over the answer shows
every draft that could have started anywhere in it, exactly as drafting itself would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from mirror_sd.training.dataset import Batch, Dataset
from mirror_sd.training.draft_model import DraftModel
from mirror_sd.uir.draft_file import Precision

_BATCH_TOKENS = 4096
# A rank that counts as never.
NOWHERE = 127
_RANKED = 8


@dataclass(slots=True)
class Acceptance:
    """Counts over the rounds of verifying: `reached[d]` drafts whose first d tokens were right had
    a token at depth d, `accepted[d]` of them had it right."""

    chain: int
    rounds: int = 0
    tokens: int = 0
    reached: NDArray[np.int64] = field(init=False)
    accepted: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.reached = np.zeros(self.chain, np.int64)
        self.accepted = np.zeros(self.chain, np.int64)

    def walk(self, ranks: NDArray[np.int8]) -> None:
        """One answer. ranks [chain, n]: of the answer's token at a place, by the draft whose chain
        began that many tokens earlier; 0 is the draft's choice."""
        length = ranks.shape[1]
        place = 0
        while place < length:
            depth = 0
            while depth < min(self.chain, length - place):
                self.reached[depth] += 1
                if ranks[depth, place + depth] != 0:
                    break
                self.accepted[depth] += 1
                depth += 1
            self.rounds += 1
            self.tokens += min(depth + 1, length - place)
            place += depth + 1

    def add(self, other: Acceptance) -> None:
        self.rounds += other.rounds
        self.tokens += other.tokens
        self.reached += other.reached
        self.accepted += other.accepted

    def row(self) -> dict[str, Any]:
        """tokens_per_verify: what a forward of the target gives, its own token included.
        by_depth: acceptance of each drafted token, given that those before were accepted.
        acceptance: accepted share of what the chains reached."""
        shares = self.accepted / np.maximum(self.reached, 1)
        return {
            "tokens_per_verify": round(self.tokens / max(self.rounds, 1), 4),
            "acceptance": round(float(self.accepted.sum() / max(self.reached.sum(), 1)), 4),
            "by_depth": [round(float(share), 4) for share in shares],
            "rounds": self.rounds,
            "tokens": self.tokens,
        }


def evaluate(
    model: DraftModel,
    data: Dataset,
    conversations: Sequence[int],
    chain: int,
    precision: Precision,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """`Acceptance.row` of them all, `languages` with that of each, and `loss`: the cross entropy of
    the draft's first step with the target's own tokens, in nats."""
    totals: dict[str, Acceptance] = {}
    everything, losses = Acceptance(chain), []
    for language, found, loss in _answers(model, data, conversations, chain, precision, dtype):
        one = Acceptance(chain)
        one.walk(found)
        totals.setdefault(language, Acceptance(chain)).add(one)
        everything.add(one)
        losses.append(loss)
    return {
        **everything.row(),
        "loss": round(float(np.concatenate(losses).mean()), 4),
        "languages": {name: part.row() for name, part in sorted(totals.items())},
    }


def answer_ranks(
    model: DraftModel,
    data: Dataset,
    conversations: Sequence[int],
    chain: int,
    dtype: torch.dtype,
) -> list[NDArray[np.int8]]:
    """`Acceptance.walk`'s ranks of each conversation, up to `_RANKED`."""
    return [r for _, r, _ in _answers(model, data, conversations, chain, model.precision, dtype)]


def _answers(
    model: DraftModel,
    data: Dataset,
    conversations: Sequence[int],
    chain: int,
    precision: Precision,
    dtype: torch.dtype,
) -> list[tuple[str, NDArray[np.int8], NDArray[np.float32]]]:
    found = []
    with torch.inference_mode(), _autocast(model, dtype):
        weights = model.weights(precision)
        for part in data.batches(conversations, _BATCH_TOKENS):
            batch = data.batch(part)
            ranks, losses = _ranks(model, weights, batch, chain)
            for place, conversation in enumerate(part):
                mask = batch.is_answer[place].numpy()
                language = str(data.languages[conversation])
                found.append((language, ranks[:, place][:, mask], losses[place][mask]))
    return found


def _ranks(
    model: DraftModel, weights: Any, batch: Batch, chain: int
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """(ranks [chain, B, L], loss of the first step [B, L])."""
    device = model.embedding.device
    ranks = np.full((chain, *batch.token_ids.shape), NOWHERE, np.int8)
    losses = np.zeros(batch.token_ids.shape, np.float32)
    rows, labels = batch.is_answer, batch.labels[batch.is_answer]
    known = labels >= 0
    states = model.unroll(weights, batch.token_ids.to(device), batch.features.to(device), chain)
    for depth, state in enumerate(states):
        normed = model.norm(state[rows.to(device)].float(), weights["final_norm"])
        # In fp32: rounded to bfloat16, many of the best logits would be equal.
        with torch.autocast(device.type, enabled=False):
            logits = functional.linear(normed, weights["head"].float()).cpu()
        own = logits.gather(1, labels.clamp(min=0)[:, None])
        if depth == 0:
            losses[rows.numpy()] = (logits.logsumexp(dim=1) - own[:, 0]).numpy()
        rank = (logits > own).sum(dim=1)
        rank = torch.where(known & (rank < _RANKED), rank, NOWHERE)
        ranks[depth][rows.numpy()] = rank.numpy().astype(np.int8)
    return ranks, losses


def _autocast(model: DraftModel, dtype: torch.dtype) -> torch.autocast:
    kind = model.embedding.device.type
    return torch.autocast(kind, dtype, enabled=dtype != torch.float32)
