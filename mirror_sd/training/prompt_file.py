"""Prompts of the user's own, of a file of conversations.

Each user turn, with all that precedes it, is one prompt; answers in the file only serve as context.
"""

from __future__ import annotations

from pathlib import Path

from mirror_sd import conversations
from mirror_sd.errors import ConfigError
from mirror_sd.training.prompts import Conversation


def read(path: Path) -> list[Conversation]:
    """Every prompt of the file, in its order. Raises `ConfigError` naming the place at fault."""
    prompts = [
        Conversation(
            messages=found.messages[: index + 1],
            lang=found.lang or language(message["content"]),
            topic="own",
            origin=f"{path.name}:{found.place}",
        )
        for found in conversations.read(path)
        for index, message in enumerate(found.messages)
        if message["role"] == "user"
    ]
    if not prompts:
        raise ConfigError(f"{path} has no conversation with a user turn")
    return prompts


def language(text: str) -> str:
    """ "zh" where a fifth of the letters or more are Han characters, else "en"."""
    han = sum("\u4e00" <= letter <= "\u9fff" for letter in text)
    return "zh" if 5 * han >= max(sum(not letter.isspace() for letter in text), 1) else "en"
