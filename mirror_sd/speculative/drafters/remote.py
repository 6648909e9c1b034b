"""Drafts that another device makes meanwhile.

A proposal says all that the drafter expects from position `base` on, in lines of which all but the
first depart from it where the target may correct it. What was committed since is compared with
them: a proposal that comes late is used as far as it agrees, or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Protocol

from mirror_sd.drafting.frames import LONGEST, Commit, Line, Open, Proposal
from mirror_sd.messages import SamplingParams
from mirror_sd.speculative.drafters import STRENGTHS

NAME = "remote"
_LEAST_LENGTH = 3
_RUN_WEIGHT = 0.2
# What runs ahead of a commit that is on its way may be longer than a proposal.
_LONGEST_LINE = 3 * LONGEST


@dataclass(frozen=True, slots=True)
class Terms:
    """How a drafter is to draft. `length`: tokens of a proposal, None to learn it from
    `first_length` on. `overlaps`: it goes on while its proposals are verified; where it does not,
    each is waited for."""

    length: int | None = None
    first_length: int = 8
    overlaps: bool = True


@dataclass(frozen=True, slots=True)
class Offer:
    """What a session gets from its drafter, which can follow it up to `max_context` tokens."""

    terms: Terms
    max_context: int


class DraftLink(Protocol):
    """The connections to drafters. Nothing here blocks but `receive`, which has a time limit;
    nothing raises because of what a drafter does."""

    @property
    def ready(self) -> int:
        """Drafters that can be had now."""
        ...

    def assign(self, session: int, length: int) -> Offer | None:
        """A drafter for a session that has `length` tokens; None where none is to be had."""
        ...

    def open(self, request: Open) -> None:
        """Have its drafter draft for an assigned session; sent by `flush`."""
        ...

    def commit(self, commit: Commit) -> None:
        """Of an open session; sent by `flush`."""
        ...

    def close(self, session: int) -> None: ...

    def flush(self) -> None:
        """Send what has gathered."""
        ...

    def receive(self, timeout_s: float) -> tuple[list[Proposal], list[int]]:
        """What has come: proposals, and sessions that are no longer drafted for. Waits for the
        first of them for `timeout_s` at most."""
        ...

    def is_answering(self, session: int) -> bool:
        """Whether its drafter is worth waiting for: it answered the last time."""
        ...

    def was_late(self, sessions: Ordered[int]) -> None:
        """Their drafters were waited for in vain."""
        ...


class RemoteSource:
    """The proposals for one sequence; `tokens` is its own list, which grows."""

    name = NAME

    def __init__(
        self,
        tokens: list[int],
        params: SamplingParams,
        tenant: str,
        *,
        vocab_size: int,
        most_tokens: int,
    ) -> None:
        self.tokens, self.params, self.tenant = tokens, params, tenant
        self.session = 0
        self.is_open = False
        self.overlaps = True
        self.retry_at = 0.0
        self.latency_s = self.pace_s = 0.0
        self._vocab = vocab_size
        self._most = min(most_tokens, LONGEST)
        self._max_context = 0
        self._is_fixed = False
        # Tokens of a proposal; 0 before there was a drafter.
        self.length = 0
        self._run = 0.0
        # Of each line: position of its first token, tokens, strengths.
        self._lines: list[tuple[int, tuple[int, ...], bytes]] = []
        self._base = 0
        self._offered: bytes = b""

    def begin(self, session: int, offer: Offer) -> None:
        """It is drafted for as `session` from now on."""
        terms = offer.terms
        self.session, self.is_open, self.overlaps = session, True, terms.overlaps
        self._max_context = offer.max_context
        self._is_fixed = terms.length is not None
        self.length = min(terms.length or self.length or terms.first_length, self._most)
        self._lines, self._base = [], 0

    def end(self) -> None:
        self.is_open = False
        self._lines = []

    def take(self, proposal: Proposal) -> bool:
        """Replace what was proposed before; False for one that is stale or nonsense."""
        if not self._base <= proposal.base <= len(self.tokens) or not proposal.lines:
            return False
        main = proposal.lines[0]
        if main.at != 0 or not all(self._is_sound(line, main) for line in proposal.lines):
            return False
        self._base = proposal.base
        self._lines = [
            (
                proposal.base,
                (*main.tokens[: line.at], *line.tokens),
                main.strengths[: line.at] + line.strengths,
            )
            for line in proposal.lines
        ]
        self.latency_s, self.pace_s = max(proposal.latency_s, 0.0), max(proposal.pace_s, 0.0)
        return True

    def _is_sound(self, line: Line, main: Line) -> bool:
        return (
            0 <= line.at <= len(main.tokens)
            and len(line.tokens) == len(line.strengths) <= _LONGEST_LINE
            and all(0 <= token < self._vocab for token in line.tokens)
            and all(value < STRENGTHS for value in line.strengths)
        )

    def _rest(self) -> tuple[Ordered[int], bytes]:
        """What the first line that agrees with all that was committed goes on with."""
        for base, tokens, strengths in self._lines:
            done = len(self.tokens) - base
            if 0 <= done < len(tokens) and list(tokens[:done]) == self.tokens[base:]:
                return tokens[done:], strengths[done:]
        return (), b""

    @property
    def ready(self) -> int:
        """Tokens that could be verified now."""
        return len(self._rest()[0])

    def is_short_of(self, limit: int) -> bool:
        """Whether fewer than `limit` tokens are ready, and more will be before the next commit:
        what is ready is shorter than a proposal, and ends neither with a stop token nor with the
        drafter's context."""
        tokens, _ = self._rest()
        has_ended = bool(tokens) and tokens[-1] in self.params.stop_token_ids
        most = min(limit, self.length, self._max_context - len(self.tokens))
        return len(tokens) < most and not has_ended

    def propose(self, limit: int) -> list[int]:
        tokens, strengths = self._rest()
        self._offered = strengths[:limit]
        return list(tokens[:limit])

    def strengths(self) -> list[int]:
        return list(self._offered)

    def commit(self, tokens: Ordered[int]) -> None:
        """Nothing: it compares with the sequence's own list."""

    def observe(self, drafted: int, accepted: int) -> None:
        """A draft of it was verified: proposals are as long as they are of use."""
        if self._is_fixed:
            return
        self._run += _RUN_WEIGHT * (accepted - self._run)
        wanted = round(1.5 * self._run) + _LEAST_LENGTH
        if accepted == drafted:
            wanted = max(wanted, self.length + 1)
        self.length = max(min(wanted, self._most), 1)
