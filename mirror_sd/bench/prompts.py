"""What the benchmarks ask: the conversations of a data set, or short customer-service requests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mirror_sd import conversations as conversation_file
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
    """The first `limit` conversations of a file (see `mirror_sd.conversations`), whole; without a
    data set the built-in prompts.

    Raises `ConfigError` naming the place at fault.
    """
    if dataset is None:
        return [[{"role": "user", "content": text}] for text in DEFAULT][:limit]
    chats = []
    for found in conversation_file.read(dataset):
        if all(message["role"] == _ANSWERS for message in found.messages):
            raise ConfigError(f"{dataset}, {found.place}: nothing but answers")
        chats.append(list(found.messages))
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
