"""How likely the tokens of a draft are to be accepted, learned from what the target chose.

A chance is that of token `depth` of a draft, given that those before it were accepted. It is kept
by source, strength of the proposal, level of the sequence (how its drafts fared lately) and depth,
each count fading; one seen rarely leans on the count over all levels, that on the token before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from mirror_sd.speculative.drafters import STRENGTHS

# Observations after which an old one weighs 1/e.
_HORIZON = 150.0
# Weight of what a cell leans on, in observations.
_LEAN = 3.0
# Rounds after which a sequence's own record says more than its kind does.
_KNOWN_AFTER = 3
_LEVEL_BOUNDS = (0.3, 0.55, 0.8)
UNKNOWN_LEVEL, UNKNOWN_SAMPLED_LEVEL = 4, 5
_DEPTHS = (0, 1, 2, 3, 4, 4, 6, 6, 8, 8, 8, 8, 12, 12, 12, 12, *([16] * 16))
# Observations after which chances computed before are computed anew.
_STALE_AFTER = 16

# By strength; measured on support chat, docs/decisions/0015-history.md.
_FIRST_GUESSES = {
    "lookup": (0.22, 0.54, 0.68, 0.79, 0.89, 0.94, 0.97, 0.99),
    "history": (0.25, 0.40, 0.49, 0.62, 0.73, 0.85, 0.94, 0.98),
    "hint": (0.55, 0.74, 0.88, 0.89, 0.94, 0.96, 0.98, 0.99),
    "remote": (0.50, 0.65, 0.75, 0.85, 0.92, 0.96, 0.98, 0.99),
}

Context = tuple[str, int, int]


def first_guess(source: str, strength: int) -> float:
    """Before anything is known; the head's strength is its own probability."""
    if source == "head":
        return (strength + 0.5) / STRENGTHS
    if source == "reach":
        return 0.55
    guesses = _FIRST_GUESSES.get(source)
    return 0.5 if guesses is None else guesses[strength]


class _Tally:
    __slots__ = ("hits", "total")

    def __init__(self) -> None:
        self.hits = 0.0
        self.total = 0.0

    def observe(self, accepted: bool) -> None:
        keep = 1.0 - 1.0 / _HORIZON
        self.hits = self.hits * keep + accepted
        self.total = self.total * keep + 1.0

    def estimate(self, otherwise: float) -> float:
        return (self.hits + _LEAN * otherwise) / (self.total + _LEAN)


class Record:
    """How the drafts of one source fared in one sequence lately."""

    __slots__ = ("_count", "_rate", "_unknown")

    def __init__(self, *, is_sampled: bool) -> None:
        self._unknown = UNKNOWN_SAMPLED_LEVEL if is_sampled else UNKNOWN_LEVEL
        self._rate = 0.0
        self._count = 0

    def observe(self, accepted: bool) -> None:
        self._count += 1
        self._rate += (accepted - self._rate) / min(self._count, 10)

    @property
    def level(self) -> int:
        if self._count < _KNOWN_AFTER:
            return self._unknown
        return sum(self._rate >= bound for bound in _LEVEL_BOUNDS)


class AcceptanceModel:
    """One per engine: what is learned of one request serves the next."""

    def __init__(self) -> None:
        self._own: defaultdict[tuple[Context, int], _Tally] = defaultdict(_Tally)
        self._kind: defaultdict[tuple[str, int, int], _Tally] = defaultdict(_Tally)
        self._survival: dict[Context, list[float]] = {}
        self._observed = 0

    def observe(self, context: Context, depth: int, accepted: bool) -> None:
        """Token `depth` of a draft was, or was not, the target's; those before it were."""
        bucket = _DEPTHS[min(depth, len(_DEPTHS) - 1)]
        source, strength, _ = context
        self._own[context, bucket].observe(accepted)
        self._kind[source, strength, bucket].observe(accepted)
        self._observed += 1
        if self._observed % _STALE_AFTER == 0:
            self._survival.clear()

    def chance(self, context: Context, depth: int, otherwise: float) -> float:
        """Of token `depth`, given those before it; `otherwise` where nothing is known."""
        bucket = _DEPTHS[min(depth, len(_DEPTHS) - 1)]
        source, strength, _ = context
        kind = self._kind.get((source, strength, bucket))
        expected = otherwise if kind is None else kind.estimate(otherwise)
        own = self._own.get((context, bucket))
        return expected if own is None else own.estimate(expected)

    def survival(self, context: Context) -> list[float]:
        """[32] chance that token j and all before it are accepted. Not to be changed."""
        known = self._survival.get(context)
        if known is None:
            chance = first_guess(context[0], context[1])
            product, known = 1.0, []
            for depth in range(len(_DEPTHS)):
                chance = self.chance(context, depth, chance)
                product *= chance
                known.append(product)
            self._survival[context] = known
        return known

    def along(self, contexts: Sequence[Context]) -> list[float]:
        """As `survival`, where each token has a context of its own; one stands for all. Not to be
        changed."""
        if len(contexts) == 1:
            return self.survival(contexts[0])
        product, found = 1.0, []
        for depth, context in enumerate(contexts):
            product *= self.chance(context, depth, first_guess(context[0], context[1]))
            found.append(product)
        return found
