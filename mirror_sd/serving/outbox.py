"""Frames that the broker is about to send, in order."""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple

from mirror_sd import messages
from mirror_sd.errors import MirrorError
from mirror_sd.messages import AnyMessage, Failed

Side = Literal["gateway", "worker"]


class Outgoing(NamedTuple):
    side: Side
    identity: bytes
    frame: bytes


class Outbox:
    """Emptied by the loop after each turn, so it holds what one turn made."""

    def __init__(self) -> None:
        self._frames: deque[Outgoing] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    def pop(self) -> Outgoing:
        return self._frames.popleft()

    def post(self, side: Side, identity: bytes, frame: bytes) -> None:
        self._frames.append(Outgoing(side, identity, frame))

    def send(self, side: Side, identity: bytes, message: AnyMessage) -> None:
        self.post(side, identity, messages.encode(message))

    def fail(
        self,
        gateway: bytes,
        request_id: str,
        error: MirrorError,
        *,
        is_retryable: bool = False,
        is_displaced: bool = False,
    ) -> None:
        """Tell a gateway that its request ended with `error`."""
        failed = Failed(
            request_id=request_id,
            code=error.code or "internal_error",
            message=error.message,
            param=error.param,
            retry_after_s=error.retry_after_s,
            retryable=is_retryable,
            displaced=is_displaced,
        )
        self.send("gateway", gateway, failed)
