"""Routing, queues and merging on a whole stack of emulated CPU, GPU and TPU, under load."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from mirror_sd.keys import KeyFile, Tier
from tests.system.events import events, stream, text_of
from tests.system.stack import MODEL, Stack, until

CHAT = "/v1/chat/completions"
# Milliseconds of a step and sequences in it: few places, soon full.
PROFILES = {"cpu": (20, 4), "gpu": (10, 4), "tpu": (8, 4)}
SLOTS = sum(slots for _, slots in PROFILES.values())


def settings() -> list[str]:
    items = ["scheduler.adaptive_batch=false"]
    for name, (latency_ms, slots) in PROFILES.items():
        items += [
            f"pools.{name}.engine=emulated",
            f"pools.{name}.emulation.latency_ms={latency_ms}",
            f"pools.{name}.emulation.max_batch={slots}",
        ]
    return items


class Clients:
    """A client for each tenant; a new one would take longer than many an answer."""

    def __init__(self, stack: Stack) -> None:
        file = KeyFile(stack.keys)
        tiers: dict[str, Tier] = {"gold": "vip", "acme": "standard", "birch": "standard"}
        limits = httpx.Limits(max_connections=None)
        self.stack = stack
        self.http: dict[str, httpx.Client] = {}
        for tenant, tier in tiers.items():
            headers = {"Authorization": f"Bearer {file.add(tenant, tier)[1]}"}
            self.http[tenant] = httpx.Client(
                base_url=stack.url, headers=headers, limits=limits, timeout=60
            )

    def close(self) -> None:
        for http in self.http.values():
            http.close()

    def ask(self, tenant: str, text: str, tokens: int) -> str:
        """The text of a whole answer, streamed; fails on anything but a complete one."""
        return text_of(stream(self.http[tenant], CHAT, request(text, tokens)))


def request(text: str, tokens: int) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"model": MODEL, "messages": [message], "max_tokens": tokens, "temperature": 0}


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    stack = Stack(settings())
    try:
        found = Clients(stack)
        stack.start()
        yield found
        found.close()
        stack.stop()
    finally:
        stack.destroy()


@contextmanager
def load(clients: Clients, tokens: int, threads: int = 6) -> Iterator[list[str]]:
    """Clients of two tenants ask one request after the other; the block's list gets what failed."""
    failures: list[str] = []
    answered: list[int] = []
    is_over = threading.Event()

    def ask(number: int) -> None:
        headers = clients.http[("acme", "birch")[number % 2]].headers
        # A kept connection may close while a request is on its way, with any HTTP server.
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(base_url=clients.stack.url, limits=limits, headers=headers) as http:
            while not is_over.is_set():
                body = request(f"{number}: what is it, {len(answered)}?" * (1 + number), tokens)
                try:
                    if number % 3:
                        text = text_of(stream(http, CHAT, body))
                    else:
                        answer = http.post(CHAT, json=body, timeout=60)
                        text = answer.json()["choices"][0]["message"]["content"]
                    if not text:
                        failures.append("an empty answer")
                except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
                    failures.append(repr(error))
                answered.append(number)

    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(ask, number) for number in range(threads)]
        try:
            until(lambda: len(answered) >= threads, 30, "the load is on")
            yield failures
        finally:
            is_over.set()
    for one in running:
        one.result()
    assert len(answered) > 3 * threads, "too little load to say anything"


def test_policy_weights_and_reload_under_load_fail_no_request(clients: Clients) -> None:
    admin, stack = clients.stack.admin(), clients.stack
    policy = admin.get("/admin/policy")
    master = int((stack.run / "nginx" / "nginx.pid").read_text())
    with load(clients, tokens=4) as failures:
        for turn in range(6):
            changed = policy | {"fallback": {"cpu": 1 + turn, "gpu": 1, "tpu": 1}}
            admin.put("/admin/policy", json.dumps(changed).encode())
            factors = {name: {"factor": 0.5 + turn / 20} for name in PROFILES}
            weights = {"version": 9, "at": time.time(), "classes": factors, "degrade_level": 0}
            admin.put("/admin/weights", json.dumps(weights).encode())
            if turn % 2:
                os.kill(master, signal.SIGHUP)
            time.sleep(0.4)
        assert admin.get("/admin/policy")["fallback"]["cpu"] == 6
    assert failures == []
    admin.put("/admin/policy", json.dumps(policy).encode())


def test_class_that_dies_under_load_fails_no_request(clients: Clients) -> None:
    stack = clients.stack
    port = ("--port", str(stack.port))

    def gpu_workers() -> float:
        return stack.total("mirror_broker_workers", **{"class": "gpu"})

    expected = clients.ask("acme", "And the text?", 60)
    with load(clients, tokens=30) as failures, ThreadPoolExecutor(8) as pool:
        texts = [pool.submit(clients.ask, "acme", "And the text?", 60) for _ in range(8)]
        assert stack.cli("emulate", "--class", "gpu", "--fault", "crash", *port).returncode == 0
        until(lambda: gpu_workers() == 0, 10, "every GPU worker is gone")
        assert [one.result() for one in texts] == [expected] * 8
        # New requests go elsewhere, for as long as the class is dead.
        assert clients.ask("acme", "And the text?", 60) == expected
        assert stack.cli("emulate", "--class", "gpu", "--reset", *port).returncode == 0
        until(lambda: gpu_workers() == 1, 30, "the GPU worker is back")
    assert failures == []


def test_identical_streams_are_one_generation_and_get_the_same_text(clients: Clients) -> None:
    stack = clients.stack

    def merged() -> float:
        return stack.total("mirror_broker_merged_total", kind="coalesced")

    def generated() -> float:
        return float(sum(worker["tokens"] for worker in state(stack)["workers"]))

    text, tokens = "What do you have on Mondays?", 200
    alone = clients.ask("acme", text, tokens)
    before, spent = merged(), generated()
    with ThreadPoolExecutor(12) as pool:
        first = pool.submit(clients.ask, "acme", text, tokens)
        time.sleep(0.25)  # the others find a stream that has begun
        rest = [pool.submit(clients.ask, "acme", text, tokens) for _ in range(8)]
        stranger = pool.submit(clients.ask, "birch", text, tokens)
        other = pool.submit(clients.ask, "acme", "What do you have on Sundays?", tokens)
        assert {one.result() for one in (first, *rest)} == {alone}
        assert stranger.result() == alone
        other.result()
    assert merged() - before == 8
    until(lambda: generated() - spent >= 3 * tokens, 3, "the heartbeats tell of three generations")
    # The last heartbeat before may not have told all of the answer alone.
    assert generated() - spent < 4 * tokens


def test_vip_displaces_a_stream_whose_client_sees_only_a_pause(clients: Clients) -> None:
    stack = clients.stack

    def displaced() -> float:
        return stack.total("mirror_gateway_displacements_total")

    questions = [f"Tell me about number {number}." for number in range(SLOTS + 4)]
    tokens = 140
    with ThreadPoolExecutor(SLOTS + 12) as pool:
        expected = list(pool.map(lambda q: clients.ask("birch", q, tokens), questions))
        before = displaced()
        crowd = [pool.submit(clients.ask, "acme", question, tokens) for question in questions]
        until(lambda: running(stack) == SLOTS, 5, "every place is taken")
        begin = time.monotonic()
        vips: list[Future[str]] = [
            pool.submit(clients.ask, "gold", f"Quickly, {number}!", 20) for number in range(3)
        ]
        for one in vips:
            assert one.result()
        took_s = time.monotonic() - begin
        waited = sum(not one.done() for one in crowd)
        assert [one.result() for one in crowd] == expected
    assert displaced() - before >= 1
    assert waited > SLOTS, f"the VIP requests took {took_s:.1f} s, as long as the crowd"


def state(stack: Stack) -> dict[str, Any]:
    found: dict[str, Any] = stack.admin().get("/admin/state")
    return found


def running(stack: Stack) -> int:
    return sum(worker["in_flight"] for worker in state(stack)["workers"])


def test_flood_of_one_tenant_does_not_starve_another(clients: Clients) -> None:
    flood, tokens = 72, 50
    with ThreadPoolExecutor(flood + 4) as pool:
        crowd = [
            pool.submit(clients.ask, "acme", f"Flood {number}", tokens) for number in range(flood)
        ]
        until(lambda: running(clients.stack) == SLOTS, 5, "every place is taken")
        # Each waits for about one of the flood's six rounds; in order of arrival, for all of them.
        for number in range(2):
            assert clients.ask("birch", f"Just one, {number}", 5)
        done = sum(one.done() for one in crowd)
        for one in crowd:
            assert one.result()
    assert done < flood * 5 / 6, f"{done} of the flood's {flood} were served first"


def test_client_that_leaves_the_queue_is_gone_from_it(clients: Clients) -> None:
    stack = clients.stack
    with ThreadPoolExecutor(SLOTS) as pool:
        crowd = [pool.submit(clients.ask, "acme", f"Long {number}", 150) for number in range(SLOTS)]
        until(lambda: running(stack) == SLOTS, 5, "every place is taken")
        with pytest.raises(httpx.ReadTimeout):
            clients.http["birch"].post(CHAT, json=request("I will not wait.", 5), timeout=0.3)
        until(lambda: state(stack)["waiting"] == 0, 2, "nobody waits any more")
        assert not any(one.done() for one in crowd)
        for one in crowd:
            one.result()


def test_stream_tells_its_tokens_as_they_come(clients: Clients) -> None:
    body = request("Slowly.", 40) | {"stream": True}
    with clients.http["gold"].stream("POST", CHAT, json=body) as answer:
        arrived = [time.monotonic() for _ in events(answer)]
    assert arrived[-1] - arrived[0] > 0.15
