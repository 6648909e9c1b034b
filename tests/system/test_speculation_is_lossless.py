"""Speculation on and off give the same tokens, alone and in a crowd, greedy and sampled."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.system.stack import MODEL, Stack

PROMPTS = (
    "The tide table of Harbour & Pine: high 06:10, low 12:20, high 18:40, low 00:50; high 06:10,",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n",
    "Dear customer, thank you for your order. Dear customer, thank you for",
    "退货流程：第一步，联系客服；第二步，寄回商品；第三步，",
)
CROWD = 15
LENGTH = 32


def tokens(
    http: httpx.Client, prompt: str, speculation: str, sampling: dict[str, Any], more: int = 0
) -> Any:
    """Tokens with their log-probabilities: equality of these is equality bit for bit. `more` are
    asked for and left out."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": LENGTH + more, "logprobs": 1}
    answer = http.post("/v1/completions", json=body | sampling | {"speculation": speculation})
    assert answer.status_code == 200, answer.text
    scored = answer.json()["choices"][0]["logprobs"]
    return scored["tokens"][:LENGTH], scored["token_logprobs"][:LENGTH]


@contextlib.contextmanager
def crowd(stack: Stack) -> Iterator[None]:
    """Fifteen other clients, one request after the other each, until the block ends."""
    over = threading.Event()
    failures: list[str] = []

    def visit(number: int) -> None:
        with stack.http() as http:
            turn = 0
            while not over.is_set():
                turn += 1
                body = {
                    "model": MODEL,
                    "prompt": f"Client {number} asks, turn {turn}: " + "what is new? " * number,
                    "max_tokens": 8 + number,
                    "temperature": number % 2,
                    "speculation": "off" if number % 3 == 0 else "auto",
                }
                answer = http.post("/v1/completions", json=body)
                if answer.status_code != 200:
                    failures.append(answer.text)

    threads = [threading.Thread(target=visit, args=(number,)) for number in range(CROWD)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert failures == []


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 1234}],
    ids=["greedy", "seeded"],
)
def test_speculation_changes_no_token_alone_or_in_a_crowd(
    stack: Stack, http: httpx.Client, sampling: dict[str, Any]
) -> None:
    alone = [tokens(http, prompt, "off", sampling) for prompt in PROMPTS]
    drafted = stack.total("mirror_worker_drafted_tokens_total")
    assert [tokens(http, prompt, "auto", sampling) for prompt in PROMPTS] == alone
    assert stack.total("mirror_worker_drafted_tokens_total") > drafted, "nothing was drafted"
    wanted = [(prompt, speculation) for prompt in PROMPTS for speculation in ("auto", "off")]

    def ask(prompt: str, speculation: str) -> Any:
        # Requests that differ in speculation alone are one to the server, which generates it once.
        return tokens(http, prompt, speculation, sampling, more=int(speculation == "off"))

    with crowd(stack), ThreadPoolExecutor(len(wanted)) as threads:
        together = list(threads.map(lambda pair: ask(*pair), wanted))
    assert together == [answer for answer in alone for _ in ("auto", "off")]
