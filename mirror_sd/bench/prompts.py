"""What the benchmarks ask, when no data set is given: short customer-service requests."""

from __future__ import annotations

import codecs
import json
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


def load(dataset: Path | None, limit: int | None = None) -> list[Messages]:
    """Conversations of a JSONL file whose lines hold `messages`, or the built-in prompts.

    Raises `ConfigError` naming the line at fault.
    """
    if dataset is None:
        chats: list[Messages] = [[{"role": "user", "content": text}] for text in DEFAULT]
        return chats[:limit]
    chats = []
    try:
        lines = dataset.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read the data set {dataset}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            chats.append(_messages(line))
        except ValueError as error:
            raise ConfigError(f"{dataset}:{number}: {error}") from error
    if not chats:
        raise ConfigError(f"{dataset} has no conversation")
    return chats[:limit]


def _messages(line: bytes) -> Messages:
    """Raises `ValueError` saying what is wrong with a line."""
    try:
        messages = json.loads(line.decode())["messages"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("not a JSON object with `messages`") from error
    if not isinstance(messages, list) or not messages:
        raise ValueError("`messages` is not a list of messages")
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError("a message is not an object")
        for key in ("role", "content"):
            if not _is_text(message.get(key)):
                raise ValueError(f"the `{key}` of a message is not text")
    return messages


def _is_text(value: object) -> bool:
    """Whether it is a string without half a surrogate pair, which JSON can hold."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)
