"""The probe on a stack of its own: an emulated class gets hot, the probe hangs, the probe dies."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from mirror_sd.keys import KeyFile
from tests.system.stack import MODEL, Stack, started, until
from tests.unit.ops.small_edge import SmallEdge, small_edge

PROMPT = {"model": MODEL, "prompt": "A short one", "max_tokens": 4, "temperature": 0}
LONG = PROMPT | {"max_tokens": 400, "stream": True}
# How long the edge believes a document.
FRESH_S = 5.0


@pytest.fixture(scope="module")
def receiver() -> Iterator[SmallEdge]:
    with small_edge() as server:
        yield server


@pytest.fixture(scope="module")
def probed(receiver: SmallEdge) -> Iterator[Stack]:
    """Two emulated classes of equal pace: what differs is what the test says of their devices."""
    classes = [f"pools.{name}.engine=emulated" for name in ("cpu", "gpu")]
    pace = [f"pools.{name}.emulation.latency_ms=20" for name in ("cpu", "gpu")]
    webhook = f"probe.webhook=http://127.0.0.1:{receiver.server_port}/hook"
    with started([*classes, *pace, "server.gateways=1", webhook]) as stack:
        set_device(stack, "cpu")
        set_device(stack, "gpu")
        yield stack


def set_device(stack: Stack, name: str, temperature_c: float = 60.0, slower: float = 1.0) -> None:
    """Utilisation is the same for both, so that the balance between them stays out of it."""
    document = {
        "temperature_c": temperature_c,
        "utilisation": 0.5,
        "memory_pressure": 0.2,
        "latency_factor": slower,
    }
    file = stack.run / f"emulation-{name}.json"
    draft = file.with_suffix(".new")
    draft.write_text(json.dumps(document))
    draft.replace(file)


def admin(stack: Stack, path: str) -> dict[str, Any]:
    token = (stack.run / "admin-token").read_text()
    answer = httpx.get(
        f"http://127.0.0.1:{stack.admin_port}{path}", headers={"Authorization": f"Bearer {token}"}
    )
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def edge(stack: Stack) -> dict[str, Any]:
    found: dict[str, Any] = admin(stack, "/admin/state")["edge"]
    return found


def factor(stack: Stack) -> float:
    return float(edge(stack)["factors"].get("gpu", 1.0))


class Traffic:
    """Short requests at a steady rate from some threads; `statuses` counts how they ended."""

    def __init__(
        self,
        stack: Stack,
        threads: int = 4,
        every_s: float = 0.15,
        max_tokens: int = 4,
        prompt: str = "A short one",
        key: str = "",
    ) -> None:
        self.stack = stack
        self._body = PROMPT | {"max_tokens": max_tokens}
        self._prompt = prompt
        self._number = itertools.count()
        self.statuses: Counter[int | str] = Counter()
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._every_s = every_s
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._send) for _ in range(threads)]

    def _send(self) -> None:
        with self.stack.http() as http:
            while not self._is_over.wait(self._every_s):
                try:
                    # Identical requests would be one generation.
                    body = self._body | {"prompt": f"{next(self._number)}. {self._prompt}"}
                    answer = http.post("/v1/completions", json=body, headers=self._headers)
                    self.statuses[answer.status_code] += 1
                except httpx.HTTPError as error:
                    self.statuses[repr(error)] += 1

    def routed(self) -> dict[str, float]:
        return {
            name: self.stack.total("mirror_edge_routes_total", **{"class": name})
            for name in ("cpu", "gpu")
        }

    def gpu_share(self, seconds: float) -> float:
        """The share of the requests that the edge sends to the GPU in the next seconds."""
        before = self.routed()
        time.sleep(seconds)
        after = self.routed()
        sent = {name: after[name] - before[name] for name in after}
        assert sum(sent.values()) >= 20, f"too little traffic to tell: {sent}"
        return sent["gpu"] / sum(sent.values())

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def factors_seen(stack: Stack) -> Iterator[list[float]]:
    """The GPU's factor, looked up four times a second meanwhile."""
    seen: list[float] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.25):
            seen.append(factor(stack))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


def test_hot_gpu_gives_up_its_share_within_3_s_and_gets_it_back_without_swinging(
    probed: Stack, receiver: SmallEdge
) -> None:
    until(lambda: edge(probed)["factors"].get("gpu") == 1.0, 20, "weights from the probe")
    with Traffic(probed) as traffic, factors_seen(probed) as seen:
        usual = traffic.gpu_share(5.0)
        assert 0.2 < usual < 0.4, "the policy gives it 0.3"
        set_device(probed, "gpu", 86.0)
        until(lambda: factor(probed) < 0.5, 3.0, "a lower factor for the hot class")
        assert traffic.gpu_share(4.0) < 0.6 * usual
        # Cooler, but not cool: it stays as it is.
        set_device(probed, "gpu", 82.0)
        time.sleep(1.5)
        held = factor(probed)
        time.sleep(2.0)
        assert factor(probed) == held < 0.5
        set_device(probed, "gpu", 70.0)
        until(lambda: factor(probed) == 1.0, 20.0, "its share given back")
        assert traffic.gpu_share(5.0) > 0.8 * usual
    assert set(traffic.statuses) == {200}, traffic.statuses
    lowest = seen.index(min(seen))
    assert seen[: lowest + 1] == sorted(seen[: lowest + 1], reverse=True), "down, and only down"
    assert seen[lowest:] == sorted(seen[lowest:]), "then up, and only up"
    until(lambda: len(receiver.alerts) >= 2, 20.0, "an alert and its end at the webhook")
    told = [(alert["alert"], alert["class"], alert["state"]) for alert in receiver.alerts]
    assert told == [("MirrorDeviceHot", "gpu", "firing"), ("MirrorDeviceHot", "gpu", "resolved")]


def test_hot_gpu_gives_up_long_prompts_too_though_the_policy_names_it_alone(
    probed: Stack,
) -> None:
    set_device(probed, "gpu", 90.0)
    until(lambda: factor(probed) < 0.5, 5.0, "a lower factor for the hot class")
    with Traffic(probed, prompt="A long one. " * 60) as traffic:
        assert traffic.gpu_share(4.0) < 0.5
        set_device(probed, "gpu")
        # Not all of it: it was hot a moment ago as well.
        until(lambda: factor(probed) > 0.8, 20.0, "its share given back")
        assert traffic.gpu_share(3.0) > 0.7
    assert set(traffic.statuses) == {200}, traffic.statuses


def test_probe_that_hangs_is_forgotten_within_5_s_and_believed_again_when_it_wakes(
    probed: Stack,
) -> None:
    set_device(probed, "gpu", 90.0)
    until(lambda: factor(probed) < 0.5, 5.0, "a lower factor for the hot class")
    [pid] = probed.pids("probe")
    os.kill(pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        until(lambda: edge(probed)["weights_stale"], FRESH_S + 2.0, "weights that are too old")
        assert time.monotonic() - begun > FRESH_S - 2.0
        assert probed.total("mirror_edge_weights_stale") == 1.0
        with Traffic(probed) as traffic:
            assert 0.2 < traffic.gpu_share(4.0) < 0.4, "the policy gives it 0.3, hot or not"
        assert set(traffic.statuses) == {200}, traffic.statuses
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: not edge(probed)["weights_stale"], 5.0, "fresh weights again")
    assert probed.pids("probe") == [pid]
    set_device(probed, "gpu")


def test_killed_probe_comes_back_and_finds_the_hot_class_again(probed: Stack) -> None:
    set_device(probed, "gpu", 90.0)
    until(lambda: factor(probed) < 0.5, 5.0, "a lower factor for the hot class")
    [pid] = probed.pids("probe")
    with Traffic(probed) as traffic:
        os.kill(pid, signal.SIGKILL)
        until(lambda: probed.pids("probe") not in ([], [pid]), 10.0, "another probe")
        until(lambda: factor(probed) < 0.5, 10.0, "a lower factor again")
    assert set(traffic.statuses) == {200}, traffic.statuses
    assert not edge(probed)["weights_stale"]
    assert f"probe (pid {pid}) ended with SIGKILL" in probed.log
    set_device(probed, "gpu")


@pytest.mark.parametrize("lie", ["NaN", "-1", "1.5", '"much"', "null"])
def test_edge_refuses_a_factor_that_is_none_and_keeps_the_one_it_has(
    probed: Stack, lie: str
) -> None:
    until(lambda: factor(probed) == 1.0, 20.0, "a cool class")
    token = (probed.run / "admin-token").read_text()
    classes = f'{{"gpu": {{"factor": {lie}}}}}'
    answer = httpx.put(
        f"http://127.0.0.1:{probed.admin_port}/admin/weights",
        content=f'{{"version": 1, "at": {time.time()}, "classes": {classes}}}',
        headers={"Authorization": f"Bearer {token}"},
    )
    assert answer.status_code == 400, answer.text
    assert factor(probed) == 1.0


def test_status_shows_the_classes_their_devices_and_their_weights(probed: Stack) -> None:
    until(lambda: factor(probed) == 1.0, 20.0, "a cool class")
    document = probed.status()
    [cpu, gpu] = document["classes"]
    assert (cpu["class"], gpu["class"]) == ("cpu", "gpu")
    assert gpu["emulated"] and gpu["workers"] == 1 and gpu["slots"] == 32
    assert (gpu["temperature_c"], gpu["utilisation"], gpu["factor"]) == (60.0, 0.5, 1.0)
    assert gpu["weight"][0] == {"below": 50, "share": pytest.approx(0.3)}
    assert document["degrade_level"] == 0 and document["weights_stale"] is False
    done = probed.cli("status", "--port", str(probed.port))
    assert done.returncode == 0, done.stderr
    for word in ("gpu emulated", "60 C", "50%", "degradation 0", "probe"):
        assert word in done.stdout


@pytest.mark.slow
def test_slow_tokens_degrade_service_step_by_step_and_fast_ones_restore_it(probed: Stack) -> None:
    """Last: 300 ms a step for a while."""

    def level() -> int:
        return int(edge(probed)["degrade_level"])

    def headers() -> httpx.Headers:
        with probed.http() as http, http.stream("POST", "/v1/completions", json=LONG) as answer:
            assert answer.status_code == 200
            return answer.headers

    assert level() == 0
    assert "x-mirror-degraded" not in headers()
    for name in ("cpu", "gpu"):
        set_device(probed, name, slower=15.0)
    with Traffic(probed, threads=8, max_tokens=16) as traffic:
        seen = [until(level, 30.0, "the first step")]
        until(lambda: level() == 2, 15.0, "the second step")
        assert headers()["x-mirror-degraded"] == "max_tokens"
        time.sleep(6.0)
        seen.append(level())
        for name in ("cpu", "gpu"):
            set_device(probed, name)
        until(lambda: level() == 1, 40.0, "a step back")
        assert "x-mirror-degraded" not in headers()
        until(lambda: level() == 0, 20.0, "the last step back")
    # Nothing waits: so nobody is refused, however slow it is.
    assert seen == [1, 2]
    assert set(traffic.statuses) == {200}, traffic.statuses
    log = (probed.run / "logs" / "probe.log").read_text()
    steps = ("from 0 to 1", "from 1 to 2", "from 2 to 1", "from 1 to 0")
    assert [log.count(f"degradation goes {step}") for step in steps] == [1, 1, 1, 1]
    assert probed.total("mirror_probe_degrade_steps_total", direction="up") == 2.0


def test_standard_requests_are_refused_last_and_vip_requests_never() -> None:
    """Twice as many clients as slots, and a device that is far too slow."""
    slow = ("engine=emulated", "emulation.latency_ms=300", "emulation.max_batch=8")
    settings = [f"pools.cpu.{item}" for item in slow]
    with started([*settings, "server.gateways=1", "scheduler.adaptive_batch=false"]) as stack:
        file = KeyFile(stack.keys)
        standard, vip = (file.add(tier, tier)[1] for tier in ("standard", "vip"))

        def ask(key: str) -> httpx.Response:
            with stack.http() as http:
                headers = {"Authorization": f"Bearer {key}"}
                return http.post("/v1/completions", json=PROMPT, headers=headers)

        until(lambda: stack.knows(standard) and stack.knows(vip), 10.0, "keys that are known")
        with Traffic(stack, threads=20, max_tokens=8, key=standard) as traffic:
            until(lambda: edge(stack)["degrade_level"] == 3, 60.0, "the last step")
            refused = ask(standard)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "degraded"
            assert int(refused.headers["retry-after"]) >= 1
            assert ask(vip).status_code == 200
            until(lambda: traffic.statuses[503] > 0, 10.0, "the traffic is refused too")
        assert traffic.statuses[200] > 20
        assert set(traffic.statuses) == {200, 503}, traffic.statuses
        document = stack.status()
        assert document["degrade_level"] == 3
