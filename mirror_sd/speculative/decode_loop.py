"""The decode loop: schedule, draft, verify all in one ragged forward, commit.

Prompt chunks, plain decode rows and draft rows of all running sequences share the forward. A
sequence that lacks a KV block displaces the one of lowest priority, which keeps its tokens and
computes its KV again later (recompute preemption); its output does not change by that. A long
prompt is read in segments while others decode, as short as `SegmentPace` tells.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mirror_sd.backends.protocol import Backend, Float32
from mirror_sd.memory.block_pool import BlockPool, OutOfBlocks
from mirror_sd.memory.prefix_cache import PrefixCache
from mirror_sd.messages import Chunk, Failed, Finished
from mirror_sd.speculative.batch_plan import Slice, ragged
from mirror_sd.speculative.draft_planner import DraftPlanner
from mirror_sd.speculative.draft_report import DraftReport
from mirror_sd.speculative.sampler import token_logprob
from mirror_sd.speculative.segment_pace import Segment, SegmentPace
from mirror_sd.speculative.sequence import Sequence
from mirror_sd.speculative.verifier import Verdict, verify

Output = Chunk | Finished | Failed
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StepReport:
    """What a step did, for metrics. Durations in seconds."""

    sequences: int = 0
    tokens: int = 0
    forward_s: float = 0.0
    preempted: int = 0
    drafts: DraftReport = field(default_factory=DraftReport)


class DecodeLoop:
    """Runs the sequences of `running`; the engine adds to it and takes from it between steps."""

    def __init__(
        self,
        backend: Backend,
        pool: BlockPool,
        cache: PrefixCache,
        *,
        planner: DraftPlanner,
        block_size: int,
        prefill_chunk: int,
        segment_pace: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._pool = pool
        self._cache = cache
        self._planner = planner
        self._block_size = block_size
        self._prefill_chunk = prefill_chunk
        self._clock = clock
        self._pace = SegmentPace(segment_pace, planner.cost)
        self._segment: Segment | None = None
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.report = StepReport()
        self._chosen = 0  # tokens of the step

    def step(self) -> list[Output]:
        """One forward; what it produced, in order per sequence."""
        self.report = StepReport()
        plan = self._schedule()
        if not plan:
            return []
        self._planner.plan(plan)
        if (head := self._planner.head) is not None:
            head.prepare(self.running)
        begin = self._clock()
        logits = self._backend.forward(ragged(plan))
        self.report.forward_s = self._clock() - begin
        self.report.sequences = len(plan)
        self.report.tokens = sum(piece.tokens for piece in plan)
        prompts = sum(not piece.is_decoding for piece in plan)
        outputs = self._commit(plan, logits)
        self._learn(len(plan), prompts, self._clock() - begin)
        self.report.drafts = self._planner.report
        return outputs

    def _learn(self, sequences: int, prompts: int, seconds: float) -> None:
        rows, cost = self.report.tokens, self._planner.cost
        whole_s = seconds + self._planner.report.seconds
        if self._segment is not None and prompts == 1:
            self._pace.observe(self._segment, whole_s)
        elif not prompts:
            self._pace.observe_bare(sequences, whole_s)
        if self._segment is not None and cost.is_known:
            # Its long context is no property of the number of rows.
            seconds = cost.seconds(rows)
        self._planner.finish(self._chosen, rows, seconds)

    def end(self, sequence: Sequence) -> None:
        """Take a running sequence out for good. Whatever ended it, what it got is an answer like
        others to those that draft."""
        self._retire(sequence)
        if sequence.drafts is not None:
            sequence.drafts.close()

    def _retire(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Give back the blocks of a sequence; its KV is computed again when it runs again."""
        for block in sequence.table:
            self._pool.release(block)
        sequence.table = []
        sequence.computed = 0
        sequence.head = None

    def _schedule(self) -> list[Slice]:
        self.running.sort(key=lambda sequence: sequence.priority)
        plan: list[Slice] = []
        budget = self._prefill_chunk
        decoding = sum(sequence.pending == 1 for sequence in self.running)
        segment = self._next_segment(decoding)
        for sequence in list(self.running):
            if sequence not in self.running:  # preempted by one before it
                continue
            decodes = sequence.pending == 1
            count = 1 if decodes else min(sequence.pending, budget)
            if segment is not None and not decodes and sequence.is_long:
                count = min(count, segment.tokens)
            if count == 0 or not self._reserve(sequence, sequence.computed + count):
                continue
            if not decodes:
                budget -= count
                if segment is not None and sequence.is_long:
                    # The first takes it all, so that one of several is soon read.
                    self._segment = replace(segment, tokens=count, position=sequence.computed)
                    segment = replace(segment, tokens=0)
            plan.append(self._slice(sequence, count))
        return plan

    def _next_segment(self, decoding: int) -> Segment | None:
        """What may be read of long prompts; None where nothing has to keep its pace."""
        self._segment = None
        reading = [s for s in self.running if s.is_long and s.pending > 1]
        if not decoding or not reading:
            return None
        position = reading[0].computed
        return Segment(self._pace.tokens(decoding, position), position, decoding)

    def _reserve(self, sequence: Sequence, length: int) -> bool:
        """Make the block table cover `length` positions; False if `sequence` had to give way."""
        while len(sequence.table) * self._block_size < length:
            try:
                sequence.table.append(self._allocate())
            except OutOfBlocks:
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    return False
        return True

    def _allocate(self) -> int:
        block = self._pool.allocate()
        if (head := self._planner.head) is not None:
            head.forget(block)
        return block

    def preempt_last(self) -> None:
        """Displace the running sequence of lowest priority."""
        self._preempt(max(self.running, key=lambda sequence: sequence.priority))

    def _preempt(self, victim: Sequence) -> None:
        logger.info("request %s: displaced for want of KV blocks", victim.request_id)
        self._retire(victim)
        self.preempted.append(victim)
        self.report.preempted += 1

    @staticmethod
    def _slice(sequence: Sequence, count: int) -> Slice:
        start = sequence.computed
        # For the log-probabilities of the prompt, each position's logits are wanted.
        scores_all = sequence.prompt_logprobs is not None and start < len(sequence.submit.prompt)
        return Slice(sequence, start, count, scores_all)

    def _commit(self, plan: list[Slice], logits: Float32) -> list[Output]:
        outputs: list[Output] = []
        valid: list[int] = []
        row = self._chosen = 0
        for piece in plan:
            own = logits[row : row + piece.rows]
            row += piece.rows
            before = piece.sequence.computed
            try:
                outputs.extend(self._advance(piece, own))
            except Exception as error:
                # What one sequence brings about must not harm the others, nor the next worker.
                logger.exception("request %s failed", piece.sequence.request_id)
                if piece.sequence in self.running:
                    self.end(piece.sequence)
                outputs.append(
                    Failed(
                        request_id=piece.sequence.request_id,
                        code="internal_error",
                        message=f"{type(error).__name__}: {error}",
                    )
                )
            valid.append(max(piece.sequence.computed - before, 0))
        if (head := self._planner.head) is not None:
            head.collect(plan, valid)
        return outputs

    def _advance(self, piece: Slice, logits: Float32) -> list[Output]:
        sequence = piece.sequence
        if sequence.prompt_logprobs is not None:
            self._score_prompt(piece, logits)
        if not piece.reaches_end:
            self._extend_computed(sequence, piece.start + piece.count)
            return []
        verdict = verify(
            logits[piece.rows - 1 - len(piece.draft) :],
            piece.draft,
            sequence.chooser,
            sequence.submit.params,
            position=len(sequence.tokens),
            room=sequence.room,
        )
        sequence.rounds += 1
        self._planner.learn(piece, verdict.tokens, verdict.accepted)
        self._chosen += len(verdict.tokens)
        index = sequence.completion_tokens
        sequence.tokens.extend(verdict.tokens)
        computed = piece.start + piece.count + verdict.accepted
        self._extend_computed(sequence, min(computed, len(sequence.tokens)))
        return self._outputs(sequence, index, verdict)

    def _extend_computed(self, sequence: Sequence, computed: int) -> None:
        before, sequence.computed = sequence.computed, computed
        self._cache.publish(sequence.chain, sequence.tokens, sequence.table, before, computed)

    def _score_prompt(self, piece: Slice, logits: Float32) -> None:
        sequence = piece.sequence
        prompt = sequence.submit.prompt
        scored = sequence.prompt_logprobs
        assert scored is not None
        for offset in range(min(piece.tokens, len(logits))):
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
            self.end(sequence)
            outputs.append(
                Finished(
                    request_id=sequence.request_id, reason=verdict.reason, usage=sequence.usage()
                )
            )
        return outputs
