"""Data of the user's own: both formats, and one clear sentence for a file that is neither."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mirror_sd.errors import ConfigError
from mirror_sd.training import prompt_file

SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "system", "value": "Be short."},
            {"from": "human", "value": "Hello"},
            {"from": "gpt", "value": "Hi."},
            {"from": "human", "value": "包裹在哪里？"},
            {"from": "gpt", "value": "在路上。"},
        ],
    }
]


def test_each_user_turn_with_what_precedes_it_is_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(SHAREGPT), encoding="utf-8")
    first, second = prompt_file.read(path)
    assert [m["role"] for m in first.messages] == ["system", "user"]
    assert [m["role"] for m in second.messages] == ["system", "user", "assistant", "user"]
    assert (first.lang, second.lang) == ("en", "zh")
    assert first.origin == second.origin


def test_lines_of_messages_are_read_with_a_byte_order_mark_and_empty_lines(tmp_path: Path) -> None:
    line = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "lang": "xx"})
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{line}\n\n{line}\n".encode())
    found = prompt_file.read(path)
    assert [prompt.lang for prompt in found] == ["xx", "xx"]
    assert found[0].origin != found[1].origin


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no conversation with a user turn"),
        ("[]", "no conversation with a user turn"),
        ("[1]", "conversation 1: a conversation is not an object"),
        ("[{", "is not JSON"),
        ("hello\n", "line 1: not JSON"),
        ('{"messages": []}', "line 1: neither `messages` nor `conversations`"),
        ('{"messages": [{"role": "king", "content": "x"}]}', "the role 'king'"),
        ('{"messages": [{"role": "user", "content": 5}]}', "the text of a user turn is not text"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "is not text"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no conversation with a user"),
    ],
)
def test_a_file_that_is_neither_format_is_told_where_and_why(
    text: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said.replace("(", "\\(").replace("[", "\\[")):
        prompt_file.read(path)


def test_a_file_that_is_not_there_or_not_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the data"):
        prompt_file.read(tmp_path / "none.json")
    path = tmp_path / "bytes.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        prompt_file.read(path)
