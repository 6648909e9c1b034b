"""Conversations in a file of the user's own: ShareGPT JSON, or JSONL of messages."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mirror_sd.errors import ConfigError

# Who speaks, as exporters of ShareGPT write it, and as messages have it.
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """`messages` are of role (`system`, `user`, `assistant`) and content, at least one; `place` is
    where in the file they stand, `lang` what it says of the language."""

    place: str
    messages: tuple[dict[str, str], ...]
    lang: str | None = None


def read(path: Path) -> list[Conversation]:
    """All conversations, in their order: elements of a JSON array, or lines with one object each.
    Both have `messages` (role, content), or `conversations` (from, value).

    Raises `ConfigError` naming the place at fault.
    """
    try:
        text = path.read_bytes().removeprefix(codecs.BOM_UTF8).decode()
    except OSError as error:
        raise ConfigError(f"cannot read the data {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the data {path} is not UTF-8 text: {error.reason}") from error
    found = []
    for place, entry in _entries(path, text):
        try:
            found.append(_conversation(place, entry))
        except ValueError as error:
            raise ConfigError(f"{path}, {place}: {error}") from error
    return found


def _entries(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """(where, conversation) of an array, or of one object a line."""
    if text.lstrip().startswith("["):
        try:
            array = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        yield from ((f"conversation {index}", entry) for index, entry in enumerate(array, start=1))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path}, line {number}: not JSON ({error}); a ShareGPT array or one object with"
                " `messages` a line is wanted"
            ) from error


def _conversation(place: str, entry: Any) -> Conversation:
    """Raises `ValueError` saying what is wrong."""
    if not isinstance(entry, dict):
        raise ValueError("a conversation is not an object")
    turns = entry.get("messages", entry.get("conversations"))
    if not isinstance(turns, list) or not turns:
        raise ValueError("neither `messages` nor `conversations` is a list of turns")
    lang = entry.get("lang")
    messages = tuple(_message(turn) for turn in turns)
    return Conversation(place, messages, lang if isinstance(lang, str) else None)


def _message(turn: Any) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise ValueError("a turn is not an object")
    stated = turn.get("role", turn.get("from"))
    role = ROLES.get(stated) if isinstance(stated, str) else None
    if role is None:
        raise ValueError(f"the role {stated!r} of a turn is not one of {', '.join(ROLES)}")
    content = turn.get("content", turn.get("value"))
    # JSON can hold half a surrogate pair, which is no text.
    if not isinstance(content, str) or any("\ud800" <= c <= "\udfff" for c in content):
        raise ValueError(f"the text of a {role} turn is not text")
    return {"role": role, "content": content}
