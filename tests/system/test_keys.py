"""API keys on a real stack, as its operator makes them and its clients meet them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from mirror_sd.keys import KeyFile, Limits, Tier
from tests.system.events import stream, text_of
from tests.system.stack import MODEL, Stack, started, until

EMULATED = ("pools.cpu.engine=emulated", "pools.cpu.emulation.latency_ms=2", "server.gateways=1")
SHORT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Good morning."}],
    "max_tokens": 4,
}
MakeKey = Callable[..., str]


@pytest.fixture(scope="module")
def open_stack() -> Iterator[Stack]:
    """Without keys at first; tests add them."""
    with started(EMULATED) as running:
        yield running


def status(stack: Stack, key: str | None, path: str = "/v1/models") -> int:
    with stack.http(key) as http:
        return http.get(path).status_code


@pytest.fixture
def make_key(open_stack: Stack) -> MakeKey:
    def make(tenant: str, tier: Tier = "standard", **limits: int) -> str:
        _, text = KeyFile(open_stack.keys).add(tenant, tier, Limits(**limits))
        until(lambda: open_stack.knows(text), 5, "the key holds")
        return text

    return make


def test_key_is_needed_from_the_moment_that_one_exists(open_stack: Stack) -> None:
    assert "open: there are no API keys" in open_stack.log
    assert status(open_stack, None) == 200
    file = str(open_stack.keys)
    added = open_stack.cli("key", "add", "--tenant", "acme", "--tier", "vip", "--file", file)
    key = added.stdout.strip()
    until(lambda: all(status(open_stack, None) == 401 for _ in range(6)), 5, "no key, no answer")
    with open_stack.client(key) as client:
        answer = client.chat.completions.create(**SHORT)
        assert answer.service_tier == "priority"
    with open_stack.client() as client, pytest.raises(openai.AuthenticationError) as refused:
        client.chat.completions.create(**SHORT)
    assert refused.value.code == "invalid_api_key"
    assert refused.value.response.headers["x-request-id"]
    listed = json.loads(open_stack.cli("key", "list", "--file", file, "--json").stdout)
    open_stack.cli("key", "revoke", listed[0]["id"], "--file", file)
    with open_stack.client(key) as client:
        until(lambda: status(open_stack, key) == 403, 5, "the key is revoked")
        with pytest.raises(openai.PermissionDeniedError) as revoked:
            client.chat.completions.create(**SHORT)
    assert revoked.value.code == "key_revoked"
    # The last key is gone, and the server has not opened again.
    assert status(open_stack, None) == 401
    for path in ("/health", "/metrics"):
        assert status(open_stack, None, path) == 200


def test_requests_over_a_limit_are_told_when_to_come_again(
    open_stack: Stack, make_key: MakeKey
) -> None:
    key = make_key("few", requests_per_minute=2)
    with open_stack.client(key) as client:
        raw = client.chat.completions.with_raw_response.create(**SHORT)
        assert raw.headers["x-ratelimit-limit-requests"] == "2"
        assert raw.headers["x-ratelimit-remaining-requests"] == "1"
        client.chat.completions.create(**SHORT)
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**SHORT)
    headers = refused.value.response.headers
    assert int(headers["retry-after"]) >= 1
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.value.type == "rate_limit_error"


def test_token_limit_counts_what_was_used_not_what_was_estimated(
    open_stack: Stack, make_key: MakeKey
) -> None:
    key = make_key("tokens", tokens_per_minute=200)
    with open_stack.client(key) as client:
        used = 0
        for streamed in (False, True):
            with open_stack.http(key) as http:
                if streamed:
                    body = SHORT | {"stream_options": {"include_usage": True}}
                    usage = stream(http, "/v1/chat/completions", body)[-1]["usage"]
                else:
                    usage = http.post("/v1/chat/completions", json=SHORT).json()["usage"]
            used += usage["total_tokens"]
        raw = client.chat.completions.with_raw_response.create(**SHORT)
        left = int(raw.headers["x-ratelimit-remaining-tokens"])
        # This answer's own tokens are an estimate still.
        assert 200 - used - 80 < left < 200 - used
        with pytest.raises(openai.RateLimitError):
            for _ in range(10):
                client.chat.completions.create(**SHORT)


def test_headers_of_the_edge_are_not_taken_from_clients(
    open_stack: Stack, make_key: MakeKey
) -> None:
    key = make_key("plain")
    forged = {
        "X-Mirror-Tier": "vip",
        "X-Mirror-Tenant": "acme",
        "X-Mirror-Device": "gpu",
        "X-Mirror-Degrade": "3",
        "x-mirror-prompt-estimate": "1",
    }
    vip = open_stack.total("mirror_gateway_requests_total", tier="vip")
    with open_stack.http(key) as http:
        answer = http.post("/v1/chat/completions", json=SHORT, headers=forged)
        assert answer.status_code == 200
        assert answer.json()["service_tier"] == "default"
        assert not [name for name in answer.headers if name.startswith("x-mirror")]
        with http.stream(
            "POST", "/v1/chat/completions", json=SHORT | {"stream": True}, headers=forged
        ) as streamed:
            text = streamed.read().decode()
            assert not [name for name in streamed.headers if name.startswith("x-mirror")]
    assert "mirror-usage" not in text and text.endswith("data: [DONE]\n\n")
    assert open_stack.total("mirror_gateway_requests_total", tier="vip") == vip


def test_standard_key_does_not_become_vip_by_asking(open_stack: Stack, make_key: MakeKey) -> None:
    for tier, given in (("standard", "default"), ("vip", "priority")):
        key = make_key(f"wish-{tier}", tier)
        with open_stack.client(key) as client:
            answer = client.chat.completions.create(**SHORT, service_tier="priority")
            assert answer.service_tier == given
            chunks = client.chat.completions.create(**SHORT, stream=True)
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_server_that_others_could_reach_does_not_start_without_a_key() -> None:
    stack = Stack([*EMULATED, "server.host=0.0.0.0"])
    try:
        stack.launch()
        assert stack.wait(30) == 1
        [line] = [line for line in stack.log.splitlines() if line.startswith("mirror-sd:")]
        assert "server.host is '0.0.0.0'" in line and "mirror-sd key add" in line
        assert not stack.run.exists()
        KeyFile(stack.keys).add("acme", "standard")
        stack.start()
        assert status(stack, None) == 401
        stack.stop()
    finally:
        stack.destroy()


def test_text_of_a_stream_is_that_of_the_whole_answer(open_stack: Stack, make_key: MakeKey) -> None:
    key = make_key("both")
    body = SHORT | {"temperature": 0, "max_tokens": 20}
    with open_stack.http(key) as http:
        whole = http.post("/v1/chat/completions", json=body).json()
        assert (
            text_of(stream(http, "/v1/chat/completions", body))
            == (whole["choices"][0]["message"]["content"])
        )
