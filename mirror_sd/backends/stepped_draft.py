"""Drafting by a head whose layer and logits some library computes: what is the same for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from mirror_sd.backends import batch_check, block_table, draft_fit
from mirror_sd.backends.protocol import Capabilities, DraftBatch, Float32, Int32
from mirror_sd.philox import GREEDY_BELOW, gumbel
from mirror_sd.uir.draft_file import DraftProgram

States = TypeVar("States")
# Candidates of a draw: the noise of the others hardly ever reaches them.
_CANDIDATES = 512


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Tokens of one pass. indexes: [rows] those that are drafted from; sequences: [rows] of which
    sequence each is."""

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    indexes: list[int]
    sequences: list[int]


class SteppedDraft(ABC, Generic[States]):
    """`DraftHead.draft`, one pass of the layer for each depth.

    It raises `ValueError` on a bad batch and leaves the cache as it was; the constructor raises
    `UnsupportedModel` for a draft that does not fit the target. `States` are the library's arrays
    [rows, hidden].
    """

    def __init__(self, program: DraftProgram, target: Capabilities) -> None:
        draft_fit.check(program.spec, target)
        self._spec = program.spec
        self._max_context = target.max_context
        self._token_ids = program.token_ids.astype(np.int64)
        self._num_blocks = self._block_size = 0

    @property
    def taps(self) -> tuple[int, ...]:
        return self._spec.taps

    def kv_bytes_per_block(self, block_size: int) -> int:
        return 2 * 4 * self._spec.num_kv_heads * self._spec.head_dim * block_size

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        batch_check.check_cache(num_blocks, block_size)
        self._allocate(num_blocks * block_size)
        self._num_blocks, self._block_size = num_blocks, block_size

    @abstractmethod
    def _allocate(self, slots: int) -> None:
        """A cache of zeros for the keys and values of so many tokens."""

    @abstractmethod
    def _fused(self, features: Float32) -> States:
        """fuse_features @ features."""

    @abstractmethod
    def _pass(self, batch: DraftBatch, rows: DraftRows, states: States) -> tuple[States, Float32]:
        """Write keys and values of all rows; outputs and logits of those drafted from."""

    @abstractmethod
    def _taken(self, outputs: States, rows: Sequence[int]) -> States: ...

    def draft(self, batch: DraftBatch) -> tuple[Int32, Float32]:
        batch_check.check_draft(
            batch,
            vocab_size=self._spec.vocab_size,
            max_context=self._max_context,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            feature_size=len(self._spec.taps) * self._spec.hidden_size,
        )
        shape = len(batch.block_tables), int(batch.steps.max())
        tokens, probabilities = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
        products = np.ones(shape[0], np.float32)
        rows = self._first_rows(batch)
        states = self._fused(np.array(batch.features, np.float32))
        for depth in range(shape[1] + 1):
            outputs, logits = self._pass(batch, rows, states)
            onward = []
            for row, sequence in enumerate(rows.sequences):
                choice = self._choice(batch, rows, row, logits[row])
                if choice is None or not products[sequence] * choice[1] >= batch.floors[sequence]:
                    continue
                products[sequence] *= choice[1]
                tokens[sequence, depth], probabilities[sequence, depth] = choice
                if depth + 1 < batch.steps[sequence]:
                    onward.append(row)
            if not onward:
                break
            rows = self._next_rows(batch, rows, onward, tokens[:, depth])
            states = self._taken(outputs, onward)
        return tokens, probabilities

    def _first_rows(self, batch: DraftBatch) -> DraftRows:
        ends = batch.sequence_offsets[1:]
        drafting = [i for i, steps in enumerate(batch.steps) if steps > 0]
        of_row = np.repeat(np.arange(len(ends)), np.diff(batch.sequence_offsets))
        positions = batch.positions.astype(np.int64)
        slots = [
            self._slots(batch.block_tables[i], positions[of_row == i]) for i in range(len(ends))
        ]
        return DraftRows(
            token_ids=batch.token_ids.astype(np.int64),
            positions=positions,
            slots=np.concatenate(slots),
            indexes=[int(ends[i]) - 1 for i in drafting],
            sequences=drafting,
        )

    def _next_rows(
        self, batch: DraftBatch, rows: DraftRows, onward: list[int], drafted: Int32
    ) -> DraftRows:
        sequences = [rows.sequences[row] for row in onward]
        positions = rows.positions[[rows.indexes[row] for row in onward]] + 1
        slots = [
            self._slots(batch.block_tables[sequence], positions[i : i + 1])
            for i, sequence in enumerate(sequences)
        ]
        return DraftRows(
            token_ids=drafted[sequences].astype(np.int64),
            positions=positions,
            slots=np.concatenate(slots),
            indexes=list(range(len(onward))),
            sequences=sequences,
        )

    def _slots(self, table: Int32, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return block_table.slots_of(table, positions, self._block_size)

    def _choice(
        self, batch: DraftBatch, rows: DraftRows, row: int, logits: Float32
    ) -> tuple[int, float] | None:
        """A token and its probability; none from logits that are no numbers."""
        if not np.isfinite(logits.max()):
            return None
        sequence = rows.sequences[row]
        temperature = float(batch.temperatures[sequence])
        is_greedy = not temperature >= GREEDY_BELOW or not np.isfinite(temperature)
        scores = logits.astype(np.float64) / (1.0 if is_greedy else temperature)
        best = int(scores.argmax())
        if not is_greedy:
            position = int(rows.positions[rows.indexes[row]]) + 1
            best = self._drawn(scores, int(batch.seeds[sequence]), position)
        weights = np.exp(scores - scores.max())
        return int(self._token_ids[best]), float(weights[best] / weights.sum())

    def _drawn(self, scores: NDArray[np.float64], seed: int, position: int) -> int:
        count = min(_CANDIDATES, len(scores))
        candidates = np.argpartition(-scores, count - 1)[:count]
        candidates.sort()
        noise = gumbel(seed, position, self._token_ids[candidates])
        return int(candidates[(scores[candidates] + noise).argmax()])
