"""The broker's rules without sockets: frames in, frames out, time by hand."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mirror_sd import messages, telemetry
from mirror_sd.config import Config
from mirror_sd.messages import (
    AnyMessage,
    Cancel,
    Chunk,
    Drain,
    Failed,
    Finished,
    Heartbeat,
    Outputs,
    Ping,
    Pong,
    Register,
    Reset,
    SequenceUsage,
    StatsRequest,
    Submit,
    Welcome,
)
from mirror_sd.serving.process_watch import ProcessWatch
from mirror_sd.serving.switchboard import Switchboard
from tests.unit.scheduler.test_priority_queue import Clock
from tests.unit.serving.broker_stack import make_submit

Sent = list[tuple[bytes, AnyMessage]]


class Desk:
    """A switchboard, with its outbox read as messages. Heartbeats are of 1 s, three may miss;
    batches are not waited for unless `scheduler` says so."""

    def __init__(self, scheduler: dict[str, object] | None = None, **sections: object) -> None:
        self.clock = Clock()
        config = Config.model_validate(
            {
                "broker": {"heartbeat_ms": 1000, "stall_s": 10.0, "worker_wait_s": 20.0},
                "pools": {"cpu": {}, "gpu": {}},
                "scheduler": {"timeout_ms": 0, **(scheduler or {})},
                **sections,
            }
        )
        self.board = Switchboard(config, "x", clock=self.clock, unix_clock=lambda: 0.0)

    def gateway(self, message: AnyMessage, name: bytes = b"g") -> Sent:
        self.board.from_gateway(name, messages.encode(message))
        return self.sent()

    def worker(self, message: AnyMessage, name: bytes = b"w") -> Sent:
        self.board.from_worker(name, messages.encode(message))
        return self.sent()

    def register(
        self, name: str = "w", *, slots: int = 2, pid: int = 11, kind: str = "cpu"
    ) -> Sent:
        fields = {"model": "m", "engine": "e", "precision": "fp32", "max_context": 100}
        registration = Register(worker_id=name, device_class=kind, pid=pid, slots=slots, **fields)
        return self.worker(registration, name.encode())

    def beat(self, name: str = "w", steps: int = 0, draining: bool = False) -> Sent:
        return self.worker(_heartbeat(name, steps, draining), name.encode())

    def wait(self, seconds: float, *, beating: bool = True, steps: bool = True) -> None:
        """Let time pass tick by tick, with or without heartbeats from everyone."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += 0.5
            if beating:
                self.board.from_gateway(b"g", messages.encode(Ping(role="gateway", pid=5)))
                beat = _heartbeat("w", int(self.clock.now * 2) if steps else 0)
                self.board.from_worker(b"w", messages.encode(beat))
            self.board.tick()
            self.board.dispatch()

    def sent(self) -> Sent:
        self.board.dispatch()
        self.board.check_integrity()
        taken = []
        while len(self.board.outbox):
            side, identity, frame = self.board.outbox.pop()
            assert side in ("gateway", "worker")
            taken.append((identity, messages.decode(frame)))
        return taken


def of_type(sent: Sent, kind: type) -> Sent:
    return [entry for entry in sent if isinstance(entry[1], kind)]


def test_a_request_goes_to_a_worker_and_its_frames_come_back_unchanged() -> None:
    desk = Desk()
    assert of_type(desk.register(), Welcome)
    submit = make_submit("a")
    assert desk.gateway(submit) == [(b"w", submit)]
    chunk = Chunk(request_id="a", index=0, tokens=(1, 2))
    finished = Finished(request_id="a", reason="stop", usage=SequenceUsage(completion_tokens=2))
    assert desk.worker(chunk) == [(b"g", chunk)]
    assert desk.worker(finished) == [(b"g", finished)]
    assert desk.board.is_idle


def test_the_outputs_of_a_step_reach_each_gateway_in_one_frame() -> None:
    desk = Desk()
    desk.register(slots=4)
    for name, gateway in (("a", b"g1"), ("b", b"g2"), ("c", b"g1")):
        desk.gateway(make_submit(name), gateway)
    chunks = [Chunk(request_id=name, index=0, tokens=(7,)) for name in "abcx"]
    finished = Finished(request_id="a", reason="stop", usage=SequenceUsage(completion_tokens=1))
    sent = desk.worker(Outputs(items=(*chunks, finished)))
    assert sent == [
        (b"w", Cancel(request_id="x")),
        (b"g1", Outputs(items=(chunks[0], chunks[2], finished))),
        (b"g2", chunks[1]),
    ]
    assert desk.worker(chunks[0]) == [(b"w", Cancel(request_id="a"))], "it has ended"


def test_outputs_with_an_unreadable_item_change_nothing() -> None:
    desk = Desk()
    desk.register()
    desk.gateway(make_submit("a"))
    usage = SequenceUsage(completion_tokens=1)
    finished = Finished(request_id="a", reason="stop", usage=usage)
    chunk = Chunk(request_id="b", index=0, tokens=(7,))
    frame, _ = messages.encode_outputs([finished, chunk])
    desk.board.from_worker(b"w", frame.replace(b"chunk", b"chuck"))
    assert desk.sent() == []
    assert desk.worker(finished) == [(b"g", finished)], "the request is still there"


def test_the_same_submit_again_is_ignored_while_the_request_lives() -> None:
    desk = Desk()
    desk.register()
    desk.gateway(make_submit("a"))
    assert desk.gateway(make_submit("a")) == []
    desk.worker(Failed(request_id="a", code="invalid_value", message="no"))
    assert desk.gateway(make_submit("a")), "once it has ended the id is free"


def test_two_gateways_cannot_share_an_id() -> None:
    desk = Desk()
    desk.register()
    desk.gateway(make_submit("a"), b"g1")
    [(name, failed)] = desk.gateway(make_submit("a"), b"g2")
    assert name == b"g2" and isinstance(failed, Failed) and not failed.retryable
    assert desk.gateway(Cancel(request_id="a"), b"g2") == [], "nor cancel each other's"
    chunk = Chunk(request_id="a", index=0, tokens=(1,))
    assert desk.worker(chunk) == [(b"g1", chunk)]


def test_cancel_drops_a_waiting_request_and_stops_a_running_one() -> None:
    desk = Desk()
    desk.register(slots=1)
    desk.gateway(make_submit("a"))
    assert desk.gateway(make_submit("b")) == []
    assert desk.gateway(Cancel(request_id="b")) == []
    assert desk.gateway(Cancel(request_id="a")) == [(b"w", Cancel(request_id="a"))]
    assert desk.gateway(Cancel(request_id="a")) == []
    assert desk.board.is_idle


def test_tokens_of_a_request_nobody_knows_are_answered_by_cancel() -> None:
    desk = Desk()
    desk.register()
    stray = Chunk(request_id="stray", index=0, tokens=(1,))
    assert desk.worker(stray) == [(b"w", Cancel(request_id="stray"))]


def test_a_worker_cannot_answer_for_another_ones_request() -> None:
    desk = Desk()
    desk.register("w")
    desk.register("v", pid=12)
    desk.gateway(make_submit("a"))
    chunk = Chunk(request_id="a", index=0, tokens=(1,))
    assert desk.worker(chunk, b"v") == [(b"v", Cancel(request_id="a"))]
    finished = Finished(request_id="a", reason="stop", usage=SequenceUsage())
    assert desk.worker(finished, b"v") == [] and not desk.board.is_idle


@pytest.mark.parametrize("how", ["silent", "dead", "unreachable", "registered again", "new id"])
def test_requests_of_a_lost_worker_fail_as_retryable(how: str) -> None:
    desk = Desk()
    desk.register(pid=4242)
    desk.gateway(make_submit("a"))
    if how == "silent":
        desk.wait(3.5, beating=False)
    elif how == "dead":
        desk.board.process_died(4242)
    elif how == "unreachable":
        desk.board.unreachable("worker", b"w", "gone")
    elif how == "registered again":
        desk.board.from_worker(b"w", messages.encode(_registration("w", 4243)))
    else:
        desk.board.from_worker(b"w2", messages.encode(_registration("w2", 4242)))
    [(name, failed)] = of_type(desk.sent(), Failed)
    assert name == b"g" and isinstance(failed, Failed)
    assert (failed.request_id, failed.code, failed.retryable) == ("a", "no_worker", True)


def _heartbeat(name: str, steps: int, draining: bool = False) -> Heartbeat:
    load = {"running": 1, "waiting": 0, "kv_blocks_used": 0, "kv_blocks_free": 0}
    return Heartbeat(worker_id=name, steps=steps, draining=draining, **load)


def _registration(name: str, pid: int) -> Register:
    return Register(
        worker_id=name,
        device_class="cpu",
        pid=pid,
        model="m",
        engine="e",
        precision="fp32",
        slots=2,
        max_context=100,
    )


def test_a_worker_that_beats_but_makes_no_step_is_given_up_until_it_registers() -> None:
    desk = Desk()
    desk.register()
    desk.gateway(make_submit("a", timeout_s=None))
    desk.wait(9.0, steps=False)
    [(_, stats)] = of_type(desk.gateway(StatsRequest(token=1)), messages.Stats)
    assert isinstance(stats, messages.Stats)
    assert stats.workers[0].stalled_s == pytest.approx(9.0, abs=0.6)
    assert stats.workers[0].silent_s < 1.0
    desk.wait(2.0, steps=False)
    assert of_type(desk.sent(), Failed)
    desk.gateway(make_submit("a", timeout_s=None))
    desk.clock.now += 5
    assert of_type(desk.beat(steps=5), Reset), "it is not heard before it registers"
    assert of_type(desk.register(), Submit)


def test_an_idle_worker_is_never_stalled() -> None:
    desk = Desk()
    desk.register()
    desk.wait(50.0, steps=False)
    desk.gateway(make_submit("a", timeout_s=None))
    desk.wait(5.0, steps=False)
    assert not of_type(desk.sent(), Failed), "a stall counts from the work, not from before"


def test_an_unknown_worker_gets_one_reset_at_a_time() -> None:
    desk = Desk()
    assert desk.beat() == [(b"w", Reset())]
    assert desk.beat() == []
    desk.clock.now += 4
    assert desk.beat() == [(b"w", Reset())]
    desk.register()
    assert desk.beat() == []


def test_a_lost_gateway_takes_its_requests_with_it() -> None:
    desk = Desk()
    desk.register(slots=1)
    desk.gateway(Ping(role="gateway", pid=77), b"g1")
    desk.gateway(make_submit("a"), b"g1")
    desk.gateway(make_submit("b"), b"g1")
    desk.gateway(make_submit("c"), b"g2")
    desk.board.process_died(77)
    sent = desk.sent()
    assert (b"w", Cancel(request_id="a")) in sent
    assert [message.request_id for _, message in of_type(sent, Submit)] == ["c"]


def test_a_gateway_that_was_given_up_learns_it_from_the_pong() -> None:
    desk = Desk()
    ping = Ping(role="gateway", pid=77)
    [(_, first)] = desk.gateway(ping)
    assert desk.gateway(ping) == [(b"g", first)]
    desk.board.unreachable("gateway", b"g", "reads nothing")
    [(_, second)] = desk.gateway(ping)
    assert isinstance(first, Pong) and isinstance(second, Pong)
    assert first.instance != second.instance


def test_a_pause_of_the_broker_itself_is_nobodys_silence() -> None:
    desk = Desk()
    desk.register()
    desk.gateway(make_submit("a", timeout_s=None))
    desk.board.tick()
    desk.clock.now += 100
    desk.board.tick()
    assert not of_type(desk.sent(), Failed)
    desk.wait(4.0, beating=False)
    assert of_type(desk.sent(), Failed)


def test_a_queued_request_whose_time_is_over_fails() -> None:
    desk = Desk()
    desk.register(slots=1)
    desk.gateway(make_submit("runs", timeout_s=None))
    desk.gateway(make_submit("waits", timeout_s=2.0))
    desk.wait(2.5)
    [(_, failed)] = of_type(desk.sent(), Failed)
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.code) == ("waits", "deadline_exceeded")


def test_a_full_queue_is_refused_with_a_time_to_retry() -> None:
    desk = Desk(scheduler={"max_queue": 1})
    desk.gateway(make_submit("a"))
    [(_, failed)] = desk.gateway(make_submit("b"))
    assert isinstance(failed, Failed)
    assert (failed.code, failed.retryable) == ("queue_full", False)
    assert failed.retry_after_s is not None and failed.retry_after_s >= 1


def test_a_burst_is_not_refused_while_workers_have_credit() -> None:
    desk = Desk(scheduler={"max_queue": 1})
    desk.register(slots=4)
    for name in "abcde":
        desk.board.from_gateway(b"g", messages.encode(make_submit(name)))
    assert [m.request_id for _, m in desk.sent() if isinstance(m, Submit)] == list("abcd")


def test_requests_without_any_worker_fail_after_the_wait() -> None:
    desk = Desk()
    desk.gateway(make_submit("a", timeout_s=None))
    desk.wait(21.0, beating=False)
    [(_, failed)] = of_type(desk.sent(), Failed)
    assert isinstance(failed, Failed) and (failed.code, failed.retryable) == ("no_worker", False)


def test_drain_refuses_what_waits_and_lets_finish_what_runs() -> None:
    desk = Desk()
    desk.register(slots=1)
    desk.gateway(make_submit("runs"))
    desk.gateway(make_submit("waits"))
    desk.board.start_drain()
    sent = desk.sent()
    assert of_type(sent, Drain) == [(b"w", Drain())]
    assert [m.request_id for _, m in of_type(sent, Failed)] == ["waits"]
    assert of_type(desk.gateway(make_submit("late")), Failed)
    finished = Finished(request_id="runs", reason="stop", usage=SequenceUsage())
    assert desk.worker(finished) == [(b"g", finished)] and desk.board.is_idle
    assert of_type(desk.register("v", pid=12), Drain), "one that joins now is told as well"


def test_the_end_of_the_drain_fails_what_still_runs() -> None:
    desk = Desk()
    desk.register()
    desk.gateway(make_submit("a"))
    desk.board.start_drain()
    desk.board.end_drain()
    assert [m.request_id for _, m in of_type(desk.sent(), Failed)] == ["a"]
    assert desk.board.is_idle


def test_a_draining_worker_gets_nothing_new() -> None:
    desk = Desk()
    desk.register()
    desk.beat(draining=True)
    assert desk.gateway(make_submit("a")) == []
    assert desk.register("v", pid=12)[-1][0] == b"v"


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), float("-inf"), -1.0, 1e300])
def test_senseless_times_do_no_harm(seconds: float) -> None:
    desk = Desk()
    desk.register(slots=1)
    desk.gateway(make_submit("a", timeout_s=None))
    desk.gateway(make_submit("b", timeout_s=seconds, received_at=seconds))
    desk.gateway(make_submit("c", timeout_s=None))
    desk.wait(1.0)
    assert not any(m.request_id == "c" for _, m in of_type(desk.sent(), Failed))
    finished = Finished(request_id="a", reason="stop", usage=SequenceUsage())
    assert of_type(desk.worker(finished), Submit)


def test_unknown_classes_and_tiers_make_no_new_labels() -> None:
    desk = Desk()
    desk.register()
    submit = make_submit("a", device_class="no such class", tier="no such tier")
    assert desk.gateway(submit) == [(b"w", submit)]
    labels = {
        sample.labels["class"]
        for metric in telemetry.QUEUE_WAIT.collect()
        for sample in metric.samples
    }
    assert labels <= {"cpu", "gpu", "tpu"}


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "w", "slots": 0},
        {"name": "w", "slots": -3},
        {"name": "w", "slots": 10**9},
        {"name": "w", "kind": "abacus"},
    ],
)
def test_a_bad_registration_is_counted_and_dropped(fields: dict) -> None:
    desk = Desk()
    before = telemetry.BAD_FRAMES.labels("worker")._value.get()
    assert desk.register(**fields) == []
    assert telemetry.BAD_FRAMES.labels("worker")._value.get() == before + 1
    assert of_type(desk.register(), Welcome), "a good one is still taken"


def test_a_worker_cannot_register_under_anothers_name() -> None:
    desk = Desk()
    assert desk.worker(_registration("w", 11), b"someone else") == []


def test_process_watch_tells_of_a_death_once_even_before_the_process_is_reaped() -> None:
    watch = ProcessWatch()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        watch.watch({process.pid, os.getpid(), 2**30})
        assert watch.dead() == []
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert watch.dead() == [process.pid]
        assert watch.dead() == []
        watch.watch(set())
    finally:
        process.communicate()
        watch.close()
