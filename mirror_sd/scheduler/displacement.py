"""Which standard request gives way to a VIP when every slot is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running standard request and the tokens that it may still make."""

    request_id: str
    tokens_left: int


class Displacement:
    # A request is not displaced again so soon after it was.
    PAUSE_S = 1.0
    # One that is about to end frees its slot sooner than another can take its place.
    FEWEST_TOKENS = 4

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._displaced_at: dict[str, float] = {}

    def choose(self, candidates: Iterable[Candidate]) -> str | None:
        """The one with most left, among equals the first; None if none may be displaced."""
        allowed = [
            candidate
            for candidate in candidates
            if candidate.tokens_left >= self.FEWEST_TOKENS
            and not self._is_recent(candidate.request_id)
        ]
        if not allowed:
            return None
        return max(allowed, key=lambda candidate: candidate.tokens_left).request_id

    def note(self, request_id: str) -> None:
        """It was displaced now."""
        now = self._clock()
        self._displaced_at = {
            name: at for name, at in self._displaced_at.items() if now - at < self.PAUSE_S
        }
        self._displaced_at[request_id] = now

    def _is_recent(self, request_id: str) -> bool:
        displaced_at = self._displaced_at.get(request_id)
        return displaced_at is not None and self._clock() - displaced_at < self.PAUSE_S
