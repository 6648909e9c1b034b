"""ZeroMQ sockets with every bound set: queue lengths, frame size, linger.

Each process makes its own context, after any fork.
"""

from __future__ import annotations

from pathlib import Path

import zmq

from mirror_sd.errors import SetupError
from mirror_sd.messages import MAX_FRAME_BYTES

# Frames a peer. A worker makes one or two a step for each gateway, so whoever is deaf is given up
# for its silence long before.
HIGH_WATER_MARK = 20_000


def router(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """A bound ROUTER that reports unknown peers and takes only its own user's connections.

    Raises `SetupError` when the endpoint cannot be bound.
    """
    socket = context.socket(zmq.ROUTER)
    _bound(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # A peer that reconnects before its old connection is seen to be gone keeps its identity.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    try:
        socket.bind(endpoint)
        file = socket_file(endpoint)
        if file is not None:
            file.chmod(0o600)
    except (zmq.ZMQError, OSError) as error:
        socket.close(linger=0)
        raise SetupError(f"cannot listen on {endpoint}: {error}") from error
    return socket


def dealer(context: zmq.Context[zmq.Socket[bytes]], identity: bytes) -> zmq.Socket[bytes]:
    """A DEALER, not yet connected; once it is, it reconnects by itself."""
    socket = context.socket(zmq.DEALER)
    _bound(socket)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    return socket


def socket_file(endpoint: str) -> Path | None:
    """The file of an ipc endpoint. ZeroMQ makes it and leaves it behind."""
    scheme, _, path = endpoint.partition("://")
    return Path(path) if scheme == "ipc" else None


def _bound(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
