"""What a drafter knows of one sequence of a verifier, and what it expects to come.

The main strand goes on from what was committed as if all of it were accepted. Branches depart from
it where another token was nearly as likely, so that a correction finds its continuation drafted.
"""

from __future__ import annotations

from dataclasses import dataclass

from mirror_sd.drafting.frames import LONGEST, Line, Open, Proposal
from mirror_sd.drafting.strand import Strand
from mirror_sd.memory.block_pool import BlockPool
from mirror_sd.memory.prefix_cache import PrefixChain
from mirror_sd.speculative.sampling import TokenChooser

# Two tokens whose logits differ by less may well be told apart otherwise by the target.
_CLOSE = 0.5


@dataclass(slots=True)
class Branch:
    """`strand` departs from the main one at position `at`."""

    strand: Strand
    at: int


@dataclass(frozen=True, slots=True)
class Rival:
    """The second likeliest token of a position of the main strand; `gap`: how much its logit,
    noise included, is lower."""

    at: int
    token: int
    gap: float


class Astray(ValueError):
    """What the verifier says it committed does not follow from what it said before."""


class DraftSession:
    """`known` tokens of the main strand are committed."""

    def __init__(
        self,
        request: Open,
        main: Strand,
        chain: PrefixChain,
        chooser: TokenChooser,
        *,
        vocab_size: int,
        max_context: int,
        now: float,
    ) -> None:
        self.request = request
        self.main = main
        self.chain = chain
        self.chooser = chooser
        self.vocab_size = vocab_size
        self.length = request.length
        self.known = len(request.tokens)
        self.branches: list[Branch] = []
        self.rivals: list[Rival] = []
        self.published = main.computed
        self.heard_at = now
        # When the drafter last had to begin anew; None once the first token after it is there.
        self.turned_at: float | None = now
        self.has_news = False
        self._max_context = max_context
        self._stops = frozenset(request.params.stop_token_ids)

    def commit(
        self, base: int, tokens: tuple[int, ...], pool: BlockPool, block_size: int, now: float
    ) -> None:
        """Take in the target's tokens from position `base` on; some may be known. Raises `Astray`
        if there is a gap, or they contradict what was committed."""
        if base > self.known or base < 0:
            raise Astray(f"tokens from {base} on, {self.known} are known")
        overlap = self.known - base
        if list(tokens[:overlap]) != self.main.tokens[base : base + len(tokens[:overlap])]:
            raise Astray(f"other tokens at {base} than were committed before")
        fresh = tokens[overlap:]
        self.heard_at = now
        if not fresh:
            return
        self._follow(fresh, pool, block_size, now)
        self.known += len(fresh)
        self._drop_branches_before(self.known, pool)
        self.rivals = [rival for rival in self.rivals if rival.at >= self.known]

    def _follow(self, fresh: tuple[int, ...], pool: BlockPool, block_size: int, now: float) -> None:
        strands = (self.main, *(branch.strand for branch in self.branches))
        best = max(strands, key=lambda strand: strand.agreement(self.known, fresh))
        if best is not self.main:
            self.branches = [branch for branch in self.branches if branch.strand is not best]
            self.drop_branches(pool)
            self.main.release(pool)
            self.main, self.rivals = best, []
        agreed = self.main.agreement(self.known, fresh)
        end = self.known + len(fresh)
        if agreed < end:
            self.drop_branches(pool)
            self.main.cut(agreed, pool, block_size)
            self.main.tokens.extend(fresh[agreed - self.known :])
            self.main.strengths.extend(bytes(end - agreed))
            self.rivals = []
        if len(self.main.tokens) == end:
            self.turned_at = now
            self.has_news = False

    def _drop_branches_before(self, place: int, pool: BlockPool) -> None:
        for branch in self.branches:
            if branch.at < place:
                branch.strand.release(pool)
        self.branches = [branch for branch in self.branches if branch.at >= place]

    def drop_branches(self, pool: BlockPool) -> None:
        for branch in self.branches:
            branch.strand.release(pool)
        self.branches = []

    def release(self, pool: BlockPool) -> None:
        self.drop_branches(pool)
        self.main.release(pool)

    @property
    def _goal(self) -> int:
        """Length up to which the main strand is to be drafted."""
        ahead = 2 * self.length + 2 if self.request.runs_ahead else self.length
        return min(self.known + min(ahead, LONGEST), self._max_context)

    def _wants(self, strand: Strand, goal: int) -> bool:
        has_ended = len(strand.tokens) > self.known and strand.tokens[-1] in self._stops
        return len(strand.tokens) < goal and not has_ended

    @property
    def wants_main(self) -> bool:
        return self._wants(self.main, self._goal)

    def wanted_branches(self) -> list[Strand]:
        return [
            branch.strand
            for branch in self.branches
            if self._wants(branch.strand, min(branch.at + 1 + self.length, self._max_context))
        ]

    def next_rival(self) -> Rival | None:
        """The correction among the first positions that is likeliest and has no branch yet."""
        last = min(self.known + self.length, self._max_context - 1)
        taken = {branch.at for branch in self.branches}
        open_ones = [r for r in self.rivals if r.at <= last and r.at not in taken]
        return min(open_ones, key=lambda rival: rival.gap, default=None)

    def note_rival(self, rival: Rival) -> None:
        if rival.gap < _CLOSE:
            self.rivals.append(rival)

    def proposal(self, latency_s: float, pace_s: float) -> Proposal:
        """All that is expected now."""
        lines = [self._line(self.main, self.known)]
        lines += [self._line(branch.strand, branch.at) for branch in self.branches]
        self.has_news = False
        return Proposal(self.request.session, self.known, tuple(lines), latency_s, pace_s)

    def _line(self, strand: Strand, begin: int) -> Line:
        tokens = strand.tokens[begin:]
        times: tuple[tuple[float, float], ...] = ()
        if self.request.traces:
            times = tuple(strand.times.get(p, (0.0, 0.0)) for p in range(begin, len(strand.tokens)))
        return Line(begin - self.known, tuple(tokens), bytes(strand.strengths[begin:]), times)
