"""Drafting with a head on the target's hidden states: which positions its own keys and values
cover, the features it still has to take in, one call for all sequences.

Token p goes into the head with the target's feature of p - 1. After a forward the features of all
committed tokens but the last are known, so the head can take in all committed tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import numpy as np

from mirror_sd.backends.protocol import Backend, DraftBatch, DraftHead, Float32
from mirror_sd.memory.head_blocks import HeadBlocks
from mirror_sd.speculative.batch_plan import Slice
from mirror_sd.speculative.calibration import time_head
from mirror_sd.speculative.head_state import HeadState
from mirror_sd.speculative.sequence import Sequence

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class HeadRequest:
    """Draft up to `steps` tokens of `sequence`, 0 to take in what is pending; drafting ends before
    the product of probabilities falls below `floor`. `tokens` and `probabilities` come back."""

    sequence: Sequence
    steps: int
    floor: float
    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)


class HeadDrafting:
    """A head that fails is switched off for good: the requests go on without it."""

    def __init__(self, head: DraftHead, backend: Backend, num_blocks: int, block_size: int) -> None:
        self._head = head
        self._backend = backend
        self._block_size = block_size
        self._vocab = backend.capabilities.vocab_size
        self._width = len(head.taps) * backend.capabilities.hidden_size
        self._blocks = HeadBlocks(num_blocks, self._width)
        self._is_tapped = False
        self.is_on = True
        self.failure: str | None = None
        head.allocate_kv(num_blocks, block_size)

    def pass_seconds(self, clock: Callable[[], float]) -> float | None:
        """What a pass for one sequence takes, measured; None if the head failed. To be called while
        no sequence is there."""
        try:
            return time_head(
                self._head,
                self._backend,
                width=self._width,
                block_size=self._block_size,
                clock=clock,
            )
        except Exception as error:
            logger.exception("the draft head is switched off")
            self._fail(error, [])
            return None

    def covered(self, table: Ordered[int]) -> int:
        """Blocks at the beginning of `table` that the head's keys and values cover as well."""
        return self._blocks.whole_run(table)

    def forget(self, block: int) -> None:
        """The block was given to another sequence."""
        self._blocks.forget(block)

    def open(self, sequence: Sequence) -> None:
        """Before the first forward of a sequence, whose table, if any, is covered."""
        table = sequence.table
        sequence.head = HeadState(taken=len(table) * self._block_size)
        before = self._blocks.last_feature(table[-1]) if table else np.zeros(self._width)
        sequence.head.add(before.astype(np.float32).reshape(1, -1))

    def prepare(self, running: Ordered[Sequence]) -> None:
        """Before a forward: features are had only while a head is open."""
        wanted = self.is_on and any(sequence.head is not None for sequence in running)
        if wanted == self._is_tapped:
            return
        try:
            self._backend.tap(self._head.taps if wanted else ())
            self._is_tapped = wanted
        except Exception as error:
            logger.exception("the draft head is switched off")
            self._fail(error, running)

    def collect(self, plan: Ordered[Slice], valid: Ordered[int]) -> None:
        """After a forward: keep the features of the first `valid` tokens of each slice, those that
        were committed."""
        if not self._is_tapped or not self.is_on:
            return
        open_ones = [piece.sequence for piece in plan]
        try:
            features = self._backend.features
            total = sum(piece.tokens for piece in plan)
            if features.shape != (total, self._width):
                raise ValueError(f"features of shape {features.shape}, not {(total, self._width)}")
            begin = 0
            for piece, count in zip(plan, valid, strict=True):
                if piece.sequence.head is not None and count:
                    self._keep(piece, features[begin : begin + count].astype(np.float32))
                begin += piece.tokens
        except Exception as error:
            logger.exception("the draft head is switched off")
            self._fail(error, open_ones)

    def _keep(self, piece: Slice, rows: Float32) -> None:
        state, table, size = piece.sequence.head, piece.sequence.table, self._block_size
        assert state is not None
        state.add(rows)
        end = piece.start + len(rows)
        for block in range(piece.start // size, end // size):
            self._blocks.keep_feature(table[block], rows[(block + 1) * size - 1 - piece.start])

    def draft(self, requests: Ordered[HeadRequest]) -> int:
        """One call for all; fills them in. The passes that the head made, 0 if it failed."""
        try:
            batch = self._batch(requests)
            tokens, probabilities = self._head.draft(batch)
            self._check(batch, tokens, probabilities)
        except Exception as error:
            logger.exception("the draft head is switched off")
            self._fail(error, [request.sequence for request in requests])
            return 0
        longest = 0
        for index, request in enumerate(requests):
            self._mark(request.sequence, int(np.diff(batch.sequence_offsets)[index]))
            row = tokens[index, : request.steps].tolist()
            count = row.index(-1) if -1 in row else len(row)
            request.tokens = row[:count]
            request.probabilities = probabilities[index, :count].tolist()
            longest = max(longest, min(count + 1, request.steps))
        return 1 + longest

    def _batch(self, requests: Ordered[HeadRequest]) -> DraftBatch:
        tokens: list[int] = []
        positions: list[int] = []
        features: list[Float32] = []
        offsets = [0]
        for request in requests:
            sequence, state = request.sequence, request.sequence.head
            assert state is not None
            end = min(state.taken + state.pending, len(sequence.table) * self._block_size)
            tokens.extend(sequence.tokens[state.taken : end])
            positions.extend(range(state.taken, end))
            rows = state.features[0] if len(state.features) == 1 else np.concatenate(state.features)
            features.append(rows[: end - state.taken])
            state.features, state.pending = [rows], len(rows)
            offsets.append(len(tokens))
        params = [request.sequence.submit.params for request in requests]
        return DraftBatch(
            token_ids=np.array(tokens, dtype=np.int32),
            positions=np.array(positions, dtype=np.int32),
            sequence_offsets=np.array(offsets, dtype=np.int32),
            block_tables=tuple(request.sequence.table_array() for request in requests),
            features=np.concatenate(features) if len(features) > 1 else features[0],
            steps=np.array([request.steps for request in requests], dtype=np.int32),
            floors=np.array([request.floor for request in requests], dtype=np.float32),
            temperatures=np.array([p.temperature for p in params], dtype=np.float32),
            seeds=np.array([p.seed % 2**64 for p in params], dtype=np.uint64),
        )

    def _check(self, batch: DraftBatch, tokens: object, probabilities: object) -> None:
        """Raise `ValueError` unless the head kept its contract."""
        shape = (len(batch.steps), int(batch.steps.max(initial=0)))
        for what, array in (("tokens", tokens), ("probabilities", probabilities)):
            if not isinstance(array, np.ndarray) or array.shape != shape:
                got = getattr(array, "shape", type(array).__name__)
                raise ValueError(f"the head's {what} are {got}, not {shape}")
        assert isinstance(tokens, np.ndarray) and isinstance(probabilities, np.ndarray)
        if tokens.dtype.kind != "i" or (tokens < -1).any() or (tokens >= self._vocab).any():
            raise ValueError("the head drafted tokens that are not in the vocabulary")
        if not np.isfinite(probabilities).all():
            raise ValueError("the head gave probabilities that are not finite")

    def _mark(self, sequence: Sequence, count: int) -> None:
        state, size = sequence.head, self._block_size
        assert state is not None
        rows = state.features[0][count:]
        before, state.taken = state.taken, state.taken + count
        state.features, state.pending = ([rows] if len(rows) else []), len(rows)
        for block in range(before // size, state.taken // size):
            self._blocks.mark(sequence.table[block])

    def _fail(self, error: Exception, sequences: Ordered[Sequence]) -> None:
        self.is_on = False
        self.failure = f"{type(error).__name__}: {error}"
        for sequence in sequences:
            sequence.head = None
        try:
            self._backend.tap(())
        except Exception:
            logger.exception("hidden states are tapped further")
        self._is_tapped = False
