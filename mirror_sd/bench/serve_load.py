"""Chats streamed from a running stack by clients that disturb it as little as they can: what they
read is taken apart afterwards."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mirror_sd.bench.load import LoadClient, request
from mirror_sd.bench.prompts import Messages
from mirror_sd.bench.token_times import Answer
from mirror_sd.errors import InternalError

_SILENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Reply:
    """One streamed answer. `event_times` are those of the events with text, seconds on
    `time.perf_counter`, as `answer`'s, where the tokens of the answer are spread evenly over them:
    an event may hold several. A stop token counts as a token, at the time of the last event."""

    answer: Answer
    event_times: tuple[float, ...]
    text: str
    completion_tokens: int


def stream(port: int, bodies: Sequence[bytes], clients: int) -> list[Reply]:
    """The replies to chat requests, in their order, `clients` at a time; a next one starts when one
    ends.

    Raises `SetupError` where nothing listens, `InternalError` on any answer but a whole stream.
    """
    key = os.environ.get("MIRROR_SD_API_KEY")
    requests = [request(port, "/v1/chat/completions", body, key) for body in bodies]
    with LoadClient(port, keeps_pieces=True) as client:
        done = client.run_all(requests, clients, _SILENCE_S)
    return [read_reply(exchange.sent, exchange.pieces or ()) for exchange in done]


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
