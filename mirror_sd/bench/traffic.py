"""Open-loop traffic: when requests come, how long they and their answers are, and whose they are.

The built-in lengths are those of customer-service conversations and of ShareGPT-like chats, in
tokens of the default model, its 31 tokens of chat template included; between the quantiles lengths
are drawn evenly.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mirror_sd.bench import prompts
from mirror_sd.bench.load import Arrival, request
from mirror_sd.scheduler.ticket import TIERS

# Evenly spaced quantiles, the least and the largest too: of 106 prompts, and of the 42 answers.
# fmt: off
PROMPT_TOKENS = (
    37, 47, 49, 58, 66, 78, 88, 94, 126, 149, 166, 183, 196, 217, 266, 285, 321, 383, 459, 586,
    1297,
)
ANSWER_TOKENS = (
    14, 26, 29, 46, 57, 60, 63, 75, 77, 84, 96, 107, 115, 122, 137, 157, 168, 170, 191, 195, 245,
)
# fmt: on
_TEMPLATE_TOKENS = 31
# Each is one token, with the space before it.
_TEXT = (
    "time water light house river morning garden bread table window letter paper road market "
    "money order number question answer day week month year people friend child school city "
    "country north south east west summer winter rain snow wind stone wood glass metal book page "
    "story music voice word line point place room door wall floor street train ship bird horse "
    "apple milk fish salt sugar coffee tea green blue red black white small large long short new "
    "old warm cold early late first second last same other good clear simple quiet strong"
)
_WORDS = _TEXT.split()

VIP_TENANT = "first"
STANDARD_TENANTS = ("second", "third", "fourth")


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the traffic; `content` is a chat's messages."""

    at_s: float
    tier: str
    tenant: str
    messages: prompts.Messages
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Mix:
    """What the traffic is made of. `rate` is requests a second, `vip_share` of them are VIP."""

    rate: float
    vip_share: float
    seconds: float
    seed: int
    dataset: Path | None = None

    def requests(self) -> list[Request]:
        """In the order of their times, with the same random numbers each time.

        VIP requests do not depend on the rest: alone they are what they are in the crowd.
        """
        messages = _messages_of(self.dataset)
        vip = _stream(self.rate * self.vip_share, self.seconds, (VIP_TENANT,), self.seed, messages)
        rest = _stream(
            self.rate * (1 - self.vip_share),
            self.seconds,
            STANDARD_TENANTS,
            self.seed + 1,
            messages,
        )
        return sorted(itertools.chain(vip, rest), key=lambda item: item.at_s)


def mean_answer_tokens() -> float:
    """Expected length of an answer."""
    pairs = itertools.pairwise(ANSWER_TOKENS)
    return sum((low + high) / 2 for low, high in pairs) / (len(ANSWER_TOKENS) - 1)


def arrivals(
    requests: Sequence[Request], port: int, model: str, keys: dict[str, str]
) -> list[Arrival]:
    """As streamed chats with the tenants' API keys; labels are the tiers."""
    return [
        Arrival(
            item.at_s, request(port, "/v1/chat/completions", _body(item, model), key), item.tier
        )
        for item in requests
        for key in (keys[item.tenant],)
    ]


def _body(item: Request, model: str) -> bytes:
    # Without a seed two requests are never one, so that merging makes no tokens out of nothing.
    body: dict[str, Any] = {
        "model": model,
        "messages": item.messages,
        "max_tokens": item.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


def _stream(
    rate: float,
    seconds: float,
    tenants: Sequence[str],
    seed: int,
    messages: Callable[[random.Random], prompts.Messages],
) -> Iterator[Request]:
    draw = random.Random(seed)
    tier = TIERS[0] if tenants == (VIP_TENANT,) else TIERS[1]
    at_s = draw.expovariate(rate) if rate > 0 else seconds
    while at_s < seconds:
        tenant = draw.choice(list(tenants))
        yield Request(at_s, tier, tenant, messages(draw), _drawn(draw, ANSWER_TOKENS))
        at_s += draw.expovariate(rate)


def _messages_of(dataset: Path | None) -> Callable[[random.Random], prompts.Messages]:
    if dataset is not None:
        chats = prompts.load(dataset)
        return lambda draw: draw.choice(chats)

    def words(draw: random.Random) -> prompts.Messages:
        count = max(_drawn(draw, PROMPT_TOKENS) - _TEMPLATE_TOKENS, 1)
        return [{"role": "user", "content": " ".join(draw.choices(_WORDS, k=count))}]

    return words


def _drawn(draw: random.Random, quantiles: Sequence[int]) -> int:
    place = draw.random() * (len(quantiles) - 1)
    low = int(place)
    return round(quantiles[low] + (place - low) * (quantiles[low + 1] - quantiles[low]))
