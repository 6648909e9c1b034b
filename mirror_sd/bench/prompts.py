"""What the benchmarks ask: the conversations of a data set, or short customer-service requests."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mirror_sd.errors import ConfigError

Messages = list[dict[str, Any]]

DEFAULT: tuple[str, ...] = (
    "My order has not arrived. What should I do?",
    "Write a short apology email to a customer whose parcel was lost.",
    "Explain how to return a pair of shoes that do not fit.",
    "I was charged twice for the same subscription. How do I get a refund?",
    "How do I reset my password if I no longer have my old phone number?",
    "Make this friendlier: 'Your warranty has expired. We cannot repair the machine for free.'",
    "Summarise in two sentences: 'I ordered two blue lamps on Monday and got two green lamps on "
    "Friday. I wrote to you twice and nobody answered. I want the blue lamps or my money back.'",
    "A customer asks whether our store delivers on Sundays. We deliver Monday to Saturday. Reply.",
    "The app crashes every time I open the basket. Give me step-by-step instructions to fix it.",
    "List five questions to ask a customer who says that the internet connection is slow.",
    "Can I change the delivery address after the order has been shipped?",
    "Tell a customer politely that the item is out of stock until the 14th of May.",
    "What is the difference between a refund and store credit?",
    "My discount code does not work at checkout. What can be the reason?",
    "Extract the order number and the problem: 'Hi, order 48213, the kettle leaks, please help.'",
    "我的包裹显示已签收，但我没有收到，怎么办？",
)
_ANSWERS = "assistant"
# Who speaks in ShareGPT files, as their exporters write it.
_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": _ANSWERS,
    "chatgpt": _ANSWERS,
    "assistant": _ANSWERS,
    "model": _ANSWERS,
}


@dataclass(frozen=True, slots=True)
class Exchange:
    """A conversation up to a turn of its user, and what the data set answers to it."""

    messages: Messages
    reference: str


def load(dataset: Path | None, limit: int | None = None) -> list[Messages]:
    """The conversations as prompts: each without the answers that it ends with.

    Raises `ConfigError` as `conversations` does.
    """
    return [asked(chat) for chat in conversations(dataset, limit)]


def asked(chat: Messages) -> Messages:
    """A conversation without the answers that it ends with."""
    end = len(chat)
    while end and chat[end - 1]["role"] == _ANSWERS:
        end -= 1
    return chat[:end]


def conversations(dataset: Path | None, limit: int | None = None) -> list[Messages]:
    """The first `limit` conversations, whole; without a data set the built-in prompts.

    A data set is JSONL with `messages` in each line, or a JSON array; `conversations` of `from` and
    `value`, as ShareGPT has them, may stand in for `messages` in both. Raises `ConfigError` naming
    the line, or the place in the array, that is at fault.
    """
    if dataset is None:
        return [[{"role": "user", "content": text}] for text in DEFAULT][:limit]
    try:
        data = dataset.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise ConfigError(f"cannot read the data set {dataset}: {error.strerror}") from error
    chats = []
    for place, item in _items(dataset, data):
        try:
            chats.append(_messages(_parsed(item) if isinstance(item, bytes) else item))
        except ValueError as error:
            raise ConfigError(f"{dataset}:{place}: {error}") from error
    if not chats:
        raise ConfigError(f"{dataset} has no conversation")
    return chats[:limit]


def exchanges(chats: list[Messages]) -> list[Exchange]:
    """Each answer of a data set with all that stands before it; none where nobody asked."""
    return [
        Exchange(chat[:place], message["content"])
        for chat in chats
        for place, message in enumerate(chat)
        if message["role"] == _ANSWERS and message["content"].strip()
        if place and chat[place - 1]["role"] == "user"
    ]


def _items(dataset: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    """Lines, or the elements of an array, with where they stand."""
    if not data.lstrip().startswith(b"["):
        for number, line in enumerate(data.split(b"\n"), start=1):
            if line.strip():
                yield str(number), line
        return
    try:
        array = _parsed(data)
    except ValueError as error:
        raise ConfigError(f"{dataset} is not a JSON array: {error}") from error
    for number, item in enumerate(array):
        yield f"[{number}]", item


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError("not a JSON object with `messages`") from error


def _messages(item: Any) -> Messages:
    """Raises `ValueError` saying what is wrong with a conversation."""
    if isinstance(item, Mapping) and "conversations" in item and "messages" not in item:
        return _checked([_spoken(turn) for turn in _list(item, "conversations")])
    if not isinstance(item, Mapping) or "messages" not in item:
        raise ValueError("not a JSON object with `messages`")
    return _checked(_list(item, "messages"))


def _list(item: Mapping[str, Any], key: str) -> list[Any]:
    found = item[key]
    if not isinstance(found, list) or not found:
        raise ValueError(f"`{key}` is not a list of messages")
    return found


def _spoken(turn: Any) -> Any:
    """A message of a turn of ShareGPT."""
    if not isinstance(turn, Mapping):
        return turn
    speaker = turn.get("from")
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        allowed = ", ".join(_SPEAKERS)
        raise ValueError(f"a message is from {speaker!r}; it can be from {allowed}")
    return {"role": _SPEAKERS[speaker], "content": turn.get("value")}


def _checked(messages: list[Any]) -> Messages:
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError("a message is not an object")
        for key in ("role", "content"):
            if not _is_text(message.get(key)):
                raise ValueError(f"the `{key}` of a message is not text")
    if all(message["role"] == _ANSWERS for message in messages):
        raise ValueError("a conversation has nothing but answers")
    return messages


def _is_text(value: object) -> bool:
    """Whether it is a string without half a surrogate pair, which JSON can hold."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)
