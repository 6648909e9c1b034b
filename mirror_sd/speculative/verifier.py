"""Verification: the target's own tokens, row by row, until the draft departs from them.

p is the target, q the draft. With the same noise on both sides (see `sampler`) verification is an
equality test: row j gives the target's token after the accepted prefix, and the draft's token j is
accepted if it is that one. The output is therefore p's alone, whatever q proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mirror_sd.backends.protocol import Float32
from mirror_sd.messages import SamplingParams, TokenLogprob
from mirror_sd.speculative.sampler import TokenChooser, checked_argmax, token_logprob


@dataclass(frozen=True, slots=True)
class Verdict:
    """`tokens` to emit; `accepted` of the draft; `reason` if the sequence ends here.

    A stop token ends the sequence and is not emitted; it beats the length cap.
    """

    tokens: list[int]
    accepted: int
    reason: str | None
    logprobs: list[TokenLogprob] | None


def verify(
    logits: Float32,
    draft: Sequence[int],
    chooser: TokenChooser,
    params: SamplingParams,
    position: int,
    room: int,
) -> Verdict:
    """Judge `draft` (k tokens) by `logits` [k + 1, vocab].

    `position`: absolute position of the first token chosen. `room`: most tokens that may still be
    emitted, at least 1. Raises `InvalidLogits`.
    """
    tokens: list[int] = []
    logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
    accepted = 0
    reason: str | None = None
    plain = chooser.is_plain_argmax
    for row in range(len(draft) + 1):
        token = (
            checked_argmax(logits[row]) if plain else chooser.choose(logits[row], position + row)
        )
        if token in params.stop_token_ids:
            reason = "stop"
            break
        tokens.append(token)
        chooser.commit(token)
        if logprobs is not None:
            logprobs.append(token_logprob(logits[row], token, params.logprobs or 0))
        matches = row < len(draft) and draft[row] == token
        accepted += matches
        if len(tokens) == room:
            reason = "length"
            break
        if not matches:
            break
    return Verdict(tokens, accepted, reason, logprobs)
