"""CPU (native int8), TPU (XLA on a CPU, bf16) and an emulated GPU behind nginx with the policy
that ships: each answer is that of its class, and a class that dies hands its streams to others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from mirror_sd.api.tokenizer import Tokenizer
from tests.system.events import events
from tests.system.stack import MODEL, ROOT, Stack, started, until
from workers.emulated_text import EmulatedText, word_ids

CLASSES = ("cpu", "gpu", "tpu")
# Of a whole stream, and of an answer that only has to show whose it is.
TOKENS, FEW = 40, 16
# The tokens that end an answer, so that each is as long as it is asked to be.
BANNED = [0, 2]
# Below 50 tokens with all of their body, and far above.
SHORT = [f"{name} is" for name in ("Rome", "Tea", "Snow", "Iron")]
LONG = [
    f"Report {number} of the harbour master. The ship came in at dawn with a load of {load}, and"
    " the crew went ashore to look for the merchant who had ordered it. They asked at the inn, at"
    " the customs house and at the market, where somebody told them that he had left the town a"
    f" week ago without paying for the {load}. His house was shut, his clerk was gone, and the"
    " neighbours said that the harbour had heard nothing of him since the great storm, in which"
    " two of his own ships were lost with all that they had on board. So the captain decided to"
    for number, load in enumerate(["salt", "tin", "rope", "wool", "rye", "tea"])
]
# What the policy allows (openresty/lua/mirror/policy.lua).
ALLOWED = {"short": {"cpu", "gpu"}, "long": {"gpu", "tpu"}}


def settings() -> list[str]:
    cores = sorted(os.sched_getaffinity(0))
    return [
        *("pools.cpu.threads=1", f"pools.cpu.cores=[{cores[0]}]"),
        # It compiles for half a minute where it has not been run before.
        *("pools.tpu.engine=xla", "pools.tpu.device=cpu", "pools.tpu.precision=bf16"),
        *("pools.tpu.threads=1", f"pools.tpu.cores=[{cores[-1]}]"),
        "pools.gpu.engine=emulated",
        # A class helps no other while that lives, and soon when it is dead.
        *("scheduler.steal_after_ms=60000", "broker.fallback_s=0.5"),
        "server.gateways=1",
    ]


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, str]]:
    """By class and prompt, the answers of engines of their own; the GPU's are added later."""
    prompts = SHORT + LONG
    wish = {"settings": settings(), "classes": ["cpu", "tpu"], "prompts": prompts}
    wish |= {"max_tokens": TOKENS, "banned": BANNED}
    done = subprocess.run(
        [sys.executable, "-m", "tests.system.class_answers"],
        input=json.dumps(wish),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, list[str]] = json.loads(done.stdout)
    return {name: dict(zip(prompts, texts, strict=True)) for name, texts in answers.items()}


@pytest.fixture(scope="module")
def mixed(expected: dict[str, dict[str, str]]) -> Iterator[Stack]:
    with started(settings()) as stack:
        tokenizer = Tokenizer.from_directory(stack.run / "tokenizer")
        file = stack.run / "tokenizer" / "tokenizer.json"
        words = EmulatedText(word_ids(file, tokenizer.facts.vocab_size))
        expected["gpu"] = {}
        for prompt in SHORT + LONG:
            start = words.start(tokenizer.encode_prompt(prompt))
            ids = [words.token(start, position) for position in range(TOKENS)]
            expected["gpu"][prompt] = tokenizer.decode(ids)
        yield stack


def body(prompt: str, max_tokens: int) -> dict[str, Any]:
    bias = {str(token): -100 for token in BANNED}
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logit_bias": bias,
    }


def routes(stack: Stack) -> Counter[tuple[str, str]]:
    """Requests by class and rule."""
    found: Counter[tuple[str, str]] = Counter()
    for name, labels, value in stack.samples():
        if name == "mirror_edge_routes_total":
            found[labels["class"], labels["rule"]] += int(value)
    return found


def ask(http: httpx.Client, prompt: str) -> str:
    answer = http.post("/v1/completions", json=body(prompt, FEW))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def class_of(text: str, prompt: str, expected: dict[str, dict[str, str]]) -> str:
    """The class whose answer this is, as far as it goes; fails where it is none's."""
    found = [name for name in CLASSES if expected[name][prompt].startswith(text)]
    assert found, f"{text!r} is no class's answer to {prompt!r}"
    return found[0] if len(found) == 1 else "several"


def test_each_request_is_answered_by_the_class_that_the_edge_chose(
    mixed: Stack, expected: dict[str, dict[str, str]]
) -> None:
    answers_differ = [p for p in LONG + SHORT if expected["cpu"][p] != expected["tpu"][p]]
    assert len(answers_differ) >= 5, "the two engines are told apart by their answers"
    chosen: Counter[str] = Counter()
    with mixed.http() as http:
        # Short bodies first would teach the edge too little of what a byte is worth.
        for kind, prompts in (("long", LONG), ("short", SHORT)):
            for prompt in prompts:
                before = routes(mixed)
                text = ask(http, prompt)
                [(name, rule)] = (routes(mixed) - before).elements()
                # The probe of a machine that others use may hold back what they keep busy.
                assert name in ALLOWED[kind] or rule != "policy", (kind, name, rule)
                assert len(text) > FEW
                assert expected[name][prompt].startswith(text), (name, prompt)
                chosen[name] += 1
    assert set(chosen) == set(CLASSES)


def test_every_class_that_served_has_told_what_it_measured(mixed: Stack) -> None:
    done = mixed.cli("plan", "--port", str(mixed.port), "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    origins = {item["device_class"]: item["origin"] for item in plan["devices"]}
    assert origins == dict.fromkeys(CLASSES, "measured")
    assert plan["is_live"] and plan["demand"]["answer_tokens"] <= FEW


def test_requests_at_once_are_each_answered_by_their_own_class(
    mixed: Stack, expected: dict[str, dict[str, str]]
) -> None:
    before = routes(mixed)
    with mixed.http() as http, ThreadPoolExecutor(len(SHORT + LONG)) as threads:
        texts = list(threads.map(lambda prompt: ask(http, prompt), SHORT + LONG))
    answered = Counter(
        class_of(text, prompt, expected) for prompt, text in zip(SHORT + LONG, texts, strict=True)
    )
    routed: Counter[str] = Counter()
    for (name, _), count in (routes(mixed) - before).items():
        routed[name] += count
    assert sum(routed.values()) == len(texts)
    for name in CLASSES:
        assert answered[name] <= routed[name] <= answered[name] + answered["several"]
    assert mixed.total("mirror_broker_class_fallbacks_total") == 0
    assert mixed.total("mirror_broker_steals_total") == 0


class Reader(threading.Thread):
    """Reads a streamed answer; `chunks` grows as it comes."""

    def __init__(self, stack: Stack, prompt: str) -> None:
        super().__init__()
        self.prompt = prompt
        self.chunks: list[str] = []
        self.reason: str | None = None
        self.failure: Exception | None = None
        self._stack = stack

    def run(self) -> None:
        try:
            wanted = body(self.prompt, TOKENS) | {"stream": True, "speculation": "off"}
            with (
                self._stack.http() as http,
                http.stream("POST", "/v1/completions", json=wanted) as answer,
            ):
                assert answer.status_code == 200, answer.read()
                for event in events(answer):
                    [choice] = event["choices"]
                    self.chunks.append(choice["text"])
                    self.reason = choice["finish_reason"] or self.reason
        except Exception as error:  # noqa: BLE001 - told by the test
            self.failure = error

    @property
    def text(self) -> str:
        return "".join(self.chunks)


def started_readers(stack: Stack, prompts: Sequence[str]) -> list[Reader]:
    readers = [Reader(stack, prompt) for prompt in prompts]
    for reader in readers:
        reader.start()
    return readers


def test_the_streams_of_a_class_that_dies_go_on_with_another(
    mixed: Stack, expected: dict[str, dict[str, str]]
) -> None:
    [worker] = [
        item["pid"]
        for item in mixed.status()["processes"]
        if item["role"] == "worker" and item.get("class") == "tpu"
    ]
    readers = started_readers(mixed, LONG)
    until(lambda: all(len(reader.chunks) >= 3 for reader in readers), 60, "streams have begun")
    os.kill(worker, signal.SIGKILL)
    seen = {reader.prompt: (reader.text, reader.reason) for reader in readers}
    of_tpu = {
        prompt
        for prompt, (text, reason) in seen.items()
        # So early the answers of two engines may still be one.
        if reason is None and expected["tpu"][prompt].startswith(text)
    }
    assert len(of_tpu) >= 2, f"some streams were the TPU's, and not whole: {seen}"
    with mixed.http() as http:
        # A request that comes now waits for no class that is dead.
        class_of(ask(http, LONG[0]), LONG[0], expected)
    for reader in readers:
        reader.join(60)
        assert reader.failure is None and reader.reason == "length", (reader.prompt, reader.failure)
        assert reader.text.startswith(seen[reader.prompt][0])
        if reader.prompt not in of_tpu:
            class_of(reader.text, reader.prompt, expected)
    assert mixed.total("mirror_broker_class_fallbacks_total", **{"class": "tpu"}) >= 2
    assert mixed.total("mirror_broker_class_fallbacks_total", served_by="tpu") == 0
    assert mixed.total("mirror_gateway_stream_errors_total") == 0
