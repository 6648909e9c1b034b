"""Noticing that the HTTP client has left while nothing is being sent to it.

A response that writes finds out by itself. One that waits, for a queue or for the end of an answer
that is not streamed, has to listen for the ASGI event (falcon#2015).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Receive = Callable[[], Awaitable[Mapping[str, Any]]]

# Most short answers are complete before a listener, a task of its own, would be worth its cost.
_GRACE_S = 0.02


class ClientWatch:
    """Calls `on_gone` once when the client disconnects. For use after the body was read: only one
    party at a time may receive."""

    def __init__(self, receive: Receive, on_gone: Callable[[], None]) -> None:
        self._receive = receive
        self._on_gone = on_gone
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to listen, in a moment."""
        self._timer = asyncio.get_running_loop().call_later(_GRACE_S, self._begin)

    async def stop(self) -> None:
        """Stop listening."""
        if self._timer is not None:
            self._timer.cancel()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._listen(), name="client watch")

    async def _listen(self) -> None:
        while True:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                self._on_gone()
                return
