"""Where drafts come from. A drafter registers by name; the decode loop knows only the protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mirror_sd.config import SpeculationConfig


class DraftSource(Protocol):
    """The drafts of one sequence."""

    def propose(self, limit: int) -> list[int]:
        """At most `limit` tokens that may follow what was committed; none if it has no idea."""
        ...

    def commit(self, tokens: Sequence[int]) -> None:
        """The target's next tokens."""
        ...


class Drafter(Protocol):
    """One per engine; makes the source of each sequence."""

    def open(self, tokens: Sequence[int]) -> DraftSource: ...


def _lookup(config: SpeculationConfig) -> Drafter:
    from mirror_sd.speculative.drafters.lookup import LookupDrafter

    return LookupDrafter(ngram_min=config.ngram_min, ngram_max=config.ngram_max)


_REGISTRY: dict[str, Callable[[SpeculationConfig], Drafter]] = {"lookup": _lookup}


def create(config: SpeculationConfig) -> Drafter:
    """The drafter that the configuration names."""
    return _REGISTRY[config.drafter](config)
