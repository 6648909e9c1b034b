"""Two back ends read the same tokens; how far apart are their distributions at each position?

So an early difference does not make all later positions incomparable, as it would between answers.
Perplexity is exp of the mean negative log-probability of the token that comes next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mirror_sd.backends.protocol import Backend, Float32, Int32, RaggedBatch
from mirror_sd.errors import ConfigError, ModelError

TOKENS_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens of which `tokens[scored_from:]` are predicted, each from all before it."""

    tokens: tuple[int, ...]
    scored_from: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """One forward: the token that really follows each of the batch's logit rows is in `targets`."""

    batch: RaggedBatch
    targets: Int32


@dataclass(slots=True)
class Tally:
    """Sums over the predicted positions; natural logarithms."""

    positions: int = 0
    agreed: int = 0
    divergence: float = 0.0
    loss: float = 0.0
    reference_loss: float = 0.0

    def add(self, reference: Float32, logits: Float32, targets: Int32) -> None:
        """Count rows of logits [R, vocabulary]. Raises `ModelError` for values not finite."""
        if not np.isfinite(logits).all():
            raise ModelError("the back end gave logits that are not finite")
        ours, theirs = log_softmax(logits), log_softmax(reference)
        rows = np.arange(len(targets))
        self.positions += len(targets)
        self.agreed += int((logits.argmax(axis=1) == reference.argmax(axis=1)).sum())
        self.divergence += float((np.exp(theirs) * (theirs - ours)).sum())
        self.loss -= float(ours[rows, targets].sum())
        self.reference_loss -= float(theirs[rows, targets].sum())

    def row(self) -> dict[str, Any]:
        """`mean_kl` is KL(reference || back end) in nats; None where there is no position."""
        count = self.positions
        if count == 0:
            names = ("mean_kl", "top1_agreement", "perplexity", "reference_perplexity")
            return {"positions": 0} | dict.fromkeys((*names, "perplexity_ratio"))
        return {
            "positions": count,
            "mean_kl": self.divergence / count,
            "top1_agreement": self.agreed / count,
            "perplexity": math.exp(self.loss / count),
            "reference_perplexity": math.exp(self.reference_loss / count),
            "perplexity_ratio": math.exp((self.loss - self.reference_loss) / count),
        }


def log_softmax(logits: Float32) -> NDArray[np.float64]:
    """Natural log-probabilities of each row."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def pieces(
    passages: Sequence[Passage],
    *,
    num_blocks: int,
    block_size: int,
    tokens_at_once: int = TOKENS_AT_ONCE,
) -> Iterator[Piece]:
    """All passages in order, in forwards of at most `tokens_at_once` tokens.

    Blocks are handed out in turn, round and round: those of one forward are all different, and a
    passage that is cut goes on in the next forward before its blocks come up again. Every passage
    must fit into `num_blocks`.
    """
    draft = _Draft()
    cursor = 0
    for passage in passages:
        length = len(passage.tokens) - 1  # nothing is predicted from the last token
        needed = -(-length // block_size)
        if draft.blocks + needed > num_blocks and draft.token_ids:
            yield draft.finish()
            draft = _Draft()
        table = ((cursor + np.arange(needed)) % num_blocks).astype(np.int32)
        cursor = (cursor + needed) % num_blocks
        start = 0
        while start < length:
            end = min(length, start + tokens_at_once - len(draft.token_ids))
            draft.append(passage, start, end, table)
            start = end
            if len(draft.token_ids) == tokens_at_once:
                yield draft.finish()
                draft = _Draft()
    if draft.token_ids:
        yield draft.finish()


class _Draft:
    """A batch that is being filled."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.blocks = 0
        self._positions: list[int] = []
        self._offsets = [0]
        self._tables: list[Int32] = []
        self._rows: list[int] = []
        self._targets: list[int] = []

    def append(self, passage: Passage, start: int, end: int, table: Int32) -> None:
        base = len(self.token_ids) - start
        self.token_ids.extend(passage.tokens[start:end])
        self._positions.extend(range(start, end))
        self._offsets.append(len(self.token_ids))
        self._tables.append(table)
        self.blocks += len(table)
        for place in range(max(start, passage.scored_from - 1), end):
            self._rows.append(base + place)
            self._targets.append(passage.tokens[place + 1])

    def finish(self) -> Piece:
        batch = RaggedBatch(
            token_ids=np.array(self.token_ids, np.int32),
            positions=np.array(self._positions, np.int32),
            sequence_offsets=np.array(self._offsets, np.int32),
            block_tables=tuple(self._tables),
            logit_rows=np.array(self._rows, np.int32),
        )
        return Piece(batch, np.array(self._targets, np.int32))


def score(
    reference: Backend,
    others: Sequence[Backend],
    passages: Sequence[Passage],
    *,
    num_blocks: int,
    block_size: int,
) -> list[Tally]:
    """One tally for each of `others`; all have at least `num_blocks` blocks allocated.

    Raises `ConfigError` for a passage that does not fit, `ModelError` for logits not finite.
    """
    context = min(backend.capabilities.max_context for backend in (reference, *others))
    room = min(num_blocks * block_size, context)
    longest = max((len(passage.tokens) - 1 for passage in passages), default=0)
    if longest > room:
        raise ConfigError(
            f"a conversation of {longest} tokens does not fit: the context is {context} tokens,"
            f" and engine.kv_cache_mb gives {num_blocks * block_size}"
        )
    tallies = [Tally() for _ in others]
    for piece in pieces(passages, num_blocks=num_blocks, block_size=block_size):
        expected = reference.forward(piece.batch)
        for tally, backend in zip(tallies, others, strict=True):
            found = backend.forward(piece.batch)
            if len(piece.targets):
                tally.add(expected, found, piece.targets)
    return tallies
