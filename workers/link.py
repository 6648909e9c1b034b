"""The worker's end of the ZeroMQ connection to the broker, on a thread of its own.

A forward may hold the engine's thread for long; this one goes on sending heartbeats meanwhile, so
that a busy worker never looks dead. The engine's thread meets it at two queues only: `inbox` and
`send`.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import zmq

from mirror_sd import telemetry
from mirror_sd.errors import ProtocolError
from mirror_sd.messages import (
    AnyMessage,
    Cancel,
    Chunk,
    DraftHint,
    Drain,
    Failed,
    Finished,
    FromWorker,
    Heartbeat,
    Register,
    Reset,
    Submit,
    Welcome,
    decode,
    encode,
    encode_outputs,
)

_log = logging.getLogger(__name__)

# As a plain number: an operator of an enum runs Python code.
_POLLIN = int(zmq.POLLIN)

_HIGH_WATER = 10_000
# Outputs that are joined: a step's, or what gathered while the broker took nothing.
_JOIN_LIMIT = 256
_INBOX_LIMIT = 4_096
_POLL_LIMIT = 256
_LINGER_MS = 500


@dataclass(frozen=True, slots=True)
class Lost:
    """In the inbox: the connection's thread has ended with an error; the worker cannot go on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """In the inbox: a signal asks the worker to drain and end."""


Inbound = Submit | DraftHint | Cancel | Reset | Drain | Stop | Lost
Outbound = Chunk | Finished | Failed


class Link(threading.Thread):
    """A DEALER whose identity is the worker id; registers when started.

    `load` is called on this thread for each heartbeat and must only read.
    """

    def __init__(
        self,
        endpoint: str,
        register: Register,
        heartbeat_s: float,
        load: Callable[[], Heartbeat],
    ) -> None:
        super().__init__(name="broker-link", daemon=True)
        # SimpleQueue, because a signal handler puts into it too.
        self.inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        self._endpoint = endpoint
        self._register = register
        self._heartbeat_s = heartbeat_s
        self._load = load
        self._outbox: deque[FromWorker] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        self._close_by = 0.0

    @property
    def backlog(self) -> int:
        """Frames that the broker has not taken yet."""
        return len(self._outbox)

    def send(self, messages: Sequence[Outbound]) -> None:
        """Queue frames; never blocks. The caller watches `backlog`."""
        self._outbox.extend(messages)
        self._wake()

    def forget_unsent(self) -> None:
        """Drop what the broker has not taken: it no longer knows these sequences."""
        self._outbox.clear()

    def register_again(self) -> None:
        self._outbox.append(self._register)
        self._wake()

    def beat(self) -> None:
        """Send the load now instead of at the next interval."""
        self._outbox.append(self._load())
        self._wake()

    def close(self, flush_s: float) -> None:
        """Send what is queued, for at most `flush_s`, and end the thread."""
        self._close_by = time.monotonic() + flush_s
        self._closing.set()
        self._wake()
        if self.is_alive():
            self.join(flush_s + 5.0)

    def run(self) -> None:
        try:
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                self._open(socket)
                self._move(socket)
                # The last frames are with ZeroMQ, not yet with the broker.
                socket.linger = _LINGER_MS
        except Exception as error:  # noqa: BLE001 - the engine's thread is told
            _log.exception("the connection to the broker failed")
            self.inbox.put(Lost(str(error)))

    def _open(self, socket: zmq.Socket[bytes]) -> None:
        socket.identity = self._register.worker_id.encode()
        socket.linger = 0
        socket.set_hwm(_HIGH_WATER)
        # Frames for a broker that died must not reach its successor.
        socket.immediate = True
        socket.reconnect_ivl = 50
        socket.reconnect_ivl_max = 500
        socket.connect(self._endpoint)
        self._outbox.appendleft(self._register)

    def _move(self, socket: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        next_beat = time.monotonic() + self._heartbeat_s
        while not self._is_closed():
            self._send_queued(socket)
            wanted = zmq.POLLOUT if self._outbox else 0
            if self.inbox.qsize() < _INBOX_LIMIT:
                wanted |= zmq.POLLIN
            poller.register(socket, wanted)
            wait_s = max(next_beat - time.monotonic(), 0.0)
            wait_s = min(wait_s, 0.05) if self._closing.is_set() else wait_s
            ready = dict(poller.poll(int(1e3 * wait_s) + 1))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            if ready.get(socket, 0) & _POLLIN:
                self._receive(socket)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._heartbeat_s
                self._send_beat(socket)

    def _is_closed(self) -> bool:
        if not self._closing.is_set():
            return False
        return not self._outbox or time.monotonic() >= self._close_by

    def _send_queued(self, socket: zmq.Socket[bytes]) -> None:
        with suppress(zmq.Again):
            while self._outbox:
                outputs = self._take_outputs()
                if outputs:
                    self._send_outputs(socket, outputs)
                else:
                    self._send_next(socket)

    def _take_outputs(self) -> list[Outbound]:
        """The outputs at the head of the queue; they share frames."""
        outputs: list[Outbound] = []
        # It may become empty at any moment: the engine's thread forgets what is unsent.
        with suppress(IndexError):
            while len(outputs) < _JOIN_LIMIT:
                message = self._outbox.popleft()
                if not isinstance(message, Outbound):
                    self._outbox.appendleft(message)
                    break
                outputs.append(message)
        return outputs

    def _send_outputs(self, socket: zmq.Socket[bytes], outputs: list[Outbound]) -> None:
        while outputs:
            frame, count = encode_outputs(outputs)
            try:
                socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                self._outbox.extendleft(reversed(outputs))
                raise
            outputs = outputs[count:]

    def _send_next(self, socket: zmq.Socket[bytes]) -> None:
        with suppress(IndexError):
            message = self._outbox.popleft()
            try:
                socket.send(encode(message), zmq.NOBLOCK)
            except zmq.Again:
                self._outbox.appendleft(message)
                raise

    def _send_beat(self, socket: zmq.Socket[bytes]) -> None:
        # A broker that takes nothing misses beats, which is what they are for.
        with suppress(zmq.Again):
            socket.send(encode(self._load()), zmq.NOBLOCK)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(_POLL_LIMIT):
            message = self._read(socket.recv_multipart(zmq.NOBLOCK))
            if isinstance(message, Submit | DraftHint | Cancel | Reset | Drain):
                self.inbox.put(message)
            elif isinstance(message, Welcome):
                _log.info("registered with broker %s", message.instance)
            if self.inbox.qsize() >= _INBOX_LIMIT:
                return
            # Asked, not tried: the exception of an empty socket costs more than a frame.
            if not int(socket.getsockopt(zmq.EVENTS)) & _POLLIN:
                return

    def _read(self, frames: list[bytes]) -> AnyMessage | None:
        try:
            if len(frames) != 1:
                raise ProtocolError(f"{len(frames)} parts, not one")
            return decode(frames[0])
        except ProtocolError as error:
            telemetry.BAD_FRAMES.labels("broker").inc()
            _log.warning("dropped a frame from the broker: %s", error)
            return None

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_write(self._wake_fd, 1)
