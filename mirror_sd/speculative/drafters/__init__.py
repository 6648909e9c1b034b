"""Where drafts come from. A drafter registers by name; the decode loop knows only the protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from mirror_sd.config_speculation import SpeculationConfig

STRENGTHS = 8


class DraftSource(Protocol):
    """The drafts of one sequence."""

    @property
    def name(self) -> str:
        """Of the kind: lookup, history, hint, head or remote."""
        ...

    def propose(self, limit: int) -> list[int]:
        """At most `limit` tokens that may follow what was committed; none if it has no idea."""
        ...

    def strengths(self) -> list[int]:
        """Of each token of the proposal made last, or one for all, 0 .. STRENGTHS - 1: how much
        speaks for it, as the length of the n-gram that matched. How often each strength is right is
        learned, so any order will do."""
        ...

    def commit(self, tokens: Sequence[int]) -> None:
        """The target's next tokens."""
        ...


class Drafter(Protocol):
    """One per engine; makes the source of each sequence."""

    @property
    def nbytes(self) -> int:
        """Memory of what outlives the sequences it came from. Read after each step."""
        ...

    def open(self, tokens: Sequence[int], *, tenant: str, prompt_length: int) -> DraftSource:
        """For a sequence that has `tokens`, the first `prompt_length` of them its prompt. Called
        when it is first asked for a draft, which may be never; `tokens` are not to be changed."""
        ...

    def close(
        self,
        source: DraftSource | None,
        tokens: Sequence[int],
        *,
        tenant: str,
        prompt_length: int,
    ) -> None:
        """A sequence of that tenant ended with `tokens`, prompt included; `source` is None if it
        was never opened. `commit` may not have told it the last of them."""
        ...


def _lookup(config: SpeculationConfig) -> Drafter:
    from mirror_sd.speculative.drafters.lookup import LookupDrafter

    return LookupDrafter(ngram_min=config.ngram_min, ngram_max=config.ngram_max)


def _history(config: SpeculationConfig) -> Drafter:
    from mirror_sd.speculative.drafters.history import HistoryDrafter

    return HistoryDrafter(tokens=config.history_tokens, tenants=config.history_tenants)


_REGISTRY: dict[str, Callable[[SpeculationConfig], Drafter]] = {
    "lookup": _lookup,
    "history": _history,
}


def create(
    config: SpeculationConfig, *, has_head: bool = True, has_remote: bool = True
) -> Mapping[str, Drafter]:
    """The drafters that the configuration names, by name; all of them for auto, and in place of a
    head or of drafters on other devices that are not there."""
    absent = {"head": not has_head, "remote": not has_remote}
    takes_all = config.drafter == "auto" or absent.get(config.drafter, False)
    names = [name for name in _REGISTRY if takes_all or config.drafter == name]
    if config.history_tokens == 0:
        names = [name for name in names if name != "history"]
    return {name: _REGISTRY[name](config) for name in names}
