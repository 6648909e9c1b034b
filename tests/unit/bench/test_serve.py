"""The clients of `bench serve`: what they make of a stream, however it is cut, and of failures."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror_sd.bench.serve import ratios
from mirror_sd.bench.serve_load import chat_body, read_reply, stream
from mirror_sd.bench.serve_stack import RunningStack
from mirror_sd.errors import InternalError, SetupError
from tests.unit.bench.small_server import listening

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def choice(text=None, reason=None):
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}], "usage": None}


def events(texts, reason, tokens):
    bodies = [choice(""), *map(choice, texts), choice(reason=reason)]
    bodies.append({"choices": [], "usage": {"completion_tokens": tokens}})
    return [f"data: {json.dumps(body)}\n\n".encode() for body in bodies] + [b"data: [DONE]\n\n"]


def response(blocks):
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(block), block) for block in blocks)
    return HEAD + chunks + b"0\r\n\r\n"


def pieces_of(stream, cuts):
    """The stream cut at those places, a piece each second."""
    places = [0, *sorted({cut % len(stream) for cut in cuts} - {0}), len(stream)]
    pairs = itertools.pairwise(places)
    return [(float(at), stream[a:b]) for at, (a, b) in enumerate(pairs, start=1)]


@settings(deadline=None)
@given(
    cuts=st.lists(st.integers(0, 10_000), max_size=30),
    joined=st.integers(1, 4),
    reason=st.sampled_from(["stop", "length"]),
)
def test_a_reply_is_the_same_however_it_was_cut(cuts, joined, reason):
    blocks = events(["Grüße", " 你好", "\n\n", "0\r\n"], reason, 9)
    blocks = [b"".join(blocks[i : i + joined]) for i in range(0, len(blocks), joined)]
    pieces = pieces_of(response(blocks), cuts)
    reply = read_reply(0.5, pieces)
    assert (reply.text, reply.completion_tokens) == ("Grüße 你好\n\n0\r\n", 9)
    assert len(reply.event_times) == 4 and list(reply.event_times) == sorted(reply.event_times)
    # A stop token counts.
    assert len(reply.answer.times) == 9 + (reason == "stop")
    assert set(reply.event_times) <= set(reply.answer.times) <= {at for at, _ in pieces}


def test_an_event_has_the_time_at_which_its_end_was_read():
    blocks = events(["a", "b"], "length", 2)
    stream = response(blocks)
    middle = stream.index(blocks[2]) + 20
    reply = read_reply(0.0, [(1.0, stream[:middle]), (2.0, stream[middle:])])
    assert reply.event_times == (1.0, 2.0) and reply.answer.times == (1.0, 2.0)


@pytest.mark.parametrize(
    "blocks",
    [
        events(["a"], "length", 1)[:-1],
        [*events(["a"], "length", 1)[:2], b'data: {"error": {"message": "lost"}}\n\n'],
    ],
    ids=["no end", "error event"],
)
def test_a_stream_that_is_not_whole_is_an_error(blocks):
    with pytest.raises(InternalError, match="a stream ended"):
        read_reply(0.0, [(1.0, response(blocks))])


@contextmanager
def server(replies: list[bytes], heads: list[bytes] | None = None) -> Iterator[int]:
    """Answers each request on each of its connections with the next reply, in two pieces; `heads`
    gets the requests."""

    def serve(connection: socket.socket) -> None:
        while data := connection.recv(65536):
            while b"\r\n\r\n" not in data:
                data += connection.recv(65536)
            if heads is not None:
                heads.append(data)
            reply = replies.pop(0)
            connection.sendall(reply[: len(reply) // 2])
            connection.sendall(reply[len(reply) // 2 :])

    with listening(serve) as port:
        yield port


def test_clients_keep_their_connections_and_replies_keep_the_order_of_their_requests():
    whole = response(events(["x"], "length", 1))
    body = chat_body("m", [{"role": "user", "content": "hi"}], max_tokens=4, speculation=False)
    assert json.loads(body)["speculation"] == "off"
    with server([whole] * 7) as port:
        replies = stream(port, [body] * 7, clients=3)
    assert [reply.text for reply in replies] == ["x"] * 7
    starts = [reply.answer.start for reply in replies]
    assert starts == sorted(starts)
    assert sum(start < replies[0].answer.times[-1] for start in starts) >= 3


def test_the_api_key_of_the_environment_is_shown_to_the_stack(monkeypatch):
    monkeypatch.setenv("MIRROR_SD_API_KEY", "msd-mine")
    heads = []
    with server([response(events(["x"], "length", 1))], heads) as port:
        stream(port, [b"{}"], clients=1)
    assert b"\r\nAuthorization: Bearer msd-mine\r\n" in heads[0]


def test_a_refusal_is_shown():
    refusal = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nfull"
    with server([refusal]) as port, pytest.raises(InternalError, match=r"429.*full"):
        stream(port, [b"{}"], clients=1)


def test_nobody_there_is_told_in_a_sentence(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(SetupError, match=f"no stack answers on port {port}"):
        stream(port, [b"{}"], clients=1)
    monkeypatch.setenv("MIRROR_SD_RUN_DIR", str(tmp_path))
    with pytest.raises(SetupError, match=f"no stack runs on port {port}"):
        RunningStack(port)


def test_the_ratio_is_of_turns_side_by_side():
    runs = [
        {"by": name, "tok_s": speed}
        for name, speed in [("stack", 90), ("engine", 100), ("stack", 150), ("engine", 200)]
    ]
    assert ratios(runs) == {"ratio": {"of_engine": 0.8, "by_turn": [0.9, 0.75]}}
    assert ratios(runs[::2]) == {}
