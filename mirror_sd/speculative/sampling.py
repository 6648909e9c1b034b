"""What sampling is, as docs/architecture.md defines it, whichever code does it.

bias and penalties -> temperature -> top-k -> top-p -> Gumbel noise of (seed, position) -> argmax.
The token is a function of the logits, the parameters, the counts of the accepted prefix, the seed
and the position alone (Gumbel-max coupling: Daliri, Musco, Suresh, arXiv 2408.07978), so a draft
is verified by comparing tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mirror_sd.backends.protocol import Float32


class InvalidLogits(ArithmeticError):
    """The target gave NaN or infinity where a token must be chosen."""


class Judgement(NamedTuple):
    """`tokens` to emit; `accepted` of the draft; `reason` if the sequence ends here: "stop" or
    "length"."""

    tokens: list[int]
    accepted: int
    reason: str | None


class TokenChooser(Protocol):
    """Chooses the tokens of one sequence; `commit` tells it what was accepted elsewhere."""

    def commit(self, token: int) -> None: ...

    def choose(self, logits: Float32, position: int) -> int:
        """The token at absolute `position` given its row of `logits` [vocab].

        Raises `InvalidLogits`.
        """
        ...

    def judge(self, logits: Float32, draft: Sequence[int], position: int, room: int) -> Judgement:
        """Choose and commit row by row of `logits` [k + 1, vocab] until `draft` (k tokens) departs
        from what is chosen, `room` tokens are chosen or a stop token is, which is not emitted.

        Raises `InvalidLogits`.
        """
        ...
