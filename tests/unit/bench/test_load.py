"""The load client: answers however they are cut, times, and servers that misbehave."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from mirror_sd.bench.load import Arrival, Exchange, LoadClient, quantile, request
from mirror_sd.errors import SetupError
from tests.unit.bench.small_server import listening

BODY = b'{"usage":{"completion_tokens":7}}'
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
EVENTS = (
    b'data: {"delta":{"content":""}}\n\n',
    b'data: {"delta":{"content":"a"}}\n\n',
    b'data: {"delta":{"content":"b"}}\n\ndata: {"delta":{"content":"c"}}\n\n',
    b'data: {"usage":{"completion_tokens":6}}\n\ndata: [DONE]\n\n',
)
STREAM = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"]
STREAM += [b"%x\r\n%s\r\n" % (len(event), event) for event in EVENTS] + [b"0\r\n\r\n"]

Answer = Callable[[socket.socket, int], None]


@contextmanager
def server(answer: Answer) -> Iterator[int]:
    """Calls `answer` with the connection and its own count for each request of each connection."""

    def serve(connection: socket.socket) -> None:
        for count in itertools.count():
            if not connection.recv(65536):
                return
            answer(connection, count)

    with listening(serve) as port:
        yield port


def send(*pieces: bytes, pause_s: float = 0.0) -> Answer:
    def answer(connection: socket.socket, _count: int) -> None:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause_s)

    return answer


def arrivals(port: int, *times: float) -> list[Arrival]:
    return [Arrival(at, request(port, "/v1/x", b"{}", "key"), f"n{at}") for at in times]


def test_requests_are_sent_at_their_times_whatever_the_server_does() -> None:
    with server(send(WHOLE[:20], WHOLE[20:], pause_s=0.15)) as port, LoadClient(port) as client:
        done = client.run_open(arrivals(port, 0.0, 0.05, 0.1), grace_s=3)
    assert [e.label for e in done] == ["n0.0", "n0.05", "n0.1"]
    for exchange in done:
        assert exchange.status == 200 and exchange.tokens == 7
        assert 0 <= exchange.sent - exchange.due < 0.05
        assert exchange.ended is not None and exchange.ended - exchange.due > 0.14


def test_stream_tells_when_its_text_came_and_how_much_had_come_by_then() -> None:
    with server(send(*STREAM, pause_s=0.03)) as port, LoadClient(port) as client:
        [done] = client.run_open(arrivals(port, 0.0), grace_s=3)
    assert [count for _, count in done.texts] == [1, 2]
    assert done.first is not None and done.ended is not None
    assert done.tokens == 6
    assert done.tokens_until(done.first) == 2
    assert done.tokens_until(done.ended) == 6
    assert done.tokens_until(done.sent) == 0


def test_connection_is_used_again_until_the_server_closes_it() -> None:
    ports: list[int] = []
    closing = WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)

    def answer(connection: socket.socket, count: int) -> None:
        ports.append(connection.getpeername()[1])
        connection.sendall(closing if count == 2 else WHOLE)

    with server(answer) as port, LoadClient(port) as client:
        done = client.run_open(arrivals(port, *(0.02 * n for n in range(5))), grace_s=3)
    assert len(done) == 5 and len(set(ports)) == 2


def test_answer_that_breaks_off_or_never_comes_has_no_end() -> None:
    def answer(connection: socket.socket, _count: int) -> None:
        connection.sendall(WHOLE[:30])
        connection.shutdown(socket.SHUT_RDWR)

    with server(answer) as port, LoadClient(port) as client:
        [broken] = client.run_open(arrivals(port, 0.0), grace_s=3)
    assert broken.ended is None and broken.is_broken
    with server(send(STREAM[0], STREAM[2])) as port, LoadClient(port) as client:
        begin = time.perf_counter()
        [late] = client.run_open(arrivals(port, 0.0), grace_s=0.2)
        assert time.perf_counter() - begin < 1
    assert late.ended is None and not late.is_broken and late.tokens_until(time.perf_counter()) == 1


def test_so_many_requests_are_under_way_until_the_time_is_over() -> None:
    now = [0]
    most = [0]
    lock = threading.Lock()

    def answer(connection: socket.socket, _count: int) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.01)
        with lock:
            now[0] -= 1
        connection.sendall(WHOLE)

    with server(answer) as port, LoadClient(port) as client:
        payloads = itertools.repeat(request(port, "/v1/x", b"{}"))
        done = client.run_closed(payloads, connections=3, seconds=0.3)
    assert most[0] == 3 and len(done) > 10
    assert all(e.status == 200 and e.ended is not None for e in done)


def test_nothing_that_listens_is_a_sentence() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with LoadClient(port) as client, pytest.raises(SetupError, match=f"on port {port}"):
            client.run_open(arrivals(port, 0.0), grace_s=1)


def test_tokens_of_a_whole_answer_come_at_its_end() -> None:
    exchange = Exchange("x", due=1.0, sent=1.0, status=200, ended=2.0, tail=BODY)
    assert (exchange.tokens_until(1.9), exchange.tokens_until(2.0)) == (0, 7)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 3), (0.99, 4), (1.0, 4)])
def test_quantile_is_one_of_the_values(share: float, value: float) -> None:
    assert quantile([4, 1, 3, 2], share) == value
