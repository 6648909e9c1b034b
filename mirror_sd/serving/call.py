"""One request of a gateway on its way through the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mirror_sd.errors import MirrorError
from mirror_sd.messages import Chunk, Finished, Submit
from mirror_sd.serving.delivery import Delivery

Event = Chunk | Finished | MirrorError


class Call:
    """`on_event` gets what happens, in order, a `Finished` or an error last.

    `failures` counts lost attempts since the last new token.
    """

    def __init__(self, submit: Submit, on_event: Callable[[Event], None]) -> None:
        self.delivery = Delivery(submit)
        self._on_event = on_event
        self.failures = 0
        self.is_submitted = False
        self.is_over = False
        self.deadline: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        return self.delivery.request_id

    def plan_retry(self, timer: asyncio.TimerHandle | None) -> None:
        """Replace the planned retry, if there is one."""
        if self._retry is not None:
            self._retry.cancel()
        self._retry = timer

    def progress(self, chunk: Chunk) -> None:
        self.failures = 0
        self._on_event(chunk)

    def end(self, event: Finished | MirrorError) -> None:
        """The last event; later ones are ignored."""
        if not self.is_over:
            self.abandon()
            self._on_event(event)

    def abandon(self) -> None:
        """Nothing will happen any more."""
        self.is_over = True
        self.plan_retry(None)
        if self.deadline is not None:
            self.deadline.cancel()
