"""Characters that span tokens reach the client whole."""

from __future__ import annotations

import httpx
import pytest

from tests.system.events import stream, text_of
from tests.system.stack import MODEL

# The model carries a pattern on: what it writes is Chinese and emoji whose characters need
# several tokens each.
PATTERNS = {
    "chinese": "你好，世界！谢谢你，再见。" * 6,
    "emoji": "🙂🚀🌊🙂🚀🌊🙂🚀🌊🙂🚀🌊🙂🚀🌊",
    "mixed": "茶🍵杯，茶🍵杯，茶🍵杯，茶🍵杯，茶🍵杯，茶🍵杯，",
}
BROKEN = "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("name", PATTERNS)
def test_no_streamed_piece_holds_a_broken_character(http: httpx.Client, name: str) -> None:
    body = {"model": MODEL, "prompt": PATTERNS[name], "temperature": 0, "max_tokens": 40}
    chunks = stream(http, "/v1/completions", body)
    pieces = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert BROKEN not in "".join(pieces)
    whole = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert text_of(chunks) == whole
    assert sum(ord(character) > 0x2E80 for character in whole) >= 8


def test_a_length_limit_inside_a_character_leaves_it_out(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": PATTERNS["emoji"], "temperature": 0}
    whole = http.post("/v1/completions", json=body | {"max_tokens": 12}).json()
    expected = whole["choices"][0]["text"]
    for limit in range(1, 12):
        answer = http.post("/v1/completions", json=body | {"max_tokens": limit}).json()
        text = answer["choices"][0]["text"]
        assert BROKEN not in text
        assert expected.startswith(text)
        assert answer["usage"]["completion_tokens"] == limit
