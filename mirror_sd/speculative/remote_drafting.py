"""The sequences of an engine that drafters on other devices draft for, and how long to wait.

Waiting costs what a second is worth, `rate` tokens; what it may bring is the chance of the next
token of each sequence that has too few. It never takes longer than a step of the verifier itself:
then it goes on with what it has, local drafts or none.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace

from mirror_sd.drafting.frames import LONGEST, Commit, DraftParams, Open, Proposal
from mirror_sd.messages import SamplingParams
from mirror_sd.speculative.drafters.remote import DraftLink, RemoteSource, Terms

# A token that takes so many times as long as usual is not waited for.
_PATIENCE = 3.0
_GUESS_S = 0.005
# A drafter that does not run ahead is waited for as many steps of the verifier.
_SERIAL_STEPS = 30.0
_RETRY_S = 1.0


@dataclass(slots=True)
class Await:
    """A sequence that could do with more drafted tokens, `limit` at most. `survival`: chance that
    token j and all before it are accepted."""

    source: RemoteSource
    limit: int
    survival: Ordered[float]

    @property
    def is_short(self) -> bool:
        return self.source.is_open and self.source.is_short_of(self.limit)

    @property
    def chance(self) -> float:
        """Of the next token that is drafted."""
        return self.survival[min(self.source.ready, len(self.survival) - 1)]

    @property
    def expected_s(self) -> float:
        """Time until it comes."""
        source = self.source
        return (source.pace_s if source.ready else source.latency_s) or _GUESS_S


@dataclass(slots=True)
class RemoteCounts:
    """For metrics. `late`: waits that brought nothing. `drafters`: that can be had now, None where
    that has not changed."""

    waited_s: float = 0.0
    late: int = 0
    stale: int = 0
    lost: int = 0
    drafters: int | None = None


class RemoteDrafting:
    """One per engine. `on_proposal` sees each proposal that is taken. `revise`: what to make of the
    terms of the drafters for sequences that are opened from now on."""

    def __init__(
        self,
        link: DraftLink,
        *,
        vocab_size: int,
        most_tokens: int,
        clock: Callable[[], float],
        on_proposal: Callable[[Proposal], None] | None = None,
    ) -> None:
        self._link = link
        self._vocab = vocab_size
        self._most = most_tokens
        self.revise: Callable[[Terms], Terms] = lambda terms: terms
        self._clock = clock
        self._on_proposal = on_proposal
        self._sources: dict[int, RemoteSource] = {}
        self._next = 1
        self._drafters = -1
        self.counts = RemoteCounts()

    @property
    def drafters_ready(self) -> int:
        """Drafters that can be had now."""
        return self._link.ready

    def open(
        self,
        tokens: list[int],
        params: SamplingParams,
        tenant: str,
        *,
        most_tokens: int = LONGEST,
    ) -> RemoteSource:
        """The source of a sequence that is about to be prefilled: both are, at the same time.
        `most_tokens`: of a proposal for this one."""
        source = RemoteSource(
            tokens,
            params,
            tenant,
            vocab_size=self._vocab,
            most_tokens=min(self._most, most_tokens),
        )
        self._begin(source)
        return source

    def _begin(self, source: RemoteSource, fresh: Ordered[int] = ()) -> None:
        params = source.params
        session, self._next = self._next, self._next + 1
        source.retry_at = self._clock() + _RETRY_S
        tokens = (*source.tokens, *fresh)
        offer = self._link.assign(session, len(tokens))
        if offer is None:
            return
        source.begin(session, replace(offer, terms=self.revise(offer.terms)))
        self._sources[session] = source
        request = Open(
            session=session,
            tokens=tokens,
            params=DraftParams(
                seed=params.seed % 2**64,
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                logit_bias=params.logit_bias,
                stop_token_ids=params.stop_token_ids,
            ),
            length=source.length,
            runs_ahead=source.overlaps,
            tenant=source.tenant,
            traces=self._on_proposal is not None,
        )
        self._link.open(request)

    def commit(self, source: RemoteSource, tokens: Ordered[int]) -> None:
        """The target's next tokens, which are not in the sequence's list yet."""
        if source.is_open:
            base = len(source.tokens)
            self._link.commit(Commit(source.session, base, tuple(tokens), source.length))
        elif self._clock() >= source.retry_at:
            self._begin(source, tokens)

    def close(self, source: RemoteSource) -> None:
        """The sequence has ended."""
        if source.is_open:
            del self._sources[source.session]
            source.end()
            self._link.close(source.session)

    def flush(self) -> None:
        """Tell the drafters what has gathered."""
        self._link.flush()

    def tend(self) -> None:
        """Look after the connections while nothing is drafted."""
        self._receive(0.0)
        self._link.flush()

    def take_counts(self) -> RemoteCounts:
        """Since the last time."""
        counts, self.counts = self.counts, RemoteCounts()
        if self._link.ready != self._drafters:
            counts.drafters = self._drafters = self._link.ready
        return counts

    def gather(self, wanted: Ordered[Await], rate: float, step_s: float) -> None:
        """Take in what has come; wait for more as long as that is worth it. A second is worth
        `rate` tokens, a step of this engine is expected to take `step_s`."""
        self.flush()
        begin = self._clock()
        self._receive(0.0)
        before = sum(item.source.ready for item in wanted)
        short = self._short(wanted)
        has_waited = is_late = False
        while short:
            waited = self._clock() - begin
            limit = self._limit_s(short, rate, step_s)
            if limit <= 0.0:
                break
            if waited >= limit:
                is_late = True
                break
            has_waited = True
            self._receive(limit - waited)
            short = self._short(wanted)
        if has_waited:
            self.counts.waited_s += self._clock() - begin
        if is_late and sum(item.source.ready for item in wanted) == before:
            self.counts.late += 1
            self._link.was_late([item.source.session for item in short])

    def _short(self, wanted: Ordered[Await]) -> list[Await]:
        return [
            item
            for item in wanted
            if item.is_short and self._link.is_answering(item.source.session)
        ]

    def _limit_s(self, short: Ordered[Await], rate: float, step_s: float) -> float:
        """How long to wait in all, 0 where it is not worth it."""
        if not all(item.source.overlaps for item in short):
            return _SERIAL_STEPS * step_s
        expected = max(item.expected_s for item in short)
        gain = sum(item.chance for item in short)
        if gain <= rate * expected:
            return 0.0
        return min(step_s, _PATIENCE * expected)

    def _receive(self, timeout_s: float) -> None:
        proposals, gone = self._link.receive(timeout_s)
        for session in gone:
            source = self._sources.pop(session, None)
            if source is not None:
                source.end()
                self.counts.lost += 1
        for proposal in proposals:
            source = self._sources.get(proposal.session)
            if source is None or not source.take(proposal):
                self.counts.stale += 1
            elif self._on_proposal is not None:
                self._on_proposal(proposal)
