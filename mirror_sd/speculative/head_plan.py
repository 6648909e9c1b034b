"""Whether calling the draft head is worth its time, for the sequences of a step or a new one."""

from __future__ import annotations

from collections.abc import Sequence

from mirror_sd.speculative.acceptance import UNKNOWN_LEVEL, AcceptanceModel
from mirror_sd.speculative.cost_model import MOST_ROWS, PassCost, VerifyCost

# The pseudo-source whose chances are those that the head drafts on and is right.
_REACH = "reach"
_GUESS_S = 3e-4
_LEAST_FLOOR, _MOST_FLOOR = 0.02, 0.9
# Sequences up to which a head is opened before anything was measured.
_FEW = 4


class HeadPlan:
    """Chances come from `model`, which is shared with the other sources."""

    def __init__(self, model: AcceptanceModel) -> None:
        self._model = model
        self._passes = PassCost(_GUESS_S)
        # Prospects of this step, in which rate and price are the same for all.
        self._rates = (0.0, 0.0)
        self._known: dict[tuple[int, int, int], tuple[float, int]] = {}

    def measure_pass(self, seconds: float) -> None:
        """Of one sequence, before the first request."""
        self._passes.measure(1, seconds)

    def observe_call(self, sequences: int, passes: int, seconds: float) -> None:
        """What a call took; it drafted for `sequences`."""
        self._passes.observe(sequences, passes, seconds)

    def observe_draft(self, level: int, drafted: int, matched: int, was_full: bool) -> None:
        """`matched` of `drafted` tokens were the target's; `was_full`: it could draft no more."""
        context = (_REACH, 0, level)
        for depth in range(matched):
            self._model.observe(context, depth, True)
        if matched < drafted or not was_full:
            self._model.observe(context, matched, False)

    def share_s(self, sequences: int) -> float:
        """Seconds of a pass for each of the sequences in it."""
        return self._passes.seconds(sequences) / sequences

    def floor(self, sequences: int, rate: float, price: float) -> float:
        """Chance below which a drafted token is not worth its pass and its row."""
        cost = rate * self.share_s(sequences) + price
        return min(max(cost, _LEAST_FLOOR), _MOST_FLOOR)

    def prospect(
        self, level: int, limit: int, sequences: int, rate: float, price: float
    ) -> tuple[float, int]:
        """(tokens expected of one sequence's drafts, less what their time is worth; the steps after
        which a further pass is not worth its time)."""
        key = (level, limit, sequences)
        if self._rates != (rate, price):
            self._rates = (rate, price)
            self._known.clear()
        elif key in self._known:
            return self._known[key]
        pass_s = rate * self._passes.seconds(sequences)
        reached, total = 1.0, -pass_s / sequences
        most, steps = total, 1
        for depth, chance in enumerate(self._reach(level)[:limit], start=1):
            # A pass is made as long as any of the sequences goes on.
            total += chance - reached * price - pass_s * min(1.0 / sequences, reached)
            if total > most:
                most, steps = total, depth
            reached = chance
        self._known[key] = (most, steps)
        return most, steps

    def _reach(self, level: int) -> Sequence[float]:
        return self._model.survival((_REACH, 0, level))

    def pays(self, sequences: int, limit: int, cost: VerifyCost, rate: float) -> bool:
        """Whether a head for each of so many sequences is worth it, as far as is known."""
        if not cost.is_known:
            return sequences <= _FEW
        table, base = cost.table(), min(sequences, MOST_ROWS)
        share = self._passes.seconds(sequences)
        passes, rows, reached, expected = 1.0, 0.0, 1.0, 0.0
        for chance in self._reach(UNKNOWN_LEVEL)[:limit]:
            expected += sequences * chance
            passes += min(1.0, sequences * reached)
            rows += sequences * reached
            reached = chance
            total = min(base + round(rows), MOST_ROWS)
            if expected > rate * (table[total] - table[base] + passes * share):
                return True
        return False
