"""Real nginx: API keys, and the limits that come with them."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from mirror_sd.keys import KeyFile, Limits, Tier
from tests.openresty.stack import CHAT, Edge, chat, error_of, wait_until

pytestmark = pytest.mark.system
Maker = Callable[..., str]


@pytest.fixture
def make_key(running_edge: Edge) -> Iterator[Maker]:
    """Adds a key to the running server and waits until it holds; all are gone after the test."""
    keys = KeyFile(running_edge.keys_file)

    def make(tenant: str, tier: Tier = "standard", **limits: int) -> str:
        _, text = keys.add(tenant, tier, Limits(**limits))
        # Each worker of nginx reads the file for itself.
        wait_until(lambda: all(_models(running_edge, text) == 200 for _ in range(8)))
        wait_until(lambda: all(_models(running_edge, None) == 401 for _ in range(8)))
        return text

    yield make
    running_edge.keys_file.write_text('{"version": 1, "keys": []}')
    wait_until(lambda: all(_models(running_edge, None) == 200 for _ in range(8)))


def _models(edge: Edge, key: str | None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.get(edge.url + "/v1/models", headers=headers).status_code


def ask(edge: Edge, key: str, **body: Any) -> httpx.Response:
    return chat(edge, body, headers={"Authorization": f"Bearer {key}"})


def test_a_key_gives_tenant_and_tier_and_is_not_passed_on(edge: Edge, make_key: Maker) -> None:
    key = make_key("acme", "vip")
    answer = ask(edge, key)
    headers = answer.json()["headers"]
    assert (headers["x-mirror-tenant"], headers["x-mirror-tier"]) == ("acme", "vip")
    assert key not in answer.text
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


def test_once_there_are_keys_nobody_is_served_without_one(edge: Edge, make_key: Maker) -> None:
    make_key("acme")
    for path in (CHAT, "/v1/completions"):
        answer = httpx.post(edge.url + path, json={})
        assert answer.status_code == 401
        assert error_of(answer.content)["code"] == "no_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert error_of(ask(edge, "msd-wrong").content)["code"] == "invalid_api_key"
    assert httpx.get(edge.url + "/v1/models/x").status_code == 401
    for path in ("/health", "/metrics", "/"):
        assert httpx.get(edge.url + path).status_code == 200
    assert edge.metric('mirror_edge_refusals_total{reason="invalid_api_key"}') > 0


def test_a_revoked_key_is_refused_within_two_seconds(edge: Edge, make_key: Maker) -> None:
    kept, lost = make_key("acme"), make_key("acme")
    keys = KeyFile(edge.keys_file)
    keys.revoke(keys.read()[1].id)
    wait_until(lambda: all(_models(edge, lost) == 403 for _ in range(8)), 2)
    assert error_of(ask(edge, lost).content)["code"] == "key_revoked"
    assert ask(edge, kept).status_code == 200


def test_a_damaged_or_lost_file_of_keys_changes_nothing(edge: Edge, make_key: Maker) -> None:
    key = make_key("acme")
    text = edge.keys_file.read_text()
    edge.keys_file.write_text("{")
    wait_until(lambda: "keys: the file: it is not JSON" in edge.log.read_text())
    edge.keys_file.unlink()
    wait_until(lambda: "keys: the file has gone" in edge.log.read_text())
    assert (_models(edge, key), _models(edge, None)) == (200, 401)
    workers = edge.worker_pids()
    edge.signal(signal.SIGHUP)
    wait_until(lambda: edge.log.read_text().count("keys: the file has gone") >= 3)
    assert edge.worker_pids() == workers
    assert (_models(edge, key), _models(edge, None)) == (200, 401)
    edge.keys_file.write_text(text)


def test_requests_over_the_limit_get_a_429_on_a_connection_that_stays(
    edge: Edge, make_key: Maker
) -> None:
    key = make_key("few", requests_per_minute=2)
    big = json.dumps({"pad": "x" * 300_000})
    with httpx.Client(base_url=edge.url, headers={"Authorization": f"Bearer {key}"}) as client:
        left = [client.post(CHAT, content=big).headers["x-ratelimit-remaining-requests"]]
        answer = client.post(CHAT, content="{}")
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        left.append(answer.headers["x-ratelimit-remaining-requests"])
        assert left == ["1", "0"]
        for content in (big, "{}", big):
            answer = client.post(CHAT, content=content)
            assert answer.status_code == 429
            assert error_of(answer.content)["type"] == "rate_limit_error"
            assert 50 <= int(answer.headers["retry-after"]) <= 70
            assert answer.headers["x-ratelimit-remaining-requests"] == "0"
            assert answer.headers["x-ratelimit-reset-requests"].startswith("1m")
        assert client.get("/v1/models").status_code == 200


def test_one_tenants_use_up_of_its_limit_leaves_the_others_alone(
    edge: Edge, make_key: Maker
) -> None:
    first, second, other = (make_key(name, requests_per_minute=3) for name in ("t1", "t1", "t2"))
    assert [ask(edge, key).status_code for key in (first, second, first)] == [200] * 3
    assert ask(edge, second).status_code == 429
    assert ask(edge, other).status_code == 200


def test_many_clients_at_once_get_exactly_what_the_limit_allows(
    edge: Edge, make_key: Maker
) -> None:
    key = make_key("crowd", requests_per_minute=20)
    with ThreadPoolExecutor(8) as pool:
        statuses = [one.status_code for one in pool.map(lambda _: ask(edge, key), range(60))]
    # Each of the workers raises the count before it looks, so a few may be refused for another's.
    assert 18 <= statuses.count(200) <= 20
    assert set(statuses) == {200, 429}


def test_requests_at_once_are_limited_and_freed_by_the_end_of_each(
    edge: Edge, make_key: Maker
) -> None:
    key = make_key("narrow", concurrency=2)
    with ThreadPoolExecutor() as pool:
        held = [pool.submit(ask, edge, key, hold_s=1) for _ in range(2)]
        wait_until(lambda: sum(edge.in_flight()) == 2)
        answer = ask(edge, key)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert [one.result().status_code for one in held] == [200, 200]
    wait_until(lambda: ask(edge, key).status_code == 200)
    # One that leaves frees its place too.
    with pytest.raises(httpx.ReadTimeout):
        headers = {"Authorization": f"Bearer {key}"}
        httpx.post(edge.url + CHAT, json={"act": "hang"}, headers=headers, timeout=0.3)
    wait_until(lambda: sum(edge.in_flight()) == 0)
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(ask, edge, key, hold_s=0.3) for _ in range(2)]
        assert [one.result().status_code for one in both] == [200, 200]


def test_tokens_are_charged_by_estimate_and_corrected_by_the_true_counts(
    edge: Edge, make_key: Maker
) -> None:
    key = make_key("talker", tokens_per_minute=1000)

    def remaining() -> int:
        return int(ask(edge, key).headers["x-ratelimit-remaining-tokens"])

    # The model that is served, so that these counts teach nothing of the other bodies.
    ask(edge, key, model="m", counts=[300, 200])
    assert 450 <= remaining() <= 500
    ask(edge, key, model="m", act="stream", counts=[100, 250])
    before = remaining()
    assert 100 <= before <= 150
    assert ask(edge, key, act="json_error").status_code == 429
    _leave_a_stream(edge, key, 30)
    wait_until(lambda: sum(edge.in_flight()) == 0)
    # The refused one cost nothing, the stream that was left what it had sent, and both estimates
    # of the requests that ask for what remains are small.
    assert before - 90 <= remaining() <= before - 30
    answer = ask(edge, key, pad="word " * 200)
    assert answer.status_code == 429
    assert "1000 tokens a minute" in error_of(answer.content)["message"]
    assert "x-should-retry" not in answer.headers
    answer = ask(edge, key, pad="word " * 20_000)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (429, "false")


def _leave_a_stream(edge: Edge, key: str, after_events: int) -> None:
    body = {"act": "stream", "events": 1000, "interval_s": 0.01}
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.stream("POST", edge.url + CHAT, json=body, headers=headers) as answer:
        for count, _ in enumerate(line for line in answer.iter_lines() if line):
            if count == after_events:
                break


def test_a_body_that_never_comes_does_not_keep_its_place(edge: Edge, make_key: Maker) -> None:
    key = make_key("slow", concurrency=1)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: e\r\nAuthorization: Bearer {key}\r\n"
    answer = edge.raw(f"{head}Content-Length: 100\r\n\r\n{{".encode())
    assert b" 408 " in answer.split(b"\r\n")[0]
    time.sleep(0.1)
    assert ask(edge, key).status_code == 200
