"""The worker's loop against a scripted engine, its frames over a real ZeroMQ socket."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from mirror_sd.messages import (
    AnyMessage,
    Cancel,
    Chunk,
    DraftHint,
    Drain,
    Failed,
    Finished,
    Heartbeat,
    Outputs,
    Register,
    Reset,
    SamplingParams,
    Submit,
    ToWorker,
    Welcome,
    decode,
    encode,
)
from tests.unit.workers.scripted_engine import POISON, ScriptedEngine
from workers.worker import ENGINE_BROKE, Worker

PATIENCE_S = 5.0


class BrokerEnd:
    """The broker's ROUTER, by hand."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(endpoint)
        self.worker = b""
        self.frames = 0
        self._arrived: deque[AnyMessage] = deque()

    def send(self, message: ToWorker) -> None:
        self._socket.send_multipart([self.worker, encode(message)])

    def send_raw(self, *frames: bytes) -> None:
        self._socket.send_multipart([self.worker, *frames])

    def next(self, *kinds: type[AnyMessage]) -> AnyMessage:
        """The next message of one of `kinds`; others are skipped."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            while self._arrived:
                message = self._arrived.popleft()
                if isinstance(message, kinds):
                    return message
            if self._socket.poll(50):
                self._receive()
        raise AssertionError(f"no {kinds} within {PATIENCE_S} s")

    def _receive(self) -> None:
        identity, frame = self._socket.recv_multipart()
        message = decode(frame)
        if isinstance(message, Register):
            self.worker = identity
        self.frames += 1
        self._arrived.extend(message.items if isinstance(message, Outputs) else [message])

    def close(self) -> None:
        self._context.destroy(linger=0)


class Bench:
    """A worker on a thread, and the broker's end of its socket."""

    def __init__(self, directory: Path, step_s: float = 0.002, drain_s: float = 2.0) -> None:
        self.endpoint = f"ipc://{directory}/w.sock"
        self.broker = BrokerEnd(self.endpoint)
        self.engine = ScriptedEngine(step_s)
        self.worker = Worker(
            self.engine,
            self.endpoint,
            worker_id="w-1",
            device_class="cpu",
            pid=1,
            heartbeat_s=0.05,
            drain_s=drain_s,
        )
        self.status: int | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.status = self.worker.run()

    def start(self) -> Register:
        self._thread.start()
        register = self.broker.next(Register)
        assert isinstance(register, Register)
        self.broker.send(Welcome(instance="b-1"))
        return register

    def join(self) -> int | None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the worker did not end"
        return self.status

    def close(self) -> None:
        if self._thread.is_alive():
            self.worker.stop()
            self.worker.stop()
            self.join()
        self.broker.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def submit(
    request_id: str,
    prompt: tuple[int, ...] = (1, 2),
    max_tokens: int = 3,
    delivered: tuple[int, ...] = (),
) -> Submit:
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    return Submit(
        request_id=request_id,
        model="scripted",
        prompt=prompt,
        params=params,
        delivered=delivered,
    )


def eventually(claim: Callable[[], bool], within_s: float = PATIENCE_S) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if claim():
            return True
        time.sleep(0.005)
    return claim()


def test_worker_registers_with_what_its_engine_can_do(bench: Bench) -> None:
    register = bench.start()
    assert bench.broker.worker == b"w-1"
    assert (register.worker_id, register.model, register.slots) == ("w-1", "scripted", 4)
    assert (register.engine, register.precision, register.max_context) == ("scripted", "fp32", 100)


def test_submitted_sequence_comes_back_token_by_token(bench: Bench) -> None:
    bench.start()
    bench.broker.send(submit("r", max_tokens=3))
    frames = [bench.broker.next(Chunk, Finished) for _ in range(4)]
    tokens = [frame.tokens for frame in frames[:3] if isinstance(frame, Chunk)]
    assert tokens == [(0,), (1,), (2,)]
    assert isinstance(frames[3], Finished)


def test_outputs_of_a_step_share_a_frame(tmp_path: Path) -> None:
    bench = Bench(tmp_path, step_s=0.05)
    try:
        bench.start()
        for name in "abcd":
            bench.broker.send(submit(name, max_tokens=10_000))
        while {bench.broker.next(Chunk).request_id for _ in range(4)} != set("abcd"):
            pass
        before = bench.broker.frames
        for _ in range(20):
            bench.broker.next(Chunk)
        # Five steps, and the heartbeats that came between them.
        assert bench.broker.frames - before <= 5 + 8
    finally:
        bench.close()


def test_sequence_that_the_engine_refuses_fails_with_the_engines_reason(bench: Bench) -> None:
    bench.start()
    bench.broker.send(submit("r", prompt=tuple(range(101))))
    failed = bench.broker.next(Failed)
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.code) == ("r", "context_length_exceeded")
    assert failed.message == "too long for this worker"
    assert not failed.retryable


def test_a_draft_hint_reaches_the_engine_after_its_sequence(bench: Bench) -> None:
    bench.start()
    bench.broker.send(submit("r", max_tokens=10_000))
    bench.broker.send(DraftHint(request_id="r", index=3, tokens=(7, 8)))
    assert eventually(lambda: bench.engine.hints == [("r", 3, (7, 8))])


def test_cancelled_sequence_is_gone_within_a_step(tmp_path: Path) -> None:
    bench = Bench(tmp_path, step_s=0.05)
    try:
        bench.start()
        bench.broker.send(submit("r", max_tokens=10_000))
        bench.broker.next(Chunk)
        bench.broker.send(Cancel(request_id="r"))
        # One step may be under way and one may begin before the frame is read.
        assert eventually(lambda: not bench.engine.running, within_s=0.15)
    finally:
        bench.close()


def test_heartbeats_go_on_while_a_step_takes_long(tmp_path: Path) -> None:
    bench = Bench(tmp_path, step_s=0.8)
    try:
        bench.start()
        bench.broker.send(submit("r", max_tokens=1))
        assert eventually(lambda: bench.engine.has_work)
        begin = time.monotonic()
        beats = [bench.broker.next(Heartbeat) for _ in range(8)]
        assert time.monotonic() - begin < 0.7
        assert len(beats) == 8
    finally:
        bench.close()


def test_heartbeat_carries_the_load_and_the_progress(bench: Bench) -> None:
    bench.start()
    bench.broker.send(submit("r", max_tokens=10_000))
    bench.broker.next(Chunk)

    def is_told() -> bool:
        beat = bench.broker.next(Heartbeat)
        assert isinstance(beat, Heartbeat) and beat.health is not None
        assert beat.health.temperature_c == 41.5
        return beat.running == 1 and beat.steps > 0

    assert eventually(is_told)


def test_reset_drops_every_sequence_and_registers_again(bench: Bench) -> None:
    bench.start()
    for name in ("a", "b"):
        bench.broker.send(submit(name, max_tokens=10_000))
    bench.broker.next(Chunk)
    bench.broker.send(Reset())
    assert isinstance(bench.broker.next(Register), Register)
    assert not bench.engine.running


def test_same_request_twice_is_run_once(bench: Bench) -> None:
    bench.start()
    bench.broker.send(submit("r", max_tokens=50))
    bench.broker.send(submit("r", max_tokens=50))
    indexes = []
    while isinstance(frame := bench.broker.next(Chunk, Finished, Failed), Chunk):
        indexes.append(frame.index)
    assert indexes == list(range(50))
    assert isinstance(frame, Finished)


def test_engine_that_breaks_gives_all_sequences_back_and_ends_the_worker(bench: Bench) -> None:
    bench.start()
    bench.broker.send(submit("innocent", max_tokens=10_000))
    bench.broker.next(Chunk)
    bench.broker.send(submit("poison", prompt=(POISON,)))
    while not bench.broker.next(Heartbeat).draining:
        pass
    # After the beat: what is submitted again meanwhile goes to another worker.
    failed = [bench.broker.next(Failed) for _ in range(2)]
    assert {f.request_id for f in failed if isinstance(f, Failed)} == {"innocent", "poison"}
    assert all(isinstance(f, Failed) and f.retryable for f in failed)
    assert bench.join() == ENGINE_BROKE


def test_draining_worker_finishes_what_runs_and_takes_nothing_new(bench: Bench) -> None:
    bench.start()
    bench.broker.send(submit("old", max_tokens=100))
    bench.broker.next(Chunk)
    bench.broker.send(Drain())
    bench.broker.send(submit("new"))
    failed = bench.broker.next(Failed)
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.retryable) == ("new", True)
    finished = bench.broker.next(Finished)
    assert isinstance(finished, Finished)
    assert finished.request_id == "old"
    beat = bench.broker.next(Heartbeat)
    assert isinstance(beat, Heartbeat)
    assert beat.draining


def test_stopped_worker_finishes_what_runs_and_ends_well(bench: Bench) -> None:
    bench.start()
    bench.broker.send(submit("r", max_tokens=60))
    bench.broker.next(Chunk)
    bench.worker.stop()
    assert isinstance(bench.broker.next(Finished), Finished)
    assert bench.join() == 0


def test_stopped_worker_gives_back_what_does_not_finish_in_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path, drain_s=0.2)
    try:
        bench.start()
        bench.broker.send(submit("r", max_tokens=1_000_000))
        bench.broker.next(Chunk)
        bench.worker.stop()
        failed = bench.broker.next(Failed)
        assert isinstance(failed, Failed)
        assert (failed.request_id, failed.retryable) == ("r", True)
        assert bench.join() == 0
    finally:
        bench.close()


def test_unreadable_frames_change_nothing(bench: Bench) -> None:
    bench.start()
    for frames in ((b"",), (b"\x01garbage",), (b"\x63",), (b"a", b"b")):
        bench.broker.send_raw(*frames)
    bench.broker.send(submit("r", max_tokens=1))
    assert isinstance(bench.broker.next(Finished), Finished)


def test_restarted_broker_hears_from_the_worker_again(bench: Bench) -> None:
    bench.start()
    bench.broker.close()
    bench.broker = BrokerEnd(bench.endpoint)
    # A heartbeat, not a registration: the new broker answers it with a reset.
    assert isinstance(bench.broker.next(Heartbeat), Heartbeat)
    bench.broker.worker = b"w-1"
    bench.broker.send(Reset())
    assert isinstance(bench.broker.next(Register), Register)


def test_worker_drained_by_a_broker_that_is_gone_serves_the_next_one(bench: Bench) -> None:
    bench.start()
    bench.broker.send(Drain())
    while not bench.broker.next(Heartbeat).draining:
        pass
    bench.broker.send(Reset())
    bench.broker.next(Register)
    bench.broker.send(submit("new", max_tokens=3))
    finished = bench.broker.next(Finished)
    assert isinstance(finished, Finished)
    assert finished.request_id == "new"
    beat = bench.broker.next(Heartbeat)
    assert isinstance(beat, Heartbeat)
    assert not beat.draining


def test_idle_worker_checks_its_blocks_once_and_uses_no_cpu(bench: Bench) -> None:
    bench.start()
    bench.broker.send(submit("r", max_tokens=1))
    bench.broker.next(Finished)
    assert eventually(lambda: bench.engine.integrity_checks == 1)
    begin, cpu = time.monotonic(), time.process_time()
    time.sleep(1.5)
    assert (time.process_time() - cpu) / (time.monotonic() - begin) < 0.05
    assert bench.engine.integrity_checks == 1
