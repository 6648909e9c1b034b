"""Verification: the target's own tokens, row by row, until the draft departs from them.

p is the target, q the draft. With the same noise on both sides (see `sampling`) verification is an
equality test: row j gives the target's token after the accepted prefix, and the draft's token j is
accepted if it is that one. The output is therefore p's alone, whatever q proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mirror_sd.backends.protocol import Float32
from mirror_sd.messages import SamplingParams, TokenLogprob
from mirror_sd.speculative.sampler import token_logprob
from mirror_sd.speculative.sampling import TokenChooser


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
    tokens, accepted, reason = chooser.judge(logits, draft, position, room)
    best = params.logprobs
    logprobs = (
        None
        if best is None
        else [token_logprob(logits[row], token, best) for row, token in enumerate(tokens)]
    )
    return Verdict(tokens, accepted, reason, logprobs)
