"""A drafter in a process of its own may be frozen, fed garbage and killed: no answer changes."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import zmq

from mirror_sd.drafting.frames import Commit, DraftParams, Hello, Open, Update, encode
from tests.system.stack import MODEL, Stack, started, until

REQUESTS, STREAMS, TOKENS = 200, 4, 12
ACCEPTED = "mirror_worker_source_accepted_tokens_total"
SETTINGS = [
    "pools.cpu.cores=[1]",
    # In int8, as the drafter is, it would be as quick, and the drafts mostly come too late.
    "pools.cpu.precision=bf16",
    "drafters.cpu.cores=[0]",
    "drafters.cpu.serves=[cpu]",
    "speculation.min_tokens=2",
    "speculation.draft=none",  # it would be the better source, and the drafter hardly be used
    "merge.enabled=false",
    "server.gateways=1",
]
needs_two_cores = pytest.mark.skipif(
    not {0, 1} <= os.sched_getaffinity(0), reason="target and drafter need cores 0 and 1"
)


def prompt(number: int) -> str:
    animal = ("otter", "heron", "badger", "lynx", "newt")[number % 5]
    return f"Note {number}. The {animal} went down to the"


def answers(http: httpx.Client, numbers: range, **sampling: object) -> list[str]:
    def ask(number: int) -> str:
        body = {"model": MODEL, "prompt": prompt(number), "max_tokens": TOKENS, "temperature": 0}
        answer = http.post("/v1/completions", json=body | sampling)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(ask, numbers))


def feed_garbage(run: Path) -> None:
    """What cannot be read, and what can but makes no sense, from a stranger that knows the way."""
    bad = Open(session=1, tokens=(10**6,), params=DraftParams(temperature=-1.0), length=99)
    frames = [b"", b"\x01", b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n", b"\x01" + os.urandom(4000)]
    hello = Hello(verifier="stranger", vocab_size=1, tokenizer="none")
    frames += [encode(hello), encode(Update(opened=(bad,), commits=(Commit(7, -1, (1,), 0),)))]
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 200
        stranger.connect(f"ipc://{run}/drafter-cpu-0.sock")
        for frame in frames * 20:
            stranger.send(frame)
        stranger.send_multipart([b"in", b"parts"])


def harm(stack: Stack, done: threading.Event) -> None:
    """One thing after the other, while requests run."""
    [drafter] = stack.pids("drafter")
    for _ in range(2):
        os.kill(drafter, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(drafter, signal.SIGCONT)
        time.sleep(0.5)
    feed_garbage(stack.run)
    time.sleep(1.0)
    os.kill(drafter, signal.SIGKILL)
    until(lambda: stack.pids("drafter") not in ([], [drafter]), 15, "another drafter")
    done.set()


@needs_two_cores
def test_no_harm_to_a_drafter_changes_an_answer_or_fails_a_request() -> None:
    with started(SETTINGS) as stack, stack.http() as http:
        expected = answers(http, range(REQUESTS), speculation="off")
        assert stack.total(ACCEPTED, source="remote") == 0
        done = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            harming = pool.submit(harm, stack, done)
            assert answers(http, range(REQUESTS)) == expected
            rounds = 0
            while not done.is_set() and harming.running():
                rounds += 1
                assert answers(http, range(20)) == expected[:20]
            harming.result()
        before = stack.total(ACCEPTED, source="remote")
        assert before > 0, "the drafter was of no use before it was harmed"
        assert stack.total("mirror_worker_draft_sessions_lost_total") > 0
        assert stack.total("mirror_drafter_bad_frames_total") > 20
        until(lambda: stack.total("mirror_worker_drafters") == 1, 10, "the next drafter is found")
        again = answers(http, range(40), speculation={"source": "remote"})
        assert again == expected[:40]
        assert stack.total(ACCEPTED, source="remote") > before, "the next drafter is of no use"
        until(stack.idle, 5, "idle again")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["drafters.cpu.cores=[999]"], "drafters.cpu.cores names 999; usable here are"),
        # Found later than the workers need to be ready.
        (
            ["drafters.cpu.engine=torch", "drafters.cpu.device=cuda:99"],
            "the device 'cuda:99' cannot be used",
        ),
    ],
    ids=["at once", "after the workers are ready"],
)
def test_a_drafter_that_cannot_work_fails_the_start_in_one_sentence(
    settings: list[str], reason: str
) -> None:
    stack = Stack(["drafters.cpu.serves=[cpu]", *settings])
    try:
        stack.launch()
        assert stack.wait(60) != 0
        assert reason in stack.log
    finally:
        stack.destroy()
