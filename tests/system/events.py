"""Reading a server-sent event stream as it arrives, without a client library's forgiveness."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON of each `data:` event; fails unless the stream ends with exactly one [DONE]."""
    done = False
    for line in response.iter_lines():
        if not line or line.startswith(":"):
            continue
        assert line.startswith("data: "), f"not an event: {line!r}"
        assert not done, f"after [DONE]: {line!r}"
        if line == "data: [DONE]":
            done = True
        else:
            yield json.loads(line.removeprefix("data: "))
    assert done, "the stream ended without [DONE]"


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a whole streamed answer."""
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        if response.status_code != 200:
            raise AssertionError(f"{response.status_code}: {response.read().decode()}")
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events(response))


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a streamed chat or completion."""
    parts = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                parts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(parts)
