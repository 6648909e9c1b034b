"""The decode loop: schedule, draft, verify all in one ragged forward, commit.

Prompt chunks, plain decode rows and draft rows of all running sequences share the forward. A
sequence that lacks a KV block displaces the one of lowest priority, which keeps its tokens and
computes its KV again later (recompute preemption); its output does not change by that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mirror_sd.backends.protocol import Backend, Float32, RaggedBatch
from mirror_sd.memory.block_pool import BlockPool, OutOfBlocks
from mirror_sd.memory.prefix_cache import PrefixCache
from mirror_sd.messages import Chunk, Failed, Finished
from mirror_sd.speculative.sampler import token_logprob
from mirror_sd.speculative.sequence import Sequence
from mirror_sd.speculative.sequence_drafts import SequenceDrafts
from mirror_sd.speculative.verifier import Verdict, verify

Output = Chunk | Finished | Failed
logger = logging.getLogger(__name__)
_TRUSTED_AFTER = 4


@dataclass(slots=True)
class Slice:
    """What one sequence contributes to a forward: `tokens` from position `start`, the last
    `len(draft)` of them drafted. `rows` of them, at the end, have their logits computed."""

    sequence: Sequence
    start: int
    tokens: list[int]
    draft: list[int]
    rows: int

    @property
    def reaches_end(self) -> bool:
        """True if the slice computes the last committed token, so that a next one is chosen."""
        return self.start + len(self.tokens) - len(self.draft) == len(self.sequence.tokens)


@dataclass(slots=True)
class StepReport:
    """What a step did, for metrics. Durations in seconds."""

    sequences: int = 0
    tokens: int = 0
    draft_s: float = 0.0
    forward_s: float = 0.0
    preempted: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    drafted: int = 0


def _proposed(drafts: SequenceDrafts, limit: int) -> list[int]:
    """The first draft there is: a hint that has not agreed for some tokens goes last."""
    sources = drafts.sources()
    if sources and sources[0].name == "hint" and sources[0].strength() < _TRUSTED_AFTER:
        sources = [*sources[1:], sources[0]]
    return next((draft for source in sources if (draft := source.propose(limit))), [])


class DecodeLoop:
    """Runs the sequences of `running`; the engine adds to it and takes from it between steps."""

    def __init__(
        self,
        backend: Backend,
        pool: BlockPool,
        cache: PrefixCache,
        *,
        block_size: int,
        prefill_chunk: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._pool = pool
        self._cache = cache
        self._block_size = block_size
        self._prefill_chunk = prefill_chunk
        self._clock = clock
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.report = StepReport()

    def step(self) -> list[Output]:
        """One forward; what it produced, in order per sequence."""
        self.report = StepReport()
        plan = self._schedule()
        if not plan:
            return []
        begin = self._clock()
        logits = self._backend.forward(self._ragged(plan))
        self.report.forward_s = self._clock() - begin
        self.report.sequences = len(plan)
        self.report.tokens = sum(len(piece.tokens) for piece in plan)
        return self._commit(plan, logits)

    def retire(self, sequence: Sequence) -> None:
        """Take a running sequence out and give back its blocks."""
        self.running.remove(sequence)
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Give back the blocks of a sequence; its KV is computed again when it runs again."""
        for block in sequence.table:
            self._pool.release(block)
        sequence.table = []
        sequence.computed = 0

    def _schedule(self) -> list[Slice]:
        self.running.sort(key=lambda sequence: sequence.priority)
        plan: list[Slice] = []
        budget = self._prefill_chunk
        for sequence in list(self.running):
            if sequence not in self.running:  # preempted by one before it
                continue
            decodes = sequence.pending == 1
            count = 1 if decodes else min(sequence.pending, budget)
            if count == 0 or not self._reserve(sequence, sequence.computed + count):
                continue
            if not decodes:
                budget -= count
            plan.append(self._slice(sequence, count))
        return plan

    def _reserve(self, sequence: Sequence, length: int) -> bool:
        """Make the block table cover `length` positions; False if `sequence` had to give way."""
        while len(sequence.table) * self._block_size < length:
            try:
                sequence.table.append(self._pool.allocate())
            except OutOfBlocks:
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        logger.info("request %s: displaced for want of KV blocks", victim.request_id)
        self.retire(victim)
        self.preempted.append(victim)
        self.report.preempted += 1

    def _slice(self, sequence: Sequence, count: int) -> Slice:
        start = sequence.computed
        tokens = sequence.tokens[start : start + count]
        rows = int(start + count == len(sequence.tokens))
        draft = self._draft(sequence) if rows and count == 1 else []
        if sequence.prompt_logprobs is not None and start < len(sequence.submit.prompt):
            rows = count  # every prompt position's logits are wanted
        return Slice(sequence, start, tokens + draft, draft, rows + len(draft))

    def _draft(self, sequence: Sequence) -> list[int]:
        if sequence.drafts is None:
            return []
        begin = self._clock()
        limit = min(sequence.length.length, sequence.room - 1)
        draft = _proposed(sequence.drafts, limit) if limit > 0 else []
        # A draft takes free blocks but displaces nobody.
        wanted = -(-(len(sequence.tokens) + len(draft)) // self._block_size)
        while len(sequence.table) < wanted and self._pool.free > 0:
            sequence.table.append(self._pool.allocate())
        draft = draft[: len(sequence.table) * self._block_size - len(sequence.tokens)]
        self.report.draft_s += self._clock() - begin
        return draft

    def _ragged(self, plan: list[Slice]) -> RaggedBatch:
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        offsets = [0]
        for piece in plan:
            tokens.extend(piece.tokens)
            positions.extend(range(piece.start, piece.start + len(piece.tokens)))
            rows.extend(range(len(tokens) - piece.rows, len(tokens)))
            offsets.append(len(tokens))
        return RaggedBatch(
            token_ids=np.array(tokens, dtype=np.int32),
            positions=np.array(positions, dtype=np.int32),
            sequence_offsets=np.array(offsets, dtype=np.int32),
            block_tables=tuple(piece.sequence.table_array() for piece in plan),
            logit_rows=np.array(rows, dtype=np.int32),
        )

    def _commit(self, plan: list[Slice], logits: Float32) -> list[Output]:
        outputs: list[Output] = []
        row = 0
        for piece in plan:
            own = logits[row : row + piece.rows]
            row += piece.rows
            try:
                outputs.extend(self._advance(piece, own))
            except Exception as error:
                # What one sequence brings about must not harm the others, nor the next worker.
                logger.exception("request %s failed", piece.sequence.request_id)
                if piece.sequence in self.running:
                    self.retire(piece.sequence)
                outputs.append(
                    Failed(
                        request_id=piece.sequence.request_id,
                        code="internal_error",
                        message=f"{type(error).__name__}: {error}",
                    )
                )
        return outputs

    def _advance(self, piece: Slice, logits: Float32) -> list[Output]:
        sequence = piece.sequence
        if sequence.prompt_logprobs is not None:
            self._score_prompt(piece, logits)
        if not piece.reaches_end:
            self._extend_computed(sequence, piece.start + len(piece.tokens))
            return []
        verdict = verify(
            logits[piece.rows - 1 - len(piece.draft) :],
            piece.draft,
            sequence.chooser,
            sequence.submit.params,
            position=len(sequence.tokens),
            room=sequence.room,
        )
        self._account(sequence, piece.draft, verdict)
        index = sequence.completion_tokens
        sequence.tokens.extend(verdict.tokens)
        computed = piece.start + len(piece.tokens) - len(piece.draft) + verdict.accepted
        self._extend_computed(sequence, min(computed, len(sequence.tokens)))
        return self._outputs(sequence, index, verdict)

    def _extend_computed(self, sequence: Sequence, computed: int) -> None:
        before, sequence.computed = sequence.computed, computed
        self._cache.publish(sequence.chain, sequence.tokens, sequence.table, before, computed)

    def _account(self, sequence: Sequence, draft: list[int], verdict: Verdict) -> None:
        sequence.rounds += 1
        if not draft:
            return
        sequence.drafted += len(draft)
        sequence.accepted += verdict.accepted
        sequence.length.observe(len(draft), verdict.accepted)
        self.report.drafted += len(draft)
        self.report.accepted_lengths.append(verdict.accepted)

    def _score_prompt(self, piece: Slice, logits: Float32) -> None:
        sequence = piece.sequence
        prompt = sequence.submit.prompt
        scored = sequence.prompt_logprobs
        assert scored is not None
        for offset in range(min(len(piece.tokens), len(logits))):
            position = piece.start + offset + 1
            if len(scored) <= position < len(prompt):
                best = sequence.submit.params.logprobs or 0
                scored.append(token_logprob(logits[offset], prompt[position], best))

    def _outputs(self, sequence: Sequence, index: int, verdict: Verdict) -> list[Output]:
        outputs: list[Output] = []
        scored, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        if verdict.tokens or scored is not None:
            outputs.append(
                Chunk(
                    request_id=sequence.request_id,
                    index=index,
                    tokens=tuple(verdict.tokens),
                    logprobs=None if verdict.logprobs is None else tuple(verdict.logprobs),
                    prompt_logprobs=None if scored is None else tuple(scored),
                )
            )
        if verdict.reason is not None:
            self.retire(sequence)
            if sequence.drafts is not None:
                sequence.drafts.close()
            outputs.append(
                Finished(
                    request_id=sequence.request_id, reason=verdict.reason, usage=sequence.usage()
                )
            )
        return outputs
