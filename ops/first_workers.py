"""Which classes still wait for their first worker. Pure: the clock is given."""

from __future__ import annotations

from collections.abc import Mapping

from ops.readings import ClassReading

# To load a large model from a cold disk can take most of it.
_GRACE_S = 60.0


class FirstWorkers:
    """A start is no failure: until a class has had a worker it is given a minute, once."""

    def __init__(self) -> None:
        self._seen_at: dict[str, float] = {}
        self._had_one: set[str] = set()

    def awaited(self, now: float, classes: Mapping[str, ClassReading]) -> set[str]:
        """Classes that have had no worker yet, in their first minute; `now` is monotonic, in
        seconds."""
        for name, item in classes.items():
            self._seen_at.setdefault(name, now)
            if item.workers > 0:
                self._had_one.add(name)
        return {
            name
            for name in classes
            if name not in self._had_one and now - self._seen_at[name] < _GRACE_S
        }
