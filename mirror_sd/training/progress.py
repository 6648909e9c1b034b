"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_LINE_EVERY_S = 15.0
Advance = Callable[[int, str], None]


class Reporter:
    """Writes to standard error, so that the report on standard output stays clean."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console(stderr=True)
        self._clock = clock

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Advance]:
        """Gives a function of (done since the last call, what to show beside it)."""
        if not self._console.is_terminal:
            yield self._lines(name, total)
            return
        columns = (
            TextColumn("{task.description:>20}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(name, total=total, note="")

            def advance(done: int, note: str = "") -> None:
                progress.update(task, advance=done)
                if note:
                    progress.update(task, note=note)

            yield advance

    def _lines(self, name: str, total: int) -> Advance:
        begin = shown = self._clock()
        finished = 0

        def advance(done: int, note: str = "") -> None:
            nonlocal finished, shown
            finished += done
            now = self._clock()
            if now - shown >= _LINE_EVERY_S or finished == total:
                shown = now
                self.say(f"{name}: {finished}/{total} after {now - begin:.0f} s {note}".rstrip())

        return advance
