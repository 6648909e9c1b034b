"""From the moments at which tokens came out to the figures by which engines are compared.

The decoding clock runs while at least one answer is between its first and its last token, but not
before each of the first N prompts has its first token, where N prompts run at once. So with one
stream no prompt's reading counts; with N, the prompts read while others decode do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """When a prompt was handed over and when each of its tokens was out (seconds, one clock).

    A stop token counts as a token: the engine had to compute it. At least one token.
    """

    start: float
    times: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Rates:
    """`tok_s`: tokens of all streams per second of the decoding clock. `ms_per_token`: time of
    one stream for each token after its first. `wall_tok_s`: all tokens by all the time, prompts
    included. None where no answer has a second token."""

    tok_s: float | None
    ms_per_token: float | None
    wall_tok_s: float
    ttft_ms: float
    tokens: int

    def row(self) -> dict[str, Any]:
        """The figures rounded for a report."""
        return {
            "tok_s": _rounded(self.tok_s, 1),
            "ms_per_token": _rounded(self.ms_per_token, 3),
            "wall_tok_s": round(self.wall_tok_s, 1),
            "ttft_ms": round(self.ttft_ms, 2),
            "tokens": self.tokens,
        }


def rates(answers: Sequence[Answer], streams: int) -> Rates:
    """The figures of a run that kept `streams` prompts going, a next one when one ended."""
    in_order = sorted(answers, key=lambda answer: answer.start)
    begin = max(answer.times[0] for answer in in_order[:streams])
    spans = list(_merged(in_order, begin))
    decode_s = sum(end - start for start, end in spans)
    decoded = sum(
        start < time <= end for answer in answers for time in answer.times for start, end in spans
    )
    later = sum(len(answer.times) - 1 for answer in answers)
    streaming_s = sum(answer.times[-1] - answer.times[0] for answer in answers)
    tokens = sum(len(answer.times) for answer in answers)
    wall_s = max(answer.times[-1] for answer in answers) - in_order[0].start
    first_s = [answer.times[0] - answer.start for answer in answers]
    return Rates(
        tok_s=decoded / decode_s if decode_s else None,
        ms_per_token=1e3 * streaming_s / later if later and streaming_s else None,
        wall_tok_s=tokens / wall_s,
        ttft_ms=1e3 * sum(first_s) / len(first_s),
        tokens=tokens,
    )


def _merged(answers: Iterable[Answer], begin: float) -> Iterable[tuple[float, float]]:
    """The times from `begin` on in which some answer is decoding, as disjoint spans."""
    open_from: float | None = None
    open_to = begin
    for start, end in sorted((answer.times[0], answer.times[-1]) for answer in answers):
        start, end = max(start, begin), max(end, begin)
        if open_from is not None and start <= open_to:
            open_to = max(open_to, end)
            continue
        if open_from is not None:
            yield open_from, open_to
        open_from, open_to = start, end
    if open_from is not None:
        yield open_from, open_to


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
