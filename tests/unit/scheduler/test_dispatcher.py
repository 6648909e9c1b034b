"""Credit, choice of worker, fall-back between classes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mirror_sd.errors import DeadlineExceeded, NoWorker
from mirror_sd.scheduler.dispatcher import Dispatcher, DispatchRules
from mirror_sd.scheduler.priority_queue import QueueRules
from mirror_sd.scheduler.roster import Roster
from mirror_sd.scheduler.ticket import Ticket
from tests.unit.scheduler.test_priority_queue import Clock

CLASSES = ("cpu", "gpu", "tpu")


def make_dispatcher(
    clock: Clock,
    expected: tuple[str, ...] = ("cpu", "gpu"),
    queue: QueueRules | None = None,
    **rules: Any,
) -> Dispatcher:
    return Dispatcher(
        CLASSES,
        expected,
        clock=clock,
        queue_rules=queue or QueueRules(limit=100),
        rules=DispatchRules(**{"fallback_s": 3.0, "worker_wait_s": 30.0, **rules}),
    )


def ticket(name: str, device_class: str = "cpu", **fields: Any) -> Ticket:
    return Ticket(name, device_class, fields.pop("tier", "standard"), "default", 0.0, **fields)


def assignments(dispatcher: Dispatcher) -> list[tuple[str, str]]:
    taken = []
    while (assignment := dispatcher.next_assignment()) is not None:
        taken.append((assignment.ticket.request_id, assignment.worker_id))
    return taken


def test_no_worker_gets_more_than_its_slots() -> None:
    dispatcher = make_dispatcher(Clock())
    dispatcher.roster.join("w0", "cpu", 2)
    for i in range(5):
        dispatcher.enqueue(ticket(f"r{i}"))
    assert assignments(dispatcher) == [("r0", "w0"), ("r1", "w0")]
    assert dispatcher.release("r0") == "w0"
    assert assignments(dispatcher) == [("r2", "w0")]
    assert dispatcher.waiting == 2


def test_the_least_loaded_worker_is_chosen_by_share_of_its_slots() -> None:
    dispatcher = make_dispatcher(Clock())
    dispatcher.roster.join("small", "cpu", 2)
    dispatcher.roster.join("large", "cpu", 4)
    for i in range(6):
        dispatcher.enqueue(ticket(f"r{i}"))
    workers = [worker_id for _, worker_id in assignments(dispatcher)]
    assert workers == ["small", "large", "large", "small", "large", "large"]


def test_equal_workers_take_turns() -> None:
    dispatcher = make_dispatcher(Clock())
    for name in ("w0", "w1", "w2"):
        dispatcher.roster.join(name, "cpu", 1)
    order = []
    for i in range(6):
        dispatcher.enqueue(ticket(f"r{i}"))
        order += [worker_id for _, worker_id in assignments(dispatcher)]
        dispatcher.release(f"r{i}")
    assert order == ["w0", "w1", "w2", "w0", "w1", "w2"]


def test_a_busy_class_is_waited_for() -> None:
    clock = Clock()
    dispatcher = make_dispatcher(clock)
    dispatcher.roster.join("g0", "gpu", 1)
    dispatcher.roster.join("c0", "cpu", 4)
    dispatcher.enqueue(ticket("a", "gpu"))
    dispatcher.enqueue(ticket("b", "gpu"))
    assert assignments(dispatcher) == [("a", "g0")]
    clock.now += 1000
    assert assignments(dispatcher) == []


def test_a_class_that_lost_its_worker_is_served_by_another_after_a_while() -> None:
    clock = Clock()
    dispatcher = make_dispatcher(clock)
    dispatcher.roster.join("g0", "gpu", 1)
    dispatcher.roster.join("c0", "cpu", 4)
    dispatcher.roster.leave("g0")
    dispatcher.enqueue(ticket("a", "gpu"))
    clock.now += 2.9
    assert dispatcher.next_assignment() is None, "its worker may be back any moment"
    clock.now += 0.2
    assignment = dispatcher.next_assignment()
    assert assignment is not None
    assert (assignment.worker_id, assignment.served_by) == ("c0", "cpu")


def test_a_class_without_a_pool_is_served_by_another_at_once() -> None:
    dispatcher = make_dispatcher(Clock())
    dispatcher.roster.join("c0", "cpu", 4)
    dispatcher.enqueue(ticket("a", "tpu"))
    assert assignments(dispatcher) == [("a", "c0")]


def test_the_worker_of_the_asked_class_is_taken_as_soon_as_it_is_there() -> None:
    clock = Clock()
    dispatcher = make_dispatcher(clock)
    dispatcher.enqueue(ticket("a", "gpu"))
    clock.now += 20
    assert dispatcher.overdue() == []
    dispatcher.roster.join("c0", "cpu", 1)
    dispatcher.roster.join("g0", "gpu", 1)
    assert assignments(dispatcher) == [("a", "g0")]


def test_vip_of_a_fallen_class_goes_before_standard_of_the_serving_one() -> None:
    clock = Clock()
    dispatcher = make_dispatcher(clock)
    clock.now += 10
    dispatcher.roster.join("c0", "cpu", 1)
    dispatcher.enqueue(ticket("standard", "cpu"))
    dispatcher.enqueue(ticket("vip", "gpu", tier="vip"))
    assert assignments(dispatcher) == [("vip", "c0")]


def test_a_blocked_head_does_not_block_other_classes() -> None:
    dispatcher = make_dispatcher(Clock())
    dispatcher.roster.join("c0", "cpu", 1)
    dispatcher.enqueue(ticket("waits", "gpu", tier="vip"))
    dispatcher.enqueue(ticket("runs", "cpu"))
    assert assignments(dispatcher) == [("runs", "c0")]


def test_a_draining_worker_gets_nothing_new_but_keeps_what_it_has() -> None:
    dispatcher = make_dispatcher(Clock())
    dispatcher.roster.join("w0", "cpu", 4)
    dispatcher.enqueue(ticket("a"))
    assert assignments(dispatcher) == [("a", "w0")]
    dispatcher.roster.drain("w0")
    dispatcher.enqueue(ticket("b"))
    assert assignments(dispatcher) == []
    assert dispatcher.roster.holder("a") == "w0"


def test_requests_fail_when_no_class_had_a_worker_for_too_long() -> None:
    clock = Clock()
    dispatcher = make_dispatcher(clock)
    dispatcher.enqueue(ticket("a"))
    clock.now += 29
    assert dispatcher.overdue() == []
    clock.now += 2
    [(late, error)] = dispatcher.overdue()
    assert late.request_id == "a" and isinstance(error, NoWorker)
    assert error.retry_after_s is not None
    with pytest.raises(NoWorker):
        dispatcher.enqueue(ticket("b"))
    dispatcher.roster.join("g0", "gpu", 1)
    dispatcher.enqueue(ticket("c"))
    assert assignments(dispatcher) == [("c", "g0")]


def test_a_deadline_ends_the_wait() -> None:
    clock = Clock()
    dispatcher = make_dispatcher(clock)
    dispatcher.enqueue(ticket("a", deadline=clock.now + 1))
    clock.now += 1
    [(late, error)] = dispatcher.overdue()
    assert late.request_id == "a" and isinstance(error, DeadlineExceeded)
    assert dispatcher.waiting == 0


def test_a_worker_that_leaves_names_what_it_held() -> None:
    roster = Roster(["cpu"], Clock())
    roster.join("w0", "cpu", 3)
    for name in ("b", "a"):
        roster.give(name, "w0")
    assert roster.leave("w0") == ["a", "b"]
    assert roster.leave("w0") == [] and roster.holder("a") is None


class DispatcherMachine(RuleBasedStateMachine):
    """Whatever happens, no request is lost, doubled, or given without credit."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.dispatcher = make_dispatcher(self.clock)
        self.waiting: set[str] = set()
        self.running: dict[str, str] = {}
        self.workers: dict[str, tuple[str, int]] = {}
        self.draining: set[str] = set()
        self.numbers = iter(range(10**6))

    @rule(device_class=st.sampled_from(CLASSES), tier=st.sampled_from(["vip", "standard"]))
    def enqueue(self, device_class: str, tier: str) -> None:
        name = f"r{next(self.numbers)}"
        try:
            self.dispatcher.enqueue(ticket(name, device_class, tier=tier))
            self.waiting.add(name)
        except NoWorker:
            assert not self.workers.keys() - self.draining

    @rule(device_class=st.sampled_from(CLASSES), slots=st.integers(1, 3))
    def join(self, device_class: str, slots: int) -> None:
        name = f"w{next(self.numbers)}"
        self.dispatcher.roster.join(name, device_class, slots)
        self.workers[name] = (device_class, slots)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        held = self.dispatcher.roster.leave(name)
        assert held == sorted(r for r, w in self.running.items() if w == name)
        for request_id in held:
            del self.running[request_id]
        del self.workers[name]
        self.draining.discard(name)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        self.dispatcher.roster.drain(name)
        self.draining.add(name)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        assert self.dispatcher.release(name) == self.running.pop(name)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.dispatcher.withdraw(name)
        assert not self.dispatcher.withdraw(name)
        self.waiting.remove(name)

    @rule(seconds=st.sampled_from([0.5, 4.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def expire(self) -> None:
        for late, error in self.dispatcher.overdue():
            assert isinstance(error, NoWorker)
            self.waiting.remove(late.request_id)

    @rule()
    def dispatch(self) -> None:
        while (assignment := self.dispatcher.next_assignment()) is not None:
            name = assignment.ticket.request_id
            self.waiting.remove(name)
            assert name not in self.running and assignment.worker_id not in self.draining
            self.running[name] = assignment.worker_id
        # What is left has no worker with credit in its class.
        for name in self.workers.keys() - self.draining:
            device_class, slots = self.workers[name]
            held = sum(worker == name for worker in self.running.values())
            if held < slots:
                assert len(self.dispatcher.queue(device_class)) == 0

    @invariant()
    def books_agree(self) -> None:
        self.dispatcher.roster.check_integrity()
        assert self.dispatcher.waiting == len(self.waiting)
        for name, (_, slots) in self.workers.items():
            held = sum(worker == name for worker in self.running.values())
            assert self.dispatcher.roster.held(name) == held <= slots


DispatcherMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestDispatcherMachine = DispatcherMachine.TestCase
