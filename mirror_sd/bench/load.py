"""Requests over kept connections: at set times whatever the server does, or one after the other.

One thread waits for all connections and does little for each answer (about 0.05 ms of CPU), so that
on a machine it shares with the server it does not measure itself. An answer's latency counts from
the moment its request was due: what a late client or a full server makes it wait is in it.
"""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from mirror_sd.errors import InternalError, SetupError

_END = b"\r\n0\r\n\r\n"
_TAIL_BYTES = 2048
_READ_BYTES = 65536
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
_TEXT = re.compile(rb'"(?:content|text)":"[^"]')
_TOKENS = re.compile(rb'"completion_tokens":(\d+)')


@dataclass(frozen=True, slots=True)
class Arrival:
    """A whole HTTP request that is due `at_s` after the start; `label` is the caller's."""

    at_s: float
    payload: bytes
    label: str = ""


@dataclass(slots=True)
class Exchange:
    """A request and its answer. Times are seconds of `time.perf_counter`; `ended` stays None where
    no whole answer came, `is_broken` tells that the server closed the connection. `texts` are the
    times at which pieces of text came, and how many events were in each; `tail` is the end of the
    answer, `pieces` all of it as it was read, where the client keeps that instead of looking for
    text."""

    label: str
    due: float
    sent: float
    status: int | None = None
    ended: float | None = None
    texts: list[tuple[float, int]] = field(default_factory=list)
    tail: bytes = b""
    is_broken: bool = False
    pieces: list[tuple[float, bytes]] | None = None

    @property
    def first(self) -> float | None:
        """When the first text of a stream came."""
        return self.texts[0][0] if self.texts else None

    @property
    def tokens(self) -> int:
        """Completion tokens, as the answer's usage tells; 0 without it."""
        found = _TOKENS.findall(self.tail)
        return int(found[-1]) if found else 0

    def tokens_until(self, moment: float) -> float:
        """Those that had come by then: the answer's tokens are spread evenly over its events. Of an
        answer that has not ended each event counts as one."""
        events = sum(count for at, count in self.texts if at <= moment)
        if self.ended is None:
            return events
        if not self.texts:
            return self.tokens if self.ended <= moment else 0
        return self.tokens * events / sum(count for _, count in self.texts)


class _Connection:
    """One socket, and the exchange under way on it."""

    __slots__ = ("exchange", "head", "is_closing", "left", "socket")

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.exchange: Exchange | None = None
        self.head: bytes | None = b""
        # Bytes of the body still to come; None where it is chunked.
        self.left: int | None = None
        self.is_closing = False

    def send(self, exchange: Exchange, payload: bytes) -> None:
        self.exchange, self.head, self.left = exchange, b"", None
        self.socket.sendall(payload)

    def take(self, exchange: Exchange, piece: bytes, now: float) -> bool:
        """Look at what was read; whether the answer is complete."""
        if exchange.pieces is not None:
            exchange.pieces.append((now, piece))
        if self.head is not None:
            self.head += piece
            head, blank, piece = self.head.partition(b"\r\n\r\n")
            if not blank:
                return False
            self.head = None
            self._read_head(exchange, head)
        if self.left is not None:
            self.left -= len(piece)
            exchange.tail += piece
            return self.left <= 0
        if exchange.pieces is None and (events := len(_TEXT.findall(piece))):
            exchange.texts.append((now, events))
        exchange.tail = (exchange.tail + piece)[-_TAIL_BYTES:]
        return exchange.tail.endswith(_END)

    def _read_head(self, exchange: Exchange, head: bytes) -> None:
        exchange.status = int(head[9:12])
        length = _LENGTH.search(head)
        self.left = int(length[1]) if length else None
        self.is_closing = _CLOSES.search(head) is not None


class LoadClient:
    """Talks to 127.0.0.1:`port`; use it as a context. Connections are opened as they are needed.

    `keeps_pieces`: its exchanges have `pieces` and no `texts`, which costs less while it reads.
    """

    def __init__(self, port: int, *, keeps_pieces: bool = False) -> None:
        self._port = port
        self._keeps_pieces = keeps_pieces
        self._epoll = select.epoll()
        self._connections: dict[int, _Connection] = {}
        self._idle: list[_Connection] = []
        self._done: list[Exchange] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop_all()
        self._epoll.close()

    def run_open(self, arrivals: Sequence[Arrival], grace_s: float) -> list[Exchange]:
        """Send each at its time; in the order in which they ended, then those that have not
        `grace_s` after the last arrival, which are cut off.

        Raises `SetupError` where no connection can be opened.
        """
        self._done = []
        begin = time.perf_counter()
        deadline = begin + (arrivals[-1].at_s if arrivals else 0.0) + grace_s
        waiting = iter(arrivals)
        following = next(waiting, None)
        while (now := time.perf_counter()) < deadline:
            while following is not None and begin + following.at_s <= now:
                self._send(following.payload, following.label, begin + following.at_s)
                following = next(waiting, None)
            if following is None and not self._busy():
                break
            due = deadline if following is None else begin + following.at_s
            self._receive(max(due - time.perf_counter(), 0.0))
        cut = [c.exchange for c in self._connections.values() if c.exchange is not None]
        self._drop_all()
        return self._done + cut

    def run_closed(
        self, payloads: Iterable[bytes], connections: int, seconds: float
    ) -> list[Exchange]:
        """Keep so many requests under way, taking from endless `payloads`; ends `seconds` later,
        when those under way have ended."""
        self._done = []
        source = iter(payloads)
        end = time.perf_counter() + seconds
        for _ in range(connections):
            self._send(next(source), "", time.perf_counter())
        while self._busy():
            before = len(self._done)
            self._receive(1.0)
            now = time.perf_counter()
            if now < end:
                for _ in range(len(self._done) - before):
                    self._send(next(source), "", now)
            elif now > end + 30.0:
                break
        return self._done

    def run_all(
        self, payloads: Sequence[bytes], connections: int, silence_s: float
    ) -> list[Exchange]:
        """Answer all, so many at once; in the order of the payloads.

        Raises `SetupError` where no connection can be opened, `InternalError` where nothing comes
        for `silence_s`, or an answer is not a whole one of status 200.
        """
        self._done = []
        sent: list[Exchange] = []
        heard = time.perf_counter()
        while len(self._done) < len(payloads):
            while self._busy() < connections and len(sent) < len(payloads):
                sent.append(self._send(payloads[len(sent)], "", time.perf_counter()))
            if self._receive(1.0):
                heard = time.perf_counter()
            elif time.perf_counter() - heard > silence_s:
                raise InternalError(f"the server was silent for {silence_s:.0f} s")
            for exchange in self._done:
                if exchange.is_broken:
                    raise InternalError("the server closed a connection")
                if exchange.status != 200:
                    answer = exchange.tail[:600].decode(errors="replace")
                    raise InternalError(f"the server answered {exchange.status}: {answer!r}")
        return sent

    def _busy(self) -> int:
        return len(self._connections) - len(self._idle)

    def _send(self, payload: bytes, label: str, due: float) -> Exchange:
        connection = self._idle.pop() if self._idle else self._open()
        pieces: list[tuple[float, bytes]] | None = [] if self._keeps_pieces else None
        exchange = Exchange(label, due, time.perf_counter(), pieces=pieces)
        connection.send(exchange, payload)
        return exchange

    def _open(self) -> _Connection:
        try:
            connection = _Connection(self._port)
        except OSError as error:
            raise SetupError(f"no stack answers on port {self._port}: {error.strerror}") from error
        self._connections[connection.socket.fileno()] = connection
        self._epoll.register(connection.socket.fileno(), select.EPOLLIN)
        return connection

    def _receive(self, timeout_s: float) -> bool:
        """Read what comes in that time; whether anything did."""
        # epoll's own timeout is in whole milliseconds.
        if timeout_s > 0 and not select.select((self._epoll,), (), (), timeout_s)[0]:
            return False
        ready = self._epoll.poll(0)
        for number, _ in ready:
            self._read(number, self._connections[number])
        return bool(ready)

    def _read(self, number: int, connection: _Connection) -> None:
        piece = b""
        with suppress(OSError):
            piece = connection.socket.recv(_READ_BYTES)
        now = time.perf_counter()
        exchange = connection.exchange
        if exchange is None or not piece:
            self._drop(number)
            if exchange is not None:
                exchange.is_broken = True
                self._done.append(exchange)
        elif connection.take(exchange, piece, now):
            exchange.ended = now
            self._done.append(exchange)
            connection.exchange = None
            if connection.is_closing:
                self._drop(number)
            else:
                self._idle.append(connection)

    def _drop(self, number: int) -> None:
        connection = self._connections.pop(number)
        if connection in self._idle:
            self._idle.remove(connection)
        self._epoll.unregister(number)
        connection.socket.close()

    def _drop_all(self) -> None:
        for number in list(self._connections):
            self._drop(number)


def request(
    port: int, path: str, body: bytes, key: str | None = None, method: str = "POST"
) -> bytes:
    """A whole HTTP request with a JSON body."""
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    return (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{authorization}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def quantile(values: Sequence[float], share: float) -> float:
    """Of unsorted values, at least one: the smallest that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
