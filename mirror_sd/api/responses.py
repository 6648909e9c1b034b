"""The bodies that answer a generation request, whole and as stream chunks.

OpenAI's shapes, with these extensions: `seed` on every choice (in a stream on its first chunk), so
that any answer can be asked for again; `usage.speculation` with `drafted_tokens`,
`accepted_tokens`, `verify_rounds` and the first two by `sources`, left out where a stop string
ended a choice before its worker reported them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mirror_sd.api.choice import Delta, ScoredToken
from mirror_sd.api.vocabulary import Vocabulary
from mirror_sd.messages import SequenceUsage

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all bodies of one answer share. `kind` is "chat.completion" or "text_completion";
    `created` is unix time in seconds."""

    id: str
    kind: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: str

    def wrap(self, choices: list[Json], *, is_chunk: bool = False) -> Json:
        """An object of this answer around `choices`."""
        is_chat_chunk = is_chunk and self.kind == "chat.completion"
        return {
            "id": self.id,
            "object": "chat.completion.chunk" if is_chat_chunk else self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "service_tier": self.service_tier,
            "choices": choices,
        }


@dataclass(slots=True)
class WholeChoice:
    """The deltas of one choice joined."""

    index: int
    seed: int
    pieces: list[str] = field(default_factory=list)
    scores: list[ScoredToken] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta of this choice."""
        self.pieces.append(delta.text)
        self.scores.extend(delta.scores)
        self.finish_reason = delta.finish_reason

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class ChatForm:
    """Choices in the shape of `/v1/chat/completions`."""

    kind = "chat.completion"

    def __init__(self, vocabulary: Vocabulary, *, with_logprobs: bool) -> None:
        self._vocabulary = vocabulary
        self._with_logprobs = with_logprobs

    def whole(self, choice: WholeChoice) -> Json:
        """An entry of `choices` in the complete answer."""
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.scores),
            "finish_reason": choice.finish_reason,
            "seed": choice.seed,
        }

    def opening(self, index: int, seed: int) -> Json:
        """The first chunk of a choice, which alone carries the role."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._chunk(index, delta, None) | {"seed": seed}

    def chunks(self, delta: Delta) -> Iterable[Json]:
        """The chunks for a delta; text and finish reason never share one."""
        if delta.text or delta.scores:
            logprobs = self._logprobs(delta.scores)
            yield self._chunk(delta.index, {"content": delta.text}, None, logprobs)
        if delta.finish_reason is not None:
            yield self._chunk(delta.index, {}, delta.finish_reason)

    def _chunk(
        self, index: int, delta: Json, finish_reason: str | None, logprobs: Json | None = None
    ) -> Json:
        return {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, scores: Sequence[ScoredToken]) -> Json | None:
        if not self._with_logprobs:
            return None
        return {"content": [self._entry(score) for score in scores], "refusal": None}

    def _entry(self, scored: ScoredToken) -> Json:
        score = scored.score
        own = self._token(scored.token_id, score.logprob if score is not None else 0.0)
        top = score.top if score is not None else ()
        return own | {"top_logprobs": [self._token(token, value) for token, value in top]}

    def _token(self, token: int, logprob: float) -> Json:
        return {
            "token": self._vocabulary.token_text(token),
            "logprob": finite(logprob),
            "bytes": list(self._vocabulary.token_bytes(token)),
        }


class CompletionForm:
    """Choices in the shape of `/v1/completions`."""

    kind = "text_completion"

    def __init__(self, vocabulary: Vocabulary, *, with_logprobs: bool) -> None:
        self._vocabulary = vocabulary
        self._with_logprobs = with_logprobs

    def whole(self, choice: WholeChoice) -> Json:
        """An entry of `choices` in the complete answer."""
        entry = self._choice(choice.index, choice.text, choice.scores, choice.finish_reason)
        return entry | {"seed": choice.seed}

    def opening(self, index: int, seed: int) -> Json:
        """The first chunk of a choice; it has no text yet."""
        return self._choice(index, "", (), None) | {"seed": seed}

    def chunks(self, delta: Delta) -> Iterable[Json]:
        """The chunks for a delta; text and finish reason never share one."""
        if delta.text or delta.scores:
            yield self._choice(delta.index, delta.text, delta.scores, None)
        if delta.finish_reason is not None:
            yield self._choice(delta.index, "", (), delta.finish_reason)

    def _choice(
        self, index: int, text: str, scores: Sequence[ScoredToken], finish_reason: str | None
    ) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(scores) if self._with_logprobs and scores else None,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, scores: Sequence[ScoredToken]) -> Json:
        text_of = self._vocabulary.token_text
        return {
            "tokens": [text_of(scored.token_id) for scored in scores],
            "token_logprobs": [
                None if scored.score is None else finite(scored.score.logprob) for scored in scores
            ],
            "top_logprobs": [self._top(scored) for scored in scores],
            "text_offset": [scored.offset for scored in scores],
        }

    def _top(self, scored: ScoredToken) -> dict[str, float] | None:
        if scored.score is None:
            return None
        # Best first, and the chosen token is always among them, as in OpenAI's answers.
        entries = (*scored.score.top, (scored.token_id, scored.score.logprob))
        return {self._vocabulary.token_text(token): finite(value) for token, value in entries}


Form = ChatForm | CompletionForm


@dataclass(frozen=True, slots=True)
class ChoiceUsage:
    """Counts of one choice. `reported` is the worker's account, None where the choice ended by a
    stop string and the worker was told to drop it."""

    prompt_index: int
    prompt_tokens: int
    completion_tokens: int
    reported: SequenceUsage | None


def usage(choices: Sequence[ChoiceUsage]) -> Json:
    """The `usage` object of an answer: each prompt counted once, completions added up."""
    first_of_prompt = {choice.prompt_index: choice for choice in reversed(choices)}
    prompt_tokens = sum(choice.prompt_tokens for choice in first_of_prompt.values())
    cached = sum(
        min(choice.reported.cached_tokens, choice.prompt_tokens)
        for choice in first_of_prompt.values()
        if choice.reported is not None
    )
    completion_tokens = sum(choice.completion_tokens for choice in choices)
    body: Json = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    reports = [choice.reported for choice in choices if choice.reported is not None]
    # The sum of some would not go with the tokens of all.
    if reports and len(reports) == len(choices):
        body["speculation"] = {
            "drafted_tokens": sum(report.drafted_tokens for report in reports),
            "accepted_tokens": sum(report.accepted_tokens for report in reports),
            "verify_rounds": sum(report.verify_rounds for report in reports),
            "sources": _by_source(reports),
        }
    return body


def _by_source(reports: Sequence[SequenceUsage]) -> Json:
    counts: dict[str, dict[str, int]] = {}
    for report in reports:
        for name, (drafted, accepted) in sorted(report.draft_sources.items()):
            entry = counts.setdefault(name, {"drafted_tokens": 0, "accepted_tokens": 0})
            entry["drafted_tokens"] += drafted
            entry["accepted_tokens"] += accepted
    return counts


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry: minus infinity becomes -9999, as OpenAI has it."""
    return max(logprob, -9999.0)


def event(body: Json) -> bytes:
    """One server-sent event; the JSON has no line break, so one `data:` line holds it."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"
