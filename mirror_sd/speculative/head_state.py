"""What a draft head has taken in of one sequence, and what it still has to."""

from __future__ import annotations

from dataclasses import dataclass, field

from mirror_sd.backends.protocol import Float32


@dataclass(slots=True)
class HeadState:
    """Of one sequence. The head has taken in `taken` tokens; the first of `features`, [n, F] each,
    is that of token `taken - 1`, with which token `taken` goes in."""

    taken: int
    features: list[Float32] = field(default_factory=list)
    pending: int = 0

    def add(self, rows: Float32) -> None:
        self.features.append(rows)
        self.pending += len(rows)
