"""The gateway's connection to the broker: one DEALER, beats, and knowledge of its state.

Knows frames and connections, nothing of requests: those are `broker_client`'s. The sockets are
plain ones, watched by the event loop through their file descriptors: a future for each frame
(zmq.asyncio) costs more than everything else that is done with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from mirror_sd import messages
from mirror_sd.config import BrokerConfig
from mirror_sd.errors import ProtocolError
from mirror_sd.messages import AnyMessage, FromGateway, Ping
from mirror_sd.serving import endpoint

_log = logging.getLogger(__name__)

# As plain numbers: an operator of an enum runs Python code, and these run for every frame.
_POLLIN = int(zmq.POLLIN)
_EVENTS = int(zmq.EVENTS)
_NOBLOCK = int(zmq.NOBLOCK)

# Frames taken before other tasks get their turn.
_TURN = 256
_GOODBYE_MS = 200


class BrokerLink:
    """`on_message` gets each message, `on_lost` is called when the connection breaks.

    `name` names the gateway; the process adds what makes the identity unique, so that one that is
    started again is never taken for the one before.
    """

    def __init__(
        self,
        address: str,
        name: str,
        config: BrokerConfig,
        *,
        on_message: Callable[[AnyMessage], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._address = address
        self._name = name
        self._on_message = on_message
        self._on_lost = on_lost
        self._beat_s = config.heartbeat_ms / 1e3
        self.patience_s = self._beat_s * config.missed_heartbeats
        self.connected = asyncio.Event()
        self._unsent: deque[bytes] = deque()
        self._will_flush = False
        self._beats: asyncio.Task[None] | None = None
        self._heard_at: float | None = None

    @property
    def is_started(self) -> bool:
        return self._beats is not None

    @property
    def is_alive(self) -> bool:
        """Whether it is connected and the broker was heard within its missed heartbeats."""
        return self._heard_at is not None and time.monotonic() - self._heard_at <= self.patience_s

    def start(self) -> None:
        """Connect in the background, in the running loop; the broker need not be there."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        identity = f"{self._name}-{os.getpid()}-{secrets.token_hex(4)}"
        self._socket = endpoint.dealer(self._context, identity.encode())
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        # After the monitor: a broker that is up already shakes hands faster than it is set up.
        self._socket.connect(self._address)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(_fd(self._socket), self._receive)
        self._loop.add_reader(_fd(self._monitor), self._watch_connection)
        self._beats = asyncio.create_task(self._beat(), name="broker link: beat")
        self._beats.add_done_callback(_report_death)
        # What came before they were watched gives no further sign.
        self._loop.call_soon(self._receive)
        self._loop.call_soon(self._watch_connection)

    async def close(self) -> None:
        """Send what is waiting to be sent, briefly, and free the socket."""
        if self._beats is None:
            return
        self._flush()
        beats, self._beats = self._beats, None
        beats.cancel()
        await asyncio.gather(beats, return_exceptions=True)
        for socket in (self._socket, self._monitor):
            self._loop.remove_reader(_fd(socket))
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_GOODBYE_MS)
        self._context.term()

    def send(self, message: FromGateway) -> None:
        """Never blocks. While there is no connection, or the broker reads nothing and the queue
        is full, the frame waits here."""
        self._unsent.append(messages.encode(message))
        # Together with what else is sent in this turn of the loop: the first wakes ZeroMQ's
        # thread, which costs more than all else about a frame.
        if not self._will_flush:
            self._will_flush = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._will_flush = False
        if self._beats is None:
            return
        # In order: a cancel must not overtake its submit.
        with suppress(zmq.Again):
            while self._unsent and self.connected.is_set():
                self._socket.send(self._unsent[0], _NOBLOCK)
                self._unsent.popleft()
        # Sending may take away the sign that something has come.
        if _has_input(self._socket):
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        if self._beats is None:
            return
        is_empty = False
        try:
            for _ in range(_TURN):
                is_empty = not _has_input(self._socket)
                if is_empty:
                    return
                self._handle(self._socket.recv(_NOBLOCK))
        finally:
            # ZeroMQ gives a sign when something comes, not while something is there.
            if not is_empty:
                self._loop.call_soon(self._receive)

    def _handle(self, frame: bytes) -> None:
        try:
            message = messages.decode(frame)
        except ProtocolError as error:
            # A chunk that is lost here shows as a gap, and is asked for again.
            _log.error("frame from the broker dropped: %s", error)
            return
        self._heard_at = time.monotonic()
        self._on_message(message)

    async def _beat(self) -> None:
        while True:
            self._ping()
            await asyncio.sleep(self._beat_s)

    def _ping(self) -> None:
        # What could not be sent goes first; another ping would only make the queue longer.
        self._flush()
        if self.connected.is_set() and not self._unsent:
            self.send(Ping(role="gateway", pid=os.getpid()))

    def _watch_connection(self) -> None:
        while self._beats is not None and _has_input(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                _log.warning("connection to the broker lost")
                self.connected.clear()
                self._heard_at = None
                self._on_lost()
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected.set()
                self._ping()


def _fd(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _has_input(socket: zmq.Socket[bytes]) -> bool:
    # Asked, not tried: the exception of an empty socket costs more than a frame.
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


def _report_death(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.critical("%s ended", task.get_name(), exc_info=task.exception())
