"""The engine of a drafter: many sessions, one forward for all of them after the other.

Each forward brings a token to every strand in it. Proposals carry all that is expected, so that
the one that came last is all that a verifier needs. The prompts' blocks are kept for equal
prefixes of one tenant.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Hashable
from dataclasses import replace

import numpy as np

from mirror_sd.backends.protocol import Backend, Float32
from mirror_sd.drafting.frames import LONGEST, Commit, DraftParams, Open, Proposal
from mirror_sd.drafting.session import Astray, Branch, DraftSession, Rival
from mirror_sd.drafting.strand import Strand
from mirror_sd.drafting.turns import CHEAP_ROWS, Turn, ragged, shares
from mirror_sd.host_memory import HostMemory
from mirror_sd.memory import arenas
from mirror_sd.memory.block_pool import BlockPool, OutOfBlocks
from mirror_sd.memory.prefix_cache import PrefixCache
from mirror_sd.messages import SamplingParams
from mirror_sd.philox import GREEDY_BELOW, gumbel
from mirror_sd.speculative.calibration import blank_batch
from mirror_sd.speculative.sampler import open_chooser
from mirror_sd.speculative.sampling import InvalidLogits, TokenChooser

logger = logging.getLogger(__name__)

# Small, so that a branch has little to compute again.
BLOCK_SIZE = 4
_PREFILL_CHUNK = 128
_BRANCHES = 1
_EXCLUDED = np.float32(-1e30)
# The least gap between the two best tokens for each strength above 0, in logits.
_STEPS = (0.1, 0.25, 0.5, 1.0, 1.75, 3.0, 5.0)
_WEIGHT = 0.1


class Refusal(Exception):
    """The session is not drafted for; the text says why."""


class DraftEngine:
    """Owns the back end and the KV pool; the constructor allocates the cache, on a CPU no larger
    than `host` has room for.

    `refused`: sessions that had to be given up since they were read last, with the reason.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        kv_cache_mb: int,
        most_sessions: int,
        clock: Callable[[], float] = time.monotonic,
        host: HostMemory | None = None,
    ) -> None:
        self.capabilities = backend.capabilities
        self._backend = backend
        self._clock = clock
        self._most_sessions = most_sessions
        on_host = self.capabilities.device == "cpu"
        blocks = arenas.plan(
            kv_cache_mb * 2**20,
            backend.kv_bytes_per_block(BLOCK_SIZE),
            sequences=most_sessions,
            blocks_per_sequence=-(-self.capabilities.max_context // BLOCK_SIZE),
            free_bytes=host.free_bytes() if host is not None and on_host else None,
        ).blocks
        backend.allocate_kv(blocks, BLOCK_SIZE)
        self._pool = BlockPool(blocks)
        self._cache = PrefixCache(self._pool, BLOCK_SIZE, enabled=True)
        self.max_context = min(self.capabilities.max_context, blocks * BLOCK_SIZE)
        self._sessions: dict[Hashable, DraftSession] = {}
        self.refused: list[tuple[Hashable, str]] = []
        self.latency_s = self.pace_s = 0.0
        self.tokens = self.steps = 0

    def warm_up(self) -> None:
        """A forward for nobody: the first of all is slow, and not to be at a request's cost."""
        block = self._pool.allocate()
        try:
            table = np.array([block], dtype=np.int32)
            self._backend.forward(replace(blank_batch(1, BLOCK_SIZE), block_tables=(table,)))
        finally:
            self._pool.release(block)

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def has_work(self) -> bool:
        return any(
            session.wants_main or session.wanted_branches() for session in self._sessions.values()
        )

    def open(self, key: Hashable, request: Open, vocab_size: int | None = None) -> None:
        """Begin a session; one of the same key ends. `vocab_size`: the target's, where it is not
        the drafter's own; the smaller one counts. Raises `Refusal`."""
        self.close(key)
        vocab = min(vocab_size or self.capabilities.vocab_size, self.capabilities.vocab_size)
        self._check(request, vocab)
        if len(self._sessions) >= self._most_sessions:
            raise Refusal(f"{self._most_sessions} sessions are open, no more are drafted for")
        params = request.params
        try:
            chooser = open_chooser(
                SamplingParams(
                    max_tokens=1,
                    seed=params.seed,
                    temperature=params.temperature,
                    top_k=params.top_k,
                    top_p=params.top_p,
                    logit_bias=params.logit_bias,
                )
            )
        except (ValueError, TypeError, OverflowError) as error:
            raise Refusal(f"sampling parameters that cannot be used: {error}") from error
        tokens = list(request.tokens)
        chain = self._cache.chain(request.tenant)
        table = self._cache.take(chain, tokens)
        main = Strand(tokens, bytearray(len(tokens)), table, len(table) * BLOCK_SIZE)
        self._sessions[key] = DraftSession(
            request,
            main,
            chain,
            chooser,
            vocab_size=vocab,
            max_context=self.max_context,
            now=self._clock(),
        )

    def _check(self, request: Open, vocab: int) -> None:
        if not 1 <= len(request.tokens) < self.max_context:
            raise Refusal(
                f"a sequence of {len(request.tokens)} tokens; drafted are 1 to"
                f" {self.max_context - 1}"
            )
        params = request.params
        for token in (*request.tokens, *params.logit_bias):
            if not 0 <= token < vocab:
                raise Refusal(f"token id {token} is outside the vocabulary of {vocab}")
        if not all(
            map(math.isfinite, (params.temperature, params.top_p, *params.logit_bias.values()))
        ):
            raise Refusal("sampling parameters must be finite numbers")
        if params.temperature < 0 or params.top_k < 0 or not 0 <= params.seed < 2**64:
            raise Refusal("temperature, top_k and seed must not be negative")
        _check_length(request.length)

    def commit(self, key: Hashable, commit: Commit) -> None:
        """Raises `Refusal`, and the session has ended, where it cannot be followed."""
        session = self._sessions.get(key)
        if session is None:
            raise Refusal("no such session")
        vocab = session.vocab_size
        try:
            _check_length(commit.length)
            if not all(0 <= token < vocab for token in commit.tokens):
                raise Refusal(f"a token id outside the vocabulary of {vocab}")
            if commit.base + len(commit.tokens) >= self.max_context:
                raise Refusal(f"the context of {self.max_context} tokens is used up")
            session.length = commit.length
            session.commit(commit.base, commit.tokens, self._pool, BLOCK_SIZE, self._clock())
        except (Astray, Refusal) as error:
            self.close(key)
            raise Refusal(str(error)) from error

    def close(self, key: Hashable) -> None:
        """End a session; an unknown one is ignored."""
        session = self._sessions.pop(key, None)
        if session is not None:
            session.release(self._pool)

    def close_all(self, belongs: Callable[[Hashable], bool]) -> None:
        for key in [key for key in self._sessions if belongs(key)]:
            self.close(key)

    def close_silent(self, seconds: float) -> None:
        """End the sessions of which nothing was heard for so long."""
        oldest = self._clock() - seconds
        for key, session in list(self._sessions.items()):
            if session.heard_at < oldest:
                self._give_up(key, f"nothing was heard of it for {seconds:g} s")

    def step(self) -> list[tuple[Hashable, Proposal]]:
        """One forward; the proposals that changed by it. Raises where the device computes nothing
        any more: whoever keeps the process starts it anew."""
        turns = self._schedule()
        if not turns:
            return []
        begin = self._clock()
        self._run(turns)
        self._open_branches()
        self.steps += 1
        if sum(turn.count for turn in turns) <= 2 * len(turns) + CHEAP_ROWS:
            spent = self._clock() - begin
            self.pace_s += (_WEIGHT if self.pace_s else 1.0) * (spent - self.pace_s)
        news = [(key, session) for key, session in self._sessions.items() if session.has_news]
        return [(key, session.proposal(self.latency_s, self.pace_s)) for key, session in news]

    def _schedule(self) -> list[Turn]:
        """Main strands first; branches as long as their rows cost next to nothing."""
        mains = [(key, session) for key, session in self._sessions.items() if session.wants_main]
        counts = shares([session.main.pending for _, session in mains], _PREFILL_CHUNK)
        turns = [
            Turn(key, session, session.main, count)
            for (key, session), count in zip(mains, counts, strict=True)
            if count
        ]
        rows = sum(turn.count for turn in turns)
        for key, session in list(self._sessions.items()):
            for strand in session.wanted_branches():
                if rows + strand.pending <= CHEAP_ROWS + BLOCK_SIZE:
                    rows += strand.pending
                    turns.append(Turn(key, session, strand, strand.pending))
        held = [turn for turn in turns if self._reserve(turn)]
        # Making room for one may have taken it from another.
        return [turn for turn in held if self._is_open(turn) and turn.covered(BLOCK_SIZE)]

    def _is_open(self, turn: Turn) -> bool:
        return self._sessions.get(turn.key) is turn.session and (
            turn.strand is turn.session.main
            or any(branch.strand is turn.strand for branch in turn.session.branches)
        )

    def _reserve(self, turn: Turn) -> bool:
        """Blocks for what the turn computes; False if its strand had to give way."""
        strand = turn.strand
        while self._is_open(turn) and not turn.covered(BLOCK_SIZE):
            try:
                strand.table.append(self._pool.allocate())
            except OutOfBlocks:
                self._make_room()
        return self._is_open(turn)

    def _make_room(self) -> None:
        """Drop all branches; where there are none, the session that was heard of least lately."""
        with_branches = [session for session in self._sessions.values() if session.branches]
        for session in with_branches:
            session.drop_branches(self._pool)
        if not with_branches:
            key = min(self._sessions, key=lambda key: self._sessions[key].heard_at)
            self._give_up(key, "no memory is left for its keys and values")

    def _give_up(self, key: Hashable, reason: str) -> None:
        self.close(key)
        self.refused.append((key, reason))

    def _run(self, turns: list[Turn]) -> None:
        """A forward for all; where it fails, one for each, and who fails alone is given up."""
        begin = self._clock()
        try:
            logits = self._backend.forward(ragged(turns))
        except Exception as error:
            if len(turns) == 1:
                logger.exception("a session is given up: its forward failed")
                self._give_up(turns[0].key, f"its forward failed: {type(error).__name__}")
                # Where this fails as well, it is not the session's fault.
                self.warm_up()
                return
            for turn in turns:
                if self._is_open(turn):
                    self._run([turn])
            return
        span = (begin, self._clock())
        row = 0
        for turn in turns:
            is_chosen = turn.reaches_end
            turn.strand.computed += turn.count
            self._publish(turn)
            if is_chosen:
                if self._is_open(turn):
                    self._extend(turn, logits[row], span)
                row += 1

    def _publish(self, turn: Turn) -> None:
        session = turn.session
        if turn.strand is session.main and self._is_open(turn):
            now = min(session.main.computed, session.known)
            before, session.published = session.published, max(now, session.published)
            self._cache.publish(
                session.chain, session.main.tokens, session.main.table, before, session.published
            )

    def _extend(self, turn: Turn, logits: Float32, span: tuple[float, float]) -> None:
        session, strand = turn.session, turn.strand
        place, known = len(strand.tokens), logits[: session.vocab_size]
        try:
            token, second, gap = choose_two(session.chooser, known, place, session.request.params)
        except InvalidLogits as error:
            self._give_up(turn.key, f"the drafter cannot tell its next token: {error}")
            return
        strand.append(token, bisect_right(_STEPS, gap))
        if session.request.traces:
            strand.times[place] = span
        session.has_news = True
        self.tokens += 1
        if strand is session.main:
            if session.request.runs_ahead:
                session.note_rival(Rival(place, second, gap))
            elif session.wants_main:
                session.has_news = False  # whole proposals
            if session.turned_at is not None:
                took, session.turned_at = self._clock() - session.turned_at, None
                self.latency_s += (_WEIGHT if self.latency_s else 1.0) * (took - self.latency_s)

    def _open_branches(self) -> None:
        for session in self._sessions.values():
            if len(session.branches) < _BRANCHES and (rival := session.next_rival()) is not None:
                strand = session.main.fork(rival.at, rival.token, self._pool, BLOCK_SIZE)
                session.branches.append(Branch(strand, rival.at))
                session.rivals.remove(rival)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` if a KV block leaked or is held twice."""
        self._pool.check_integrity(
            strand.table
            for session in self._sessions.values()
            for strand in (session.main, *(branch.strand for branch in session.branches))
        )


def _check_length(length: int) -> None:
    if not 1 <= length <= LONGEST:
        raise Refusal(f"proposals of {length} tokens; 1 to {LONGEST} are made")


def choose_two(
    chooser: TokenChooser, logits: Float32, place: int, params: DraftParams
) -> tuple[int, int, float]:
    """The token of a position, the second likeliest, and by how much its logit is lower, noise
    included. Raises `InvalidLogits`."""
    token = chooser.choose(logits, place)
    others = logits if logits.flags.writeable else logits.copy()
    best = others[token]
    others[token] = _EXCLUDED
    second = chooser.choose(others, place)
    others[token] = best
    bias = params.logit_bias
    gap = float(best - others[second]) + bias.get(token, 0.0) - bias.get(second, 0.0)
    if params.temperature >= GREEDY_BELOW:
        noise = gumbel(params.seed, place, np.array([token, second], dtype=np.int64))
        gap += params.temperature * float(noise[0] - noise[1])
    return token, second, max(gap, 0.0)
