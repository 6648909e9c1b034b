"""A small HTTP/1.1 server on a unix socket that stands in for a gateway: `upstream.py SOCKET`.

The JSON body's `act` says what to do: `echo` (default), `stream` (`events`, `interval_s`), `drop`
(close without a byte), `die` (exit without a byte), `die_streaming` (two events and half of a
third, then exit), `die_after_headers`, `html_error`, `json_error`, `hang`. `counts` is what it
tells the edge of the tokens of prompt and answer; `hold_s` how long it takes. `GET /seen` tells
what was seen so far.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

SEEN: dict[str, Any] = {"requests": 0, "connections": 0, "left_at": [], "events_sent": 0}
Headers = dict[str, str]


async def read_request(reader: asyncio.StreamReader) -> tuple[str, str, Headers, bytes] | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.rstrip("\r\n").split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return method, path, headers, body


def answer(status: str, content_type: str, body: bytes, extra: str = "") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\n{extra}\r\n"
    ).encode() + body


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Accel-Buffering: no\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


async def stream(writer: asyncio.StreamWriter, request: dict[str, Any]) -> None:
    writer.write(STREAM_HEAD)
    await writer.drain()
    for index in range(request.get("events", 3)):
        event = f"data: {json.dumps({'index': index, 'text': '你好'})}\n\n".encode()
        # Two writes: an event must survive being cut anywhere.
        writer.write(chunk(event[:13]))
        await writer.drain()
        writer.write(chunk(event[13:]))
        await writer.drain()
        SEEN["events_sent"] += 1
        await asyncio.sleep(request.get("interval_s", 0.0))
    end = b"data: [DONE]\n\n"
    if "counts" in request:
        end += b": mirror-usage %d %d\n\n" % tuple(request["counts"])
    writer.write(chunk(end) + b"0\r\n\r\n")


async def die_streaming(writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD)
    for index in range(2):
        writer.write(chunk(f'data: {{"index": {index}}}\n\n'.encode()))
        await writer.drain()
        await asyncio.sleep(0.05)
    writer.write(chunk(b'data: {"ind'))
    await writer.drain()
    await asyncio.sleep(0.1)
    os._exit(9)


async def act(
    writer: asyncio.StreamWriter, method: str, path: str, headers: Headers, body: bytes
) -> None:
    if path == "/seen":
        writer.write(answer("200 OK", "application/json", json.dumps(SEEN).encode()))
        return
    SEEN["requests"] += 1
    if path == "/metrics":
        text = (
            b"# HELP mirror_gateway_up Up.\n# TYPE mirror_gateway_up gauge\nmirror_gateway_up 1\n"
        )
        writer.write(answer("200 OK", "text/plain", text))
        return
    if path == "/admin/state":
        writer.write(answer("200 OK", "application/json", b'{"workers": [], "broker": {}}'))
        return
    try:
        request = json.loads(body) if body else {}
    except ValueError:
        error = b'{"error": {"message": "not JSON", "type": "invalid_request_error"}}'
        writer.write(answer("400 Bad Request", "application/json", error))
        return
    match request.get("act", "echo"):
        case "stream":
            await stream(writer, request)
        case "die":
            os._exit(9)
        case "drop":
            writer.close()
        case "die_streaming":
            await die_streaming(writer)
        case "die_after_headers":
            writer.write(STREAM_HEAD)
            await writer.drain()
            await asyncio.sleep(0.1)
            os._exit(9)
        case "hang":
            await asyncio.sleep(60)
        case "html_error":
            writer.write(answer("500 Internal Server Error", "text/html", b"<h1>500</h1>" * 4000))
        case "json_error":
            error = b'{"error": {"message": "full", "type": "rate_limit_error"}}'
            writer.write(
                answer("429 Too Many Requests", "application/json", error, "Retry-After: 7\r\n")
            )
        case _:
            echo = {
                "method": method,
                "path": path,
                "headers": headers,
                "length": len(body),
                "pid": os.getpid(),
                "body_sum": sum(body),
            }
            await asyncio.sleep(request.get("hold_s", 0))
            counts = ""
            if "counts" in request:
                prompt, completion = request["counts"]
                counts = (
                    f"X-Mirror-Prompt-Tokens: {prompt}\r\n"
                    f"X-Mirror-Completion-Tokens: {completion}\r\n"
                )
            body = json.dumps(echo).encode()
            writer.write(answer("200 OK", "application/json", body, counts))


async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    SEEN["connections"] += 1
    while True:
        request = await read_request(reader)
        if request is None:
            break
        work = asyncio.ensure_future(act(writer, *request))
        # A byte or an end of file while we answer means that the peer has left.
        watch = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if watch.done() and not work.done():
            SEEN["left_at"].append(time.time())
            work.cancel()
            break
        watch.cancel()
        await asyncio.wait({watch})
        if writer.is_closing():
            break
        await writer.drain()
    writer.close()


async def main(path: str) -> None:
    server = await asyncio.start_unix_server(serve_connection, path)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
