"""One choice of an answer as it grows: from token chunks to text that may be delivered."""

from __future__ import annotations

from dataclasses import dataclass

from mirror_sd.api.detokeniser import Detokeniser
from mirror_sd.api.stop_strings import StopStrings
from mirror_sd.messages import Chunk, TokenLogprob


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log-probability; None for the first prompt token, which nothing precedes.
    `offset` is where its text begins, in characters from the start of the choice's text."""

    token_id: int
    offset: int
    score: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class Delta:
    """What one or more tokens add to choice `index`. `scores` are those of the tokens whose text
    was completed here or held back until now; `finish_reason` comes with the last one."""

    index: int
    text: str
    scores: tuple[ScoredToken, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt shown in front of its completion. Token i of `tokens` begins at `offsets[i]`."""

    text: str
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]


class Choice:
    """Detokenises one sequence and watches for its stop strings. Not thread-safe.

    A stop string ends the choice at the token that completes it: `tokens_delivered` counts up to
    there, and so do the scores. An echoed prompt comes first and is not searched for stops.
    """

    def __init__(
        self, index: int, detokeniser: Detokeniser, stops: StopStrings, echo: Echo | None = None
    ) -> None:
        self.index = index
        self.tokens_delivered = 0
        self._detokeniser = detokeniser
        self._stops = stops
        self._echo = echo
        self._characters = 0 if echo is None else len(echo.text)
        self._waiting_scores: list[ScoredToken] = []

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the choice."""
        return self._stops.is_stopped

    @property
    def is_light(self) -> bool:
        """Whether a chunk costs but a few look-ups, less than a hop to another thread."""
        return self._echo is None and self._detokeniser.is_light

    def feed(self, chunk: Chunk) -> Delta | None:
        """What the chunk adds; None while all of it is held back.

        Must not be called again once `is_stopped`.
        """
        pieces = [self._take_echo(chunk)]
        for position, token in enumerate(chunk.tokens):
            piece = self._detokeniser.push(token)
            if chunk.logprobs is not None:
                score = chunk.logprobs[position]
                self._waiting_scores.append(ScoredToken(token, self._characters, score))
            self._characters += len(piece)
            self.tokens_delivered += 1
            pieces.append(self._stops.feed(piece))
            if self._stops.is_stopped:
                return self._delta("".join(pieces), "stop")
        text = "".join(pieces)
        return self._delta(text, None) if text else None

    def finish(self, reason: str) -> Delta:
        """The last delta, with everything that was held back; `reason` is the worker's.

        A character that was never completed (a length limit can cut one in half) is left out.
        """
        rest = self._detokeniser.finish().rstrip("\ufffd")
        text = self._take_echo(None) + self._stops.feed(rest)
        if self._stops.is_stopped:
            return self._delta(text, "stop")
        return self._delta(text + self._stops.finish(), reason)

    def _take_echo(self, chunk: Chunk | None) -> str:
        echo, self._echo = self._echo, None
        if echo is None:
            return ""
        scores = chunk.prompt_logprobs if chunk is not None else None
        if scores is not None:
            self._waiting_scores.extend(map(ScoredToken, echo.tokens, echo.offsets, scores))
        return echo.text

    def _delta(self, text: str, finish_reason: str | None) -> Delta:
        scores, self._waiting_scores = tuple(self._waiting_scores), []
        return Delta(self.index, text, scores, finish_reason)
