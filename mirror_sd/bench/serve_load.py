"""Clients that stream chats from a running stack and disturb it as little as they can.

While a run lasts a client only reads, notes the time and looks for the end; what it read is taken
apart afterwards. One thread waits for all connections: a task and a parser for each would take
more of a core than the gateways do.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mirror_sd.bench.options import authorization
from mirror_sd.bench.prompts import Messages
from mirror_sd.bench.token_times import Answer
from mirror_sd.errors import InternalError, SetupError

_END = b"\r\n0\r\n\r\n"
_SILENCE_S = 120.0
_READ_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Reply:
    """One streamed answer. `event_times` are those of the events with text, seconds on
    `time.perf_counter`, as `answer`'s, where the tokens of the answer are spread evenly over them:
    an event may hold several. A stop token counts as a token, at the time of the last event."""

    answer: Answer
    event_times: tuple[float, ...]
    text: str
    completion_tokens: int


@dataclass(slots=True)
class _Exchange:
    """A request under way: what came, and when."""

    index: int
    start: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    tail: bytes = b""

    def add(self, now: float, piece: bytes) -> bool:
        """Keep what was read; whether it is the end."""
        self.pieces.append((now, piece))
        self.tail = (self.tail + piece)[-len(_END) :]
        return self.tail == _END


class LoadGenerator:
    """Holds `clients` connections to 127.0.0.1:`port` open; use it as a context.

    Raises `SetupError` where nothing listens there.
    """

    def __init__(self, port: int, clients: int) -> None:
        self._port = port
        self._headers = "".join(f"{k}: {v}\r\n" for k, v in authorization().items())
        self._sockets: dict[int, socket.socket] = {}
        self._epoll = select.epoll()
        try:
            for _ in range(clients):
                connection = socket.create_connection(("127.0.0.1", port), timeout=10)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets[connection.fileno()] = connection
                self._epoll.register(connection.fileno(), select.EPOLLIN)
        except OSError as error:
            self.__exit__()
            raise SetupError(f"no stack answers on port {port}: {error.strerror}") from error

    def __enter__(self) -> LoadGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._sockets.values():
            connection.close()
        self._epoll.close()

    def run(self, bodies: Sequence[bytes]) -> list[Reply]:
        """The replies to chat requests, in their order; a next one starts when one ends.

        Raises `InternalError` on any answer but a whole stream.
        """
        done: list[_Exchange] = []
        waiting = list(enumerate(bodies))[::-1]
        running: dict[int, _Exchange] = {}
        for number in self._sockets:
            if waiting:
                running[number] = self._send(number, *waiting.pop())
        buffer = bytearray(_READ_BYTES)
        view = memoryview(buffer)
        while running:
            ready = self._epoll.poll(_SILENCE_S)
            if not ready:
                raise InternalError(f"the server was silent for {_SILENCE_S:.0f} s")
            for number, _ in ready:
                count = self._sockets[number].recv_into(buffer)
                now = time.perf_counter()
                exchange = running.get(number)
                if exchange is None or count == 0:
                    raise InternalError("the server closed a connection")
                if exchange.add(now, bytes(view[:count])):
                    done.append(running.pop(number))
                    if waiting:
                        running[number] = self._send(number, *waiting.pop())
                elif len(exchange.pieces) == 1:
                    _check_status(exchange)
        return [read_reply(e.start, e.pieces) for e in sorted(done, key=lambda e: e.index)]

    def _send(self, number: int, index: int, body: bytes) -> _Exchange:
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\n"
            f"{self._headers}Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        exchange = _Exchange(index, time.perf_counter())
        self._sockets[number].sendall(head.encode() + body)
        return exchange


def chat_body(model: str, messages: Messages, *, max_tokens: int, speculation: bool) -> bytes:
    """The body of a greedy, streamed chat request that tells its usage at the end."""
    return json.dumps(
        {
            "model": model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculation": "auto" if speculation else "off",
        }
    ).encode()


def read_reply(start: float, pieces: Sequence[tuple[float, bytes]]) -> Reply:
    """Take apart the response to a request sent at `start`: `pieces` as read, with their times.

    Raises `InternalError` where it is not a complete stream.
    """
    texts: list[str] = []
    times: list[float] = []
    usage: dict[str, Any] = {}
    reason = None
    last_at = start
    for at, event in _events(pieces):
        if event == b"[DONE]":
            break
        body = json.loads(event)
        if "error" in body:
            raise InternalError(f"a stream ended with {body['error']}")
        usage = body.get("usage") or usage
        for choice in body["choices"]:
            last_at = at
            reason = choice["finish_reason"] or reason
            if choice["delta"].get("content"):
                texts.append(choice["delta"]["content"])
                times.append(at)
    else:
        raise InternalError("a stream ended without [DONE]")
    tokens = int(usage["completion_tokens"])
    moments = _spread(times, tokens) + ([last_at] if reason == "stop" or not times else [])
    return Reply(Answer(start, tuple(moments)), tuple(times), "".join(texts), tokens)


def _events(pieces: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """The data of each event with the time at which its end was read."""
    stream = b"".join(piece for _, piece in pieces)
    head, _, _ = stream.partition(b"\r\n\r\n")
    ends: list[tuple[int, float]] = []
    position = 0
    for at, piece in pieces:
        position += len(piece)
        ends.append((position, at))
    found: list[tuple[float, bytes]] = []
    data = b""
    position = len(head) + 4
    arrived = iter(ends)
    end, at = next(arrived)
    while True:
        line_end = stream.index(b"\r\n", position)
        size = int(stream[position:line_end], 16)
        if size == 0:
            return found
        position = line_end + 2 + size + 2
        data += stream[line_end + 2 : position - 2]
        while end < position - 2:
            end, at = next(arrived)
        *whole, data = data.split(b"\n\n")
        found += [(at, event.removeprefix(b"data: ")) for event in whole]


def _spread(times: Sequence[float], tokens: int) -> list[float]:
    """`tokens` moments, as many at each of `times` as make an even share."""
    return [times[index * len(times) // tokens] for index in range(tokens)] if times else []


def _check_status(exchange: _Exchange) -> None:
    first = exchange.pieces[0][1]
    if not first.startswith(b"HTTP/1.1 200 "):
        raise InternalError(f"the server answered {first[:600].decode(errors='replace')!r}")
