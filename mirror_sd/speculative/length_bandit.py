"""How long drafts may be, learned online: the other rule beside `length_controller`.

A bandit whose arms are lengths, 0 included. Its context is the number of sequences (in powers of
two), the source and the strength of its proposal. The reward of a length is the tokens accepted of
it less those that its time would have brought, so that the best arm has the most accepted tokens a
second. A draft of 8 tells what one of 3 would have brought, and a proposal that was only watched
what it would have brought if verified: no arm needs to be pulled to be known.
"""

from __future__ import annotations

ARMS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_HORIZON = 100.0
# Rewards of nothing that a longer arm counts as having had: it is left only for good reason.
_BENEFIT_OF_DOUBT = 5.0

Key = tuple[int, str, int]


class LengthBandit:
    """One per engine."""

    def __init__(self, longest: int) -> None:
        self._arms = [arm for arm in ARMS if arm < longest] + [longest]
        self._sums: dict[Key, list[float]] = {}
        self._weights: dict[Key, list[float]] = {}

    @staticmethod
    def key(sequences: int, source: str, strength: int) -> Key:
        return (sequences.bit_length(), source, strength)

    def observe(self, key: Key, proposed: int, matched: int, price: float) -> None:
        """Of a proposal of `proposed` tokens `matched` were the target's, then one was not or there
        were no more. A row was worth `price` tokens."""
        sums = self._sums.setdefault(key, [0.0] * len(self._arms))
        weights = self._weights.setdefault(key, [0.0] * len(self._arms))
        keep = 1.0 - 1.0 / _HORIZON
        for index, arm in enumerate(self._arms):
            reward = min(arm, matched) - price * min(arm, proposed)
            sums[index] = sums[index] * keep + reward
            weights[index] = weights[index] * keep + 1.0

    def longest(self, key: Key) -> int:
        """The arm that pays best, the longest of those that pay equally; untried ones count as the
        arm before."""
        sums, weights = self._sums.get(key), self._weights.get(key)
        if sums is None or weights is None:
            return self._arms[-1]
        best, most, value = self._arms[-1], float("-inf"), 0.0
        for arm, total, weight in zip(self._arms, sums, weights, strict=True):
            if weight > 0:
                value = total / (weight + _BENEFIT_OF_DOUBT)
            if value >= most - 0.02:
                best, most = arm, max(most, value)
        return best
