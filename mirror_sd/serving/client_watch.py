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


class ClientWatch:
    """Calls `on_gone` once when the client disconnects. For use after the body was read: only one
    party at a time may receive."""

    def __init__(self, receive: Receive, on_gone: Callable[[], None]) -> None:
        self._receive = receive
        self._on_gone = on_gone
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to listen."""
        self._task = asyncio.create_task(self._listen(), name="client watch")

    async def stop(self) -> None:
        """Stop listening."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _listen(self) -> None:
        while True:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                self._on_gone()
                return
