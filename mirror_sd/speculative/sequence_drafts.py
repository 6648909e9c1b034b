"""The sources that one sequence can be drafted from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mirror_sd.speculative.drafters import Drafter, DraftSource
from mirror_sd.speculative.drafters.hint import HintSource


class SequenceDrafts:
    """Opens the sources when they are first asked and tells them what was committed since they were
    asked last, so that a sequence that is never drafted for costs nothing.

    `tokens`: the sequence's own list, which grows; `prompt_length` of them are its prompt.
    """

    def __init__(
        self, drafters: Mapping[str, Drafter], tokens: list[int], *, tenant: str, prompt_length: int
    ) -> None:
        self._drafters = drafters
        self._tokens = tokens
        self._tenant = tenant
        self._prompt_length = prompt_length
        self._opened: dict[str, DraftSource] = {}
        self._hint: HintSource | None = None
        # Tokens that the opened sources and the hint have been told of.
        self._seen = self._hint_seen = 0

    def sources(self) -> list[DraftSource]:
        """All sources, up to date, the hint first."""
        if not self._opened and self._drafters:
            self._open()
        length = len(self._tokens)
        if self._seen < length:
            fresh = self._tokens[self._seen :]
            for source in self._opened.values():
                source.commit(fresh)
            self._seen = length
        if self._hint is None:
            return list(self._opened.values())
        self._tell_hint(self._hint)
        return [self._hint, *self._opened.values()]

    def _open(self) -> None:
        for name, drafter in self._drafters.items():
            self._opened[name] = drafter.open(
                self._tokens, tenant=self._tenant, prompt_length=self._prompt_length
            )
        self._seen = len(self._tokens)

    def _tell_hint(self, hint: HintSource) -> None:
        if self._hint_seen < len(self._tokens):
            hint.commit(self._tokens[self._hint_seen :])
            self._hint_seen = len(self._tokens)

    def hint(self, index: int, tokens: Sequence[int], limit: int) -> bool:
        """Draft from another answer as well, see `HintSource.extend`; whether it is the first."""
        is_first = self._hint is None
        if self._hint is None:
            self._hint = HintSource(self._tokens[self._prompt_length :], limit)
            self._hint_seen = len(self._tokens)
        self._tell_hint(self._hint)
        self._hint.extend(index, tokens)
        return is_first

    def close(self) -> None:
        """The sequence has ended."""
        for name, drafter in self._drafters.items():
            drafter.close(self._opened.get(name), self._tokens, tenant=self._tenant)
