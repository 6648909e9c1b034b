"""Starting and stopping: `ops/up`, `mirror-sd up | down | status`, signals, two stacks at once."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.system.stack import CLI, MODEL, ROOT, Stack, free_port, on_this_load, until

READY_WITHIN_S = 10.0
BODY = {"model": MODEL, "prompt": "The sea is", "temperature": 0}


@pytest.fixture
def stacks() -> Iterator[Callable[..., Stack]]:
    made: list[Stack] = []

    def make(
        command: Sequence[str] = (*CLI, "up"),
        settings: Sequence[str] = (),
        base: Path | None = None,
    ) -> Stack:
        made.append(Stack(settings, command, base))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one.destroy()


def answered(stack: Stack) -> bool:
    with stack.http() as http:
        return http.post("/v1/completions", json=BODY | {"max_tokens": 2}).status_code == 200


def test_ops_up_is_ready_fast_and_ctrl_c_lets_running_answers_finish(
    stacks: Callable[..., Stack],
) -> None:
    limit_s = on_this_load(READY_WITHIN_S)
    one = stacks([str(ROOT / "ops" / "up")]).start()
    assert one.ready_after_s < limit_s
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        with one.http() as http:
            body = BODY | {"max_tokens": 48, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as response:
                for line in response.iter_lines():
                    lines.append(line)
                    begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(20)
    one.signal(signal.SIGINT)
    reader.join()
    assert "data: [DONE]" in lines
    assert one.wait() == 0, one.log
    one.assert_nothing_left()


def test_sigterm_ends_a_stack_whose_client_streams_on(stacks: Callable[..., Stack]) -> None:
    one = stacks(settings=["server.drain_s=1"]).start()
    with one.http() as http:
        # Without its end tokens the answer takes longer than the grace.
        body = BODY | {"max_tokens": 8000, "stream": True, "logit_bias": {"0": -100, "2": -100}}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            one.signal(signal.SIGTERM)
            assert one.wait(20) == 0, one.log
            rest = list(lines)
    # Cut off, but told so.
    assert any('"error"' in line for line in rest), rest[-3:]
    one.assert_nothing_left()


def test_two_stacks_side_by_side_do_not_disturb_each_other(stacks: Callable[..., Stack]) -> None:
    one = stacks()
    two = stacks(base=one.base)
    one.launch()
    two.start()
    until(lambda: f"ready {one.url}" in one.log, 30, "the first is ready too")
    one.note_processes()
    assert answered(one) and answered(two)
    assert {item["pid"] for item in one.status()["processes"]}.isdisjoint(
        item["pid"] for item in two.status()["processes"]
    )
    done = one.cli("down", "--port", str(one.port))
    assert done.returncode == 0, done.stderr
    assert one.wait() == 0
    assert answered(two)
    two.stop()
    one.assert_nothing_left()


def test_a_detached_stack_is_seen_by_status_and_stopped_by_down(
    stacks: Callable[..., Stack],
) -> None:
    one = stacks()
    arguments = ("up", "--detach", "--port", str(one.port))
    started = one.cli(*arguments, timeout_s=60)
    assert started.returncode == 0, started.stdout + started.stderr
    assert f"ready {one.url}" in started.stdout.splitlines()
    try:
        status = one.status()
        roles = [item["role"] for item in status["processes"]]
        assert {"supervisor", "nginx", "gateway", "broker", "pool", "worker"} <= set(roles)
        assert roles.count("gateway") == 2
        worker = next(item for item in status["processes"] if item["role"] == "worker")
        assert worker["class"] == "cpu"
        assert (status["running"], status["waiting"], status["kv_blocks_used"]) == (0, 0, 0)
        again = one.cli(*arguments)
        assert again.returncode != 0
        assert str(one.port) in again.stderr
    finally:
        done = one.cli("down", "--port", str(one.port))
    assert done.returncode == 0, done.stderr
    one.assert_nothing_left()
    gone = one.cli("status", "--port", str(one.port), "--json")
    assert gone.returncode != 0


def assert_one_sentence(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0]


def test_a_taken_port_is_told_in_one_sentence(stacks: Callable[..., Stack]) -> None:
    one = stacks()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", one.port))
        taken.listen()
        assert_one_sentence(one.cli("up", "--port", str(one.port)), str(one.port), "taken")
    assert not one.run.exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("server.prot=1", ("server.prot",)),
        ("server.gateways=many", ("server.gateways", "many")),
        ("model.path=/no/such/model", ("/no/such/model",)),
        ("model.path=unknown-model", ("unknown-model",)),
    ],
)
def test_a_bad_setting_is_told_in_one_sentence(
    stacks: Callable[..., Stack], setting: str, words: tuple[str, ...]
) -> None:
    one = stacks()
    assert_one_sentence(one.cli("up", "--port", str(free_port()), "--set", setting), *words)
    assert not one.run.exists()


def test_down_without_a_stack_says_so(stacks: Callable[..., Stack]) -> None:
    one = stacks()
    assert_one_sentence(one.cli("down", "--port", str(one.port)), str(one.port))
