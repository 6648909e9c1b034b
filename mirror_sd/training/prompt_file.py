"""Conversations of the user's own: ShareGPT JSON, or JSONL of messages.

Each user turn, with all that precedes it, is one prompt; answers in the file only serve as context.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mirror_sd.errors import ConfigError
from mirror_sd.training.prompts import Conversation

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
}


def read(path: Path) -> list[Conversation]:
    """Every prompt of the file, in its order. Raises `ConfigError` naming the place at fault."""
    try:
        text = path.read_bytes().removeprefix(codecs.BOM_UTF8).decode()
    except OSError as error:
        raise ConfigError(f"cannot read the data {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the data {path} is not UTF-8 text: {error.reason}") from error
    prompts: list[Conversation] = []
    for place, entry in _entries(path, text):
        try:
            prompts.extend(_prompts(f"{path.name}:{place}", entry))
        except ValueError as error:
            raise ConfigError(f"{path}, {place}: {error}") from error
    if not prompts:
        raise ConfigError(f"{path} has no conversation with a user turn")
    return prompts


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


def _prompts(origin: str, entry: Any) -> Iterator[Conversation]:
    """Raises `ValueError` saying what is wrong."""
    if not isinstance(entry, dict):
        raise ValueError("a conversation is not an object")
    turns = entry.get("messages", entry.get("conversations"))
    if not isinstance(turns, list) or not turns:
        raise ValueError("neither `messages` nor `conversations` is a list of turns")
    messages = [_message(turn) for turn in turns]
    lang = entry.get("lang")
    for index, message in enumerate(messages):
        if message["role"] == "user":
            yield Conversation(
                messages=tuple(messages[: index + 1]),
                lang=lang if isinstance(lang, str) else language(message["content"]),
                topic="own",
                origin=origin,
            )


def _message(turn: Any) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise ValueError("a turn is not an object")
    stated = turn.get("role", turn.get("from"))
    role = ROLES.get(stated) if isinstance(stated, str) else None
    if role is None:
        raise ValueError(f"the role {stated!r} of a turn is not one of {', '.join(ROLES)}")
    content = turn.get("content", turn.get("value"))
    if not isinstance(content, str) or any("\ud800" <= c <= "\udfff" for c in content):
        raise ValueError(f"the text of a {role} turn is not text")
    return {"role": role, "content": content}


def language(text: str) -> str:
    """ "zh" where a fifth of the letters or more are Han characters, else "en"."""
    han = sum("\u4e00" <= letter <= "\u9fff" for letter in text)
    return "zh" if 5 * han >= max(sum(not letter.isspace() for letter in text), 1) else "en"
