"""What sampling is, as docs/architecture.md defines it, whichever code does it.

bias and penalties -> temperature -> top-k -> top-p -> Gumbel noise of (seed, position) -> argmax.
The token is a function of the logits, the parameters, the counts of the accepted prefix, the seed
and the position alone (Gumbel-max coupling: Daliri, Musco, Suresh, arXiv 2408.07978), so a draft
is verified by comparing tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
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


def judge_rows(
    chooser: TokenChooser,
    logits: Float32,
    draft: Sequence[int],
    position: int,
    room: int,
    *,
    stops: Container[int],
    keeps: Callable[[Float32, int, int], bool],
) -> Judgement:
    """`TokenChooser.judge` by `choose` and `commit`, row by row; the draft goes on as long as
    `keeps`, given the row, the drafted and the chosen token, lets it. Raises `InvalidLogits`."""
    if room < 1:
        raise ValueError("no room for a token")
    tokens: list[int] = []
    accepted = 0
    for row in range(len(draft) + 1):
        token = chooser.choose(logits[row], position + row)
        if token in stops:
            return Judgement(tokens, accepted, "stop")
        is_kept = row < len(draft) and keeps(logits[row], draft[row], token)
        if is_kept:
            token = draft[row]
        tokens.append(token)
        chooser.commit(token)
        accepted += is_kept
        if len(tokens) == room:
            return Judgement(tokens, accepted, "length")
        if not is_kept:
            break
    return Judgement(tokens, accepted, None)
