"""How many tokens of a long prompt are read in a step, so that the streams beside it keep their
pace: as many as let the step last `pace` times as long as one without.

What a step without a segment takes is known from the cost of its rows and what the last such steps
took beyond it, drafts and contexts included. What a token of a segment takes grows with the context
before it, and is learned for each stretch of positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from mirror_sd.speculative.cost_model import VerifyCost

# Before anything was measured.
_FIRST_SEGMENT = 16
# Positions that share what a token takes.
_STRETCH = 512
# A step in so many goes without a segment, so that it stays known what such a step takes.
_BARE_EVERY = 16
_BARE_GAIN, _TOKEN_GAIN = 0.1, 0.25
# A step that took more, or less, than what was expected by this factor counts as if by this.
_OUTLIER = 2.0


@dataclass(frozen=True, slots=True)
class Segment:
    """`tokens` of a long prompt from `position` on, read beside `decoding` streams."""

    tokens: int
    position: int
    decoding: int


class SegmentPace:
    """One per engine. `pace`: above 1. `cost`: of a step by the rows of its forward."""

    def __init__(self, pace: float, cost: VerifyCost) -> None:
        self._extra = pace - 1.0
        self._cost = cost
        self._overhead = 1.0  # of a step without a segment, by the cost of its rows
        self._token_s: dict[int, float] = {}
        self._in_a_row = 0

    def tokens(self, decoding: int, position: int) -> int:
        """How long the next segment may be; 0 for a step that shall go without."""
        if self._in_a_row >= _BARE_EVERY - 1:
            self._in_a_row = 0
            return 0
        self._in_a_row += 1
        spare_s = self._extra * self._bare_s(decoding)
        token_s = self._expected_token_s(decoding, position)
        if spare_s <= 0 or token_s <= 0:
            return _FIRST_SEGMENT
        return max(int(spare_s / token_s), 1)

    def observe_bare(self, decoding: int, seconds: float) -> None:
        """A step of `decoding` streams and nothing else, their drafts included."""
        rows_s = self._cost.seconds(decoding)
        if rows_s <= 0 or seconds <= 0:
            return
        overhead = min(max(seconds / rows_s, self._overhead / _OUTLIER), self._overhead * _OUTLIER)
        self._overhead += _BARE_GAIN * (overhead - self._overhead)

    def observe(self, segment: Segment, seconds: float) -> None:
        """A step with a segment, and no other prompt."""
        expected = self._expected_token_s(segment.decoding, segment.position)
        if expected <= 0:
            return
        spent = (seconds - self._bare_s(segment.decoding)) / segment.tokens
        spent = min(max(spent, expected / _OUTLIER), expected * _OUTLIER)
        stretch = segment.position // _STRETCH
        self._token_s[stretch] = expected + _TOKEN_GAIN * (spent - expected)

    def _bare_s(self, decoding: int) -> float:
        return self._overhead * self._cost.seconds(decoding)

    def _expected_token_s(self, decoding: int, position: int) -> float:
        stretch = position // _STRETCH
        if stretch in self._token_s:
            return self._token_s[stretch]
        before = [known for known in self._token_s if known < stretch]
        if before:
            return self._token_s[max(before)]
        table, low = self._cost.table(), min(decoding, 512)
        return (table[low + _FIRST_SEGMENT] - table[low]) / _FIRST_SEGMENT
