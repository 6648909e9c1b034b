"""The broker process: one loop between the gateways' ROUTER and the workers' ROUTER.

Silence of three heartbeats gives a peer up, whatever its state; three things are faster: a pidfd
tells that its process ended, a send that the ROUTER no longer knows it (EHOSTUNREACH), and that it
reads nothing (EAGAIN at the high-water mark).
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from mirror_sd import logs
from mirror_sd.child import CANNOT_START
from mirror_sd.config import Config
from mirror_sd.errors import SetupError
from mirror_sd.run_dir import RunDir, from_run_dir
from mirror_sd.serving import endpoint
from mirror_sd.serving.outbox import Side
from mirror_sd.serving.process_watch import ProcessWatch
from mirror_sd.serving.switchboard import Switchboard

_log = logging.getLogger(__name__)

# As plain numbers: an operator of an enum runs Python code, and these run for every frame.
_POLLIN = int(zmq.POLLIN)
_EVENTS = int(zmq.EVENTS)
_RCVMORE = int(zmq.RCVMORE)
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

# Frames taken from one side before the other gets its turn.
_TURN = 256
_GOODBYE_MS = 200


class Broker:
    """`open` binds the sockets, `serve` runs until stopped and drained, `close` frees all."""

    def __init__(
        self, config: Config, run_dir: RunDir, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._addresses: dict[Side, str] = {
            "gateway": run_dir.gateway_endpoint,
            "worker": run_dir.worker_endpoint,
        }
        self._clock = clock
        self._switchboard = Switchboard(config, secrets.token_hex(8), clock=clock)
        self._tick_s = config.broker.heartbeat_ms / 4e3
        self._next_tick = clock()
        self._stops_asked = 0
        self._drain_until: float | None = None

    def open(self) -> None:
        """Raises `SetupError` when an endpoint cannot be bound."""
        self._context = zmq.Context()
        self._watch = ProcessWatch()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._sockets: dict[Side, zmq.Socket[bytes]] = {}
        for side, address in self._addresses.items():
            self._sockets[side] = endpoint.router(self._context, address)
            self._poller.register(self._sockets[side], zmq.POLLIN)
        self._poller.register(self._watch, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def close(self) -> None:
        for side, socket in self._sockets.items():
            file = endpoint.socket_file(self._addresses[side])
            if file is not None:
                file.unlink(missing_ok=True)
            socket.close(linger=_GOODBYE_MS if self._drain_until is not None else 0)
        self._watch.close()
        # The eventfd stays: a late signal may still write to it.
        self._context.term()

    def serve(self) -> None:
        """Run until `stop` was called and the drain is over."""
        while not self._is_drained():
            self.run_once()
        self._switchboard.end_drain()
        self._flush()

    def run_once(self) -> None:
        """Wait for frames, a death or the next tick, and act on it."""
        next_at = min(self._next_tick, self._switchboard.due_at)
        wait_ms = max(1, math.ceil((next_at - self._clock()) * 1e3))
        ready = {source for source, _ in self._poller.poll(wait_ms)}
        for side, socket in self._sockets.items():
            if socket in ready:
                self._receive(side, socket)
        if self._watch.fileno() in ready:
            self._notice_deaths()
        if self._wake_fd in ready:
            self._begin_drain()
        self._tick_if_due()
        self._switchboard.dispatch()
        self._flush()

    def stop(self) -> None:
        """Ask for a drain; a second call ends it at once. Safe in a signal handler."""
        self._stops_asked += 1
        with suppress(BlockingIOError):
            os.eventfd_write(self._wake_fd, 1)

    def _begin_drain(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        now = self._clock()
        if self._drain_until is None:
            _log.info("draining for at most %g s", self._config.server.drain_s)
            self._drain_until = now + self._config.server.drain_s
            self._switchboard.start_drain()
        if self._stops_asked > 1:
            self._drain_until = now

    def _is_drained(self) -> bool:
        if self._drain_until is None:
            return False
        is_over = self._switchboard.is_idle and not self._switchboard.outbox
        return is_over or self._clock() >= self._drain_until

    def _receive(self, side: Side, socket: zmq.Socket[bytes]) -> None:
        board = self._switchboard
        handle = board.from_gateway if side == "gateway" else board.from_worker
        for _ in range(_TURN):
            identity = socket.recv(_NOBLOCK)
            frame = socket.recv(_NOBLOCK)
            if socket.getsockopt(_RCVMORE):
                parts = 1 + len(socket.recv_multipart(_NOBLOCK))
                board.drop_frame(side, identity, f"{parts} parts, not one")
            else:
                handle(identity, frame)
            # Asked, not tried: the exception of an empty socket costs more than a frame.
            if not int(socket.getsockopt(_EVENTS)) & _POLLIN:
                return

    def _notice_deaths(self) -> None:
        for pid in self._watch.dead():
            self._switchboard.process_died(pid)

    def _tick_if_due(self) -> None:
        now = self._clock()
        if now >= self._next_tick:
            self._next_tick = now + self._tick_s
            self._switchboard.tick()
            self._watch.watch(self._switchboard.pids())

    def _flush(self) -> None:
        # A peer found unreachable may add frames for others; it is forgotten, so this ends.
        outbox = self._switchboard.outbox
        while outbox:
            side, identity, frame = outbox.pop()
            socket = self._sockets[side]
            try:
                socket.send(identity, _NOBLOCK_MORE)
                socket.send(frame, _NOBLOCK)
            except zmq.Again:
                self._switchboard.unreachable(side, identity, "it reads nothing")
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._switchboard.unreachable(side, identity, "it is not connected")


def _run(config: Config, run_dir: RunDir) -> None:
    broker = Broker(config, run_dir)
    broker.open()
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: broker.stop())
        _log.info("broker listens on %s", run_dir.path)
        broker.serve()
    finally:
        broker.close()
    _log.info("broker stopped")


def main() -> int:
    """The process's entry: its configuration comes from the run directory."""
    try:
        logs.configure("broker")
        _run(*from_run_dir())
    except SetupError as error:
        _log.error("the broker cannot start: %s", error.message)
        return CANNOT_START
    return 0


if __name__ == "__main__":
    sys.exit(main())
