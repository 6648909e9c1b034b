"""What a step drafted, and what it goes by."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftReport:
    """What a step drafted. `by_source`: drafted and accepted tokens."""

    seconds: float = 0.0
    repetitions: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    by_source: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Market:
    """Of one step: `sequences` decode, in a forward of `base` rows without drafts; what a second
    and a row are worth, in tokens."""

    sequences: int
    base: int
    rate: float
    price: float
