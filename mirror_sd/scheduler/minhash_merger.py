"""Which requests are one generation, and whose answer is another's draft.

    exact    the same request, deterministic, while its generation lives: one generation for both
    shared   alike, in the same partition, of a tenant that opted in: one generation for both
    hinted   alike, of the same tenant and model: the other's tokens, in flight or finished, are a
             source of drafts

A finished answer is only ever a draft source, never an answer. Nothing is compared across tenants
or models, whatever a profile claims: both are part of every key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mirror_sd.config import Config
from mirror_sd.messages import MergeProfile, Submit
from mirror_sd.scheduler.similarity_index import SimilarityIndex
from mirror_sd.scheduler.token_log import TokenLog

Scope: TypeAlias = tuple[str, str, bytes]

_NO_PROFILE = MergeProfile()
_MOST_PERMUTATIONS = 1024
# Tokens that all finished answers may hold, 8 bytes each.
_TOKENS_KEPT = 4_000_000
# What an answer without a single token costs the store.
_ENTRY_TOKENS = 64


@dataclass(frozen=True, slots=True)
class MergeRules:
    """Similarities are Jaccard's, 0..1, that of hints the smaller. `share_answers`: the tenants
    that opted in."""

    share_similarity: float
    hint_similarity: float
    expire_s: float
    max_entries: int
    share_answers: Collection[str] = ()


def rules_of(config: Config, share_answers: Collection[str] | None = None) -> MergeRules:
    """Those that are configured; `share_answers` in place of the configured tenants."""
    share, merge = config.scheduler.similarity_threshold, config.merge
    return MergeRules(
        share_similarity=share,
        hint_similarity=min(merge.hint_similarity, share),
        expire_s=merge.expire_s,
        max_entries=merge.max_entries,
        share_answers=merge.share_answers if share_answers is None else share_answers,
    )


class Answer:
    """What a generation makes or has made. `worker_id` is the one that runs or ran it; `is_live`
    while it runs or waits."""

    __slots__ = (
        "expires_at",
        "has_prompt_logprobs",
        "is_live",
        "log",
        "name",
        "profile",
        "scope",
        "worker_id",
    )

    def __init__(self, name: str, submit: Submit) -> None:
        self.name = name
        self.scope = scope_of(submit)
        self.profile = profile_in(submit)
        self.has_prompt_logprobs = submit.params.prompt_logprobs
        with_chunks = submit.params.logprobs is not None or submit.params.prompt_logprobs
        self.log = TokenLog(submit.delivered, with_chunks=with_chunks)
        self.worker_id: str | None = None
        self.is_live = True
        self.expires_at = 0.0

    def can_serve(self, submit: Submit) -> bool:
        """Whether the rest of its tokens are what the request still needs."""
        with_prompt = submit.params.prompt_logprobs
        if with_prompt and not self.has_prompt_logprobs:
            return False
        return self.is_live and self.log.can_continue(submit.delivered, with_prompt=with_prompt)


@dataclass(frozen=True, slots=True)
class Match:
    """`join`: its generation is the request's as well, as `kind` says why. Else `source`, if there
    is one, is where its drafts come from."""

    join: Answer | None = None
    kind: Literal["exact", "shared"] = "exact"
    source: Answer | None = None


class MinHashMerger:
    """Holds the live answers and, bounded by number, tokens and age, the finished ones."""

    def __init__(self, rules: MergeRules, clock: Callable[[], float]) -> None:
        self._rules = rules
        self._clock = clock
        self._exact: dict[tuple[Scope, bytes], Answer] = {}
        self._index: SimilarityIndex[Answer] = SimilarityIndex(rules.hint_similarity)
        self._finished: OrderedDict[Answer, int] = OrderedDict()
        self._by_scope: dict[Scope, OrderedDict[Answer, None]] = {}
        self._tokens_kept = 0

    @property
    def finished(self) -> int:
        """Finished answers kept as draft sources."""
        return len(self._finished)

    def match(self, submit: Submit) -> Match:
        """What there is for a new request; changes nothing."""
        profile, scope = profile_in(submit), scope_of(submit)
        if profile.exact:
            same = self._exact.get((scope, profile.exact))
            if same is not None and same.can_serve(submit):
                return Match(same, "exact")
        if not profile.signature:
            return Match()
        found = self._index.similar(scope, profile.signature)
        for alike, answer in found:
            if self._may_share(submit, profile, alike, answer):
                return Match(answer, "shared")
        sources = [pair for pair in found if not pair[1].log.is_broken]
        if not sources:
            return Match()
        # `max` takes the first of equals, the newest.
        _, source = max(sources, key=lambda pair: _worth(pair[0], pair[1], profile))
        return Match(source=source)

    def begin(self, name: str, submit: Submit) -> Answer | None:
        """A generation of its own starts for the request; None if nothing can ever match it."""
        profile = profile_in(submit)
        if not profile.exact and not profile.signature:
            return None
        answer = Answer(name, submit)
        if profile.exact:
            self._exact[answer.scope, profile.exact] = answer
        if profile.signature:
            self._index.add(answer.scope, answer, profile.signature)
        return answer

    def finish(self, answer: Answer) -> None:
        """It is complete: from now on it is a draft source only."""
        self._end(answer)
        if not answer.profile.signature:
            return
        tokens = answer.log.read()
        if answer.log.is_broken or not tokens:
            self._index.discard(answer.scope, answer)
            return
        answer.log.forget_chunks()
        answer.expires_at = self._clock() + self._rules.expire_s
        size = len(tokens) + _ENTRY_TOKENS
        self._finished[answer] = size
        self._tokens_kept += size
        self._by_scope.setdefault(answer.scope, OrderedDict())[answer] = None
        while len(self._finished) > self._rules.max_entries or self._tokens_kept > _TOKENS_KEPT:
            # The tenant that keeps most loses first: others must not feel how much one asks.
            largest = max(self._by_scope.values(), key=len)
            self._forget(next(iter(largest)))

    def drop(self, answer: Answer) -> None:
        """It failed, or nobody wants it: it is no source of anything any more."""
        self._end(answer)
        self._index.discard(answer.scope, answer)

    def purge(self) -> None:
        """Forget the answers that have expired."""
        now = self._clock()
        while self._finished and (oldest := next(iter(self._finished))).expires_at <= now:
            self._forget(oldest)

    def check_integrity(self) -> None:
        """Raises `AssertionError` if what is kept and what is counted differ."""
        self._index.check_integrity()
        if self._tokens_kept != sum(self._finished.values()):
            raise AssertionError("the tokens kept are miscounted")
        if sum(map(len, self._by_scope.values())) != len(self._finished):
            raise AssertionError("finished answers are miscounted by scope")

    def _may_share(
        self, submit: Submit, profile: MergeProfile, alike: float, answer: Answer
    ) -> bool:
        return (
            submit.tenant in self._rules.share_answers
            and alike >= self._rules.share_similarity
            and profile.partition != b""
            and answer.profile.partition == profile.partition
            # Of another prompt: neither its logprobs nor a text begun otherwise.
            and not submit.params.prompt_logprobs
            and answer.can_serve(submit)
        )

    def _end(self, answer: Answer) -> None:
        answer.is_live = False
        key = (answer.scope, answer.profile.exact)
        if self._exact.get(key) is answer:
            del self._exact[key]

    def _forget(self, answer: Answer) -> None:
        self._tokens_kept -= self._finished.pop(answer)
        siblings = self._by_scope[answer.scope]
        del siblings[answer]
        if not siblings:
            del self._by_scope[answer.scope]
        self._index.discard(answer.scope, answer)


def _worth(alike: float, answer: Answer, profile: MergeProfile) -> float:
    """Of an answer as a draft source. A finished one can be read ahead; one in flight is ahead
    only by what it made before."""
    worth = alike
    if profile.exact and answer.profile.exact == profile.exact:
        worth += 1.0
    if profile.partition and answer.profile.partition == profile.partition:
        worth += 0.1
    return worth if answer.is_live else worth + 0.2


def scope_of(submit: Submit) -> Scope:
    return (submit.tenant, submit.model, profile_in(submit).scope)


def profile_in(submit: Submit) -> MergeProfile:
    """The profile of a request, with a signature only if it can be read."""
    profile = submit.merge or _NO_PROFILE
    size = len(profile.signature)
    if size % 4 or size > 4 * _MOST_PERMUTATIONS:
        return MergeProfile(exact=profile.exact, scope=profile.scope)
    return profile
