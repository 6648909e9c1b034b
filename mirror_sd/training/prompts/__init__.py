"""The bundled prompts that a target answers to make training data of its own.

`*.jsonl` beside this module, one prompt a line: `messages` ending with a user turn, `lang`,
`topic`, and optionally `system`: the domain whose system texts (`systems.json`) may precede it.
`{{item}}` stands for a value of that slot (`slots.json`), the same one wherever a conversation
says it; `{{item2}}` for another value of the same slot. A `#` in a value is a random digit.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VARIANTS = 4
SYSTEM_SHARE = 0.8
_SLOT = re.compile(r"(\b[Aa] )?\{\{([a-z_]+\d?)\}\}")

Message = dict[str, str]
Texts = Mapping[str, Mapping[str, list[str]]]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt, `messages` as a chat request has them. `origin` names the line it comes from:
    conversations of one origin are alike, so hold out by origin, not by conversation."""

    messages: tuple[Message, ...]
    lang: str
    topic: str
    origin: str


def bundled(seed: int, *, variants: int = VARIANTS) -> list[Conversation]:
    """Every bundled prompt, in an order of `seed`, none twice.

    A line with slots or a system domain comes in up to `variants` ways. Its ways depend on the
    seed and the line alone. The first way of every line comes before the second of any, so that a
    run cut short has seen the most varied part.
    """
    systems, slots = _texts("systems.json"), _texts("slots.json")
    rounds: list[list[Conversation]] = [[] for _ in range(variants)]
    seen: set[tuple[tuple[str, str], ...]] = set()
    for origin, line in _lines():
        rng = random.Random(f"{seed}:{origin}")
        for nth in range(variants):
            conversation = _expand(origin, line, systems, slots, rng)
            key = tuple((m["role"], m["content"]) for m in conversation.messages)
            if key not in seen:
                seen.add(key)
                rounds[nth].append(conversation)
    order = random.Random(seed)
    for part in rounds:
        order.shuffle(part)
    return [conversation for part in rounds for conversation in part]


def _lines() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(HERE.glob("*.jsonl")):
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            yield f"{path.stem}:{number}", json.loads(text)


def _texts(name: str) -> Texts:
    """Language -> key -> texts."""
    texts: Texts = json.loads((HERE / name).read_text(encoding="utf-8"))
    return texts


def _expand(
    origin: str, line: Mapping[str, Any], systems: Texts, slots: Texts, rng: random.Random
) -> Conversation:
    lang, messages = line["lang"], list(line["messages"])
    if "system" in line and rng.random() < SYSTEM_SHARE:
        text = rng.choice(systems[lang][line["system"]])
        messages.insert(0, {"role": "system", "content": text})
    values: dict[str, str] = {}

    def fill(match: re.Match[str]) -> str:
        article, name = match[1] or "", match[2]
        if name not in values:
            taken = set(values.values())
            fresh = [text for text in slots[lang][name.rstrip("2")] if text not in taken]
            values[name] = _digits(rng.choice(fresh), rng)
        if article and values[name][0] in "aeiou":
            article = article.replace(" ", "n ")
        return article + values[name]

    filled = tuple({"role": m["role"], "content": _SLOT.sub(fill, m["content"])} for m in messages)
    return Conversation(filled, lang, line["topic"], origin)


def _digits(text: str, rng: random.Random) -> str:
    """`#` after a non-digit is 1..9, so that no number begins with a zero."""
    made = ""
    for letter in text:
        if letter == "#":
            low = 0 if made[-1:].isdigit() else 1
            letter = str(rng.randint(low, 9))
        made += letter
    return made
