"""When asking the sources for proposals is worth the time that it takes.

With many sequences a proposal is rarely worth its rows, and the asking alone would cost a percent.
Then only some sequences, the scouts, are asked now and then, until what they bring pays again.
"""

from __future__ import annotations

from mirror_sd.speculative.chooser import Purse

_SCOUTS_OF = 4
# Below this many sequences all are asked always, and from the next on only scouts to begin with.
_FEW, _MANY = 4, 8
_SHARE, _MOST_S = 0.003, 0.005
_GAIN = 0.01
_GUESS_S = 1e-5


class Asking:
    """Learned by the number of sequences, in powers of two."""

    def __init__(self) -> None:
        self._worth: dict[int, float] = {}
        self._seconds = _GUESS_S
        self._purse = Purse(_SHARE, _MOST_S)

    def who(self, sequences: int, rate: float, step_s: float) -> int:
        """1: ask all; n > 1: the n-th part of them; 0: none in this step. A second is worth `rate`
        tokens; the step is expected to take `step_s`."""
        if sequences < _FEW or self._pays(sequences, rate):
            return 1
        self._purse.save(step_s)
        return _SCOUTS_OF if self._purse.spend(self._seconds * sequences / _SCOUTS_OF) else 0

    def _pays(self, sequences: int, rate: float) -> bool:
        return self._known_worth(sequences) > rate * self._seconds

    def _known_worth(self, sequences: int) -> float:
        return self._worth.get(sequences.bit_length(), 1.0 if sequences < _MANY else 0.0)

    def observe(self, sequences: int, asked: int, gain: float, seconds: float) -> None:
        """`asked` of the sequences were, in all for `seconds`, and brought `gain` tokens more than
        their rows were worth."""
        key = sequences.bit_length()
        before = self._known_worth(sequences)
        weight = min(_GAIN * asked, 0.1)
        self._worth[key] = before + weight * (gain / asked - before)
        self._seconds += 0.05 * (min(seconds / asked, 1e-3) - self._seconds)
