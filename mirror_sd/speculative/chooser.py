"""Which drafts are worth their rows.

Goodput is what counts: tokens a second over all running sequences. With `rate` the tokens a second
that are had in the long run, time is worth `rate` tokens a second, and a draft is worth the tokens
expected of it less those that its time would have brought (Dinkelbach's method for a ratio). Rows
go to the likeliest tokens of all sequences first, as long as they are worth it (Liu et al.,
"Optimizing speculative decoding for serving LLMs using goodput", arXiv 2406.14066).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mirror_sd.speculative.cost_model import MOST_ROWS
from mirror_sd.speculative.trial import Trial

# Steps after which an old one weighs 1/e in the rate.
_HORIZON = 200.0
# A chance below this is not worth looking at.
_HOPELESS = 0.01
# Of so many guesses, the likeliest must be worth this much more than their time.
_MANY, _CAUTION = 12, 0.06


@dataclass(slots=True)
class Offer:
    """One draft for one sequence. `survival[j]`: chance that token j and all before are accepted,
    as far as it may be verified."""

    trial: Trial
    survival: Sequence[float]

    def worth(self, price: float) -> float:
        """Tokens expected of its best beginning, less `price` for each row."""
        total = 0.0
        for chance in self.survival:
            if chance <= price:
                break
            total += chance - price
        return total


def best(offers: Sequence[Offer], price: float) -> Offer | None:
    """The offer that is worth most, none if none is worth a row."""
    chosen, most = None, 0.0
    for offer in offers:
        worth = offer.worth(price)
        if worth > most:
            chosen, most = offer, worth
    return chosen


@dataclass(frozen=True, slots=True)
class Allotment:
    """`lengths`: rows for each offer. `gain`: tokens expected of them, less those that their time
    would have brought; below 0 where the best of all is not to draft. `price`: chance that a token
    must have to be given a row."""

    lengths: list[int]
    gain: float
    price: float


def cautious(rate: float, offers: int) -> float:
    """What to take for the rate: the likeliest of many guesses are guessed too high."""
    return rate * (1.0 + _CAUTION * min((offers - 1) / _MANY, 1.0))


def allot(
    offers: Sequence[Sequence[float]], base: int, seconds: Sequence[float], rate: float
) -> Allotment:
    """The best number of draft rows, at least one, for the likeliest tokens.

    offers: survival of each; base: rows of the forward without drafts; seconds: by rows, at least
    MOST_ROWS + 1 long; rate: tokens a second.
    """
    order = sorted(
        [(-chance, index) for index, chances in enumerate(offers) for chance in chances],
    )
    base = min(base, MOST_ROWS - 2)
    order = order[: MOST_ROWS - base - 1]
    expected, most, count = 0.0, float("-inf"), 0
    before = seconds[base]
    for rows, (chance, _) in enumerate(order, start=1):
        if -chance < _HOPELESS and count:
            break
        expected -= chance
        gain = expected - rate * (seconds[base + rows] - before)
        if gain > most:
            most, count = gain, rows
    lengths = [0] * len(offers)
    for _, index in order[:count]:
        lengths[index] += 1
    return Allotment(
        lengths,
        most,
        _price(order, count, rate * (seconds[base + count + 1] - seconds[base + count])),
    )


def _price(order: Sequence[tuple[float, int]], count: int, next_row: float) -> float:
    """Between the last token that got a row and the first that did not."""
    if not count:
        return next_row
    last = -order[count - 1][0]
    return (last - order[count][0]) / 2 if count < len(order) else min(next_row, last)


class Prices:
    """What a row was worth by the number of sequences, lately."""

    def __init__(self) -> None:
        self._prices: dict[int, float] = {}

    def observe(self, sequences: int, price: float) -> None:
        before = self._prices.get(sequences, price)
        self._prices[sequences] = before + 0.1 * (price - before)

    def price(self, sequences: int, otherwise: float) -> float:
        return self._prices.get(sequences, otherwise)


class Rates:
    """Tokens a second by the number of sequences that decode, over the last steps."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}

    def observe(self, sequences: int, tokens: int, seconds: float) -> None:
        """One step without prompt tokens."""
        had, took = self._sums.get(sequences, (0.0, 0.0))
        keep = 1.0 - 1.0 / _HORIZON
        self._sums[sequences] = (had * keep + tokens, took * keep + seconds)

    def rate(self, sequences: int, step_s: float) -> float:
        """`step_s`: expected seconds of a step without drafts, which counts as 10 steps seen."""
        had, took = self._sums.get(sequences, (0.0, 0.0))
        had, took = had + 10 * sequences, took + 10 * step_s
        return had / took if took > 0 else 0.0


class Purse:
    """Time for trying what does not seem to pay: a small share of all time, saved up."""

    def __init__(self, share: float, most_s: float) -> None:
        self._share = share
        self._most = most_s
        self._saved = 0.0

    def save(self, seconds: float) -> None:
        self._saved = min(self._saved + self._share * seconds, self._most)

    def spend(self, seconds: float) -> bool:
        """Whether there is as much; it is then gone."""
        if seconds > self._saved:
            return False
        self._saved -= max(seconds, 0.0)
        return True
