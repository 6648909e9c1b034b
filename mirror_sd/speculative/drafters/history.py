"""Drafts from other answers to the same tenant, as customer service repeats itself.

What was written last is looked for in the answers given before and in those being written now, and
the one found is followed as long as it agrees; where the two part, the search begins again from the
tokens written then. A tenant's texts lie apart, and a source holds those of its tenant alone: no
search can reach another's. Nothing leaves the worker's memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mirror_sd.speculative.drafters import DraftSource
from mirror_sd.speculative.drafters.running_text import RunningText
from mirror_sd.speculative.drafters.suffix_ring import LONGEST, Match, SuffixRing

# Of a prompt only what leads up to its answer is kept: with all of it, drafts were a little worse
# and a tenant's tokens used up sooner.
_PROMPT_TOKENS = 64
# Running answers of a tenant that are searched, the latest ones; each costs a look into a table.
_RUNNING = 16
# The least tokens that agree for each strength above 0. Measured on support chat, the next token is
# right in 25, 40, 49, 62, 73, 85, 94 and 98 of 100.
_STEPS = (3, 4, 6, 8, 12, 20, 32)


@dataclass(slots=True)
class TenantTexts:
    """What one tenant's answers are drafted from: those of the past, those that are written now."""

    past: SuffixRing
    running: deque[RunningText] = field(default_factory=lambda: deque(maxlen=_RUNNING))


class HistorySource:
    """Follows one of the tenant's other texts. Its strength grows with the tokens on which they
    agree."""

    name = "history"

    def __init__(self, texts: TenantTexts, tokens: Sequence[int], prompt_length: int) -> None:
        self._texts = texts
        self._tail = list(tokens[-LONGEST:])
        self.own = RunningText(tokens[max(prompt_length - LONGEST, 0) :])
        # The text that is followed, and where it goes on; None while there is none.
        self._followed: SuffixRing | RunningText = texts.past
        self._place: int | None = None
        self._epoch = texts.past.epoch
        self._agreed = 0

    def propose(self, limit: int) -> list[int]:
        """What followed where these tokens were written before."""
        if limit <= 0:
            return []
        if self._place is not None and self._epoch == self._texts.past.epoch:
            draft = self._followed.read(self._place, limit)
            if draft:
                return draft
        self._search()
        return [] if self._place is None else self._followed.read(self._place, limit)

    def _search(self) -> None:
        self._epoch = self._texts.past.epoch
        self._followed = self._texts.past
        best = self._texts.past.find(self._tail) or Match(0, 0)
        for text in reversed(self._texts.running):
            if best.length >= LONGEST:
                break
            match = None if text is self.own else text.find(self._tail)
            if match is not None and match.length > best.length:
                self._followed, best = text, match
        self._place, self._agreed = best if best.length else (None, 0)

    def strength(self) -> int:
        return bisect_right(_STEPS, self._agreed)

    def strengths(self) -> list[int]:
        return [self.strength()]

    def commit(self, tokens: Sequence[int]) -> None:
        """The target's next tokens."""
        if self._place is not None:
            if self._followed.read(self._place, len(tokens)) == list(tokens):
                self._place += len(tokens)
                self._agreed += len(tokens)
            else:
                self._place, self._agreed = None, 0
        self.own.extend(tokens)
        self._tail.extend(tokens)
        del self._tail[:-LONGEST]


class HistoryDrafter:
    """Keeps the latest `tokens` tokens of each of the `tenants` tenants that asked last."""

    def __init__(self, *, tokens: int, tenants: int) -> None:
        if tokens < 1 or tenants < 1:
            raise ValueError(f"{tokens} tokens of {tenants} tenants; at least 1 of each is needed")
        self._tokens = tokens
        self._tenants = tenants
        self._texts: OrderedDict[str, TenantTexts] = OrderedDict()
        # Memory of the past of all tenants.
        self.nbytes = 0

    def open(self, tokens: Sequence[int], *, tenant: str, prompt_length: int) -> HistorySource:
        texts = self._texts_of(tenant)
        source = HistorySource(texts, tokens, prompt_length)
        texts.running.append(source.own)
        return source

    def close(
        self,
        source: DraftSource | None,
        tokens: Sequence[int],
        *,
        tenant: str,
        prompt_length: int,
    ) -> None:
        """Keep the answer, and what led up to it."""
        texts = self._texts_of(tenant)
        if isinstance(source, HistorySource) and source.own in texts.running:
            texts.running.remove(source.own)
        if len(tokens) > prompt_length:
            self.nbytes -= texts.past.nbytes
            texts.past.add(tokens[max(prompt_length - _PROMPT_TOKENS, 0) :])
            self.nbytes += texts.past.nbytes

    def _texts_of(self, tenant: str) -> TenantTexts:
        texts = self._texts.get(tenant)
        if texts is None:
            texts = self._texts[tenant] = TenantTexts(SuffixRing(self._tokens))
            self.nbytes += texts.past.nbytes
            if len(self._texts) > self._tenants:
                _, oldest = self._texts.popitem(last=False)
                self.nbytes -= oldest.past.nbytes
        self._texts.move_to_end(tenant)
        return texts
