"""Credit, choice of worker, fall-back between classes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mirror_sd.errors import DeadlineExceeded, NoWorker
from mirror_sd.scheduler.dispatcher import Dispatcher, DispatchRules
from mirror_sd.scheduler.priority_queue import QueueRules
from mirror_sd.scheduler.roster import Roster
from mirror_sd.scheduler.ticket import Ticket
from tests.unit.scheduler.test_priority_queue import Clock

# The machine may be busy with other tests.
SLOW_IS_FINE = [HealthCheck.too_slow]
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


def test_the_batch_limit_holds_for_standard_and_not_for_vip() -> None:
    dispatcher = make_dispatcher(Clock())
    dispatcher.roster.join("w0", "cpu", 4)
    dispatcher.roster.set_limit("w0", 2)
    for i in range(3):
        dispatcher.enqueue(ticket(f"s{i}"))
    dispatcher.enqueue(ticket("v0", tier="vip"))
    assert [name for name, _ in assignments(dispatcher)] == ["v0", "s0"]
    for i in range(1, 4):
        dispatcher.enqueue(ticket(f"v{i}", tier="vip"))
    assert [name for name, _ in assignments(dispatcher)] == ["v1", "v2"], "the slots are the end"


def test_a_preferred_worker_is_taken_unless_it_is_much_busier() -> None:
    roster = Roster(["cpu"], Clock())
    for name in ("w0", "w1"):
        roster.join(name, "cpu", 4)
    given = []
    for i in range(4):
        worker_id = roster.choose(["cpu"], preferred="w1")
        assert worker_id is not None
        roster.give(f"r{i}", worker_id)
        given.append(worker_id)
    assert given == ["w1", "w1", "w0", "w1"]
    assert roster.choose(["cpu"], preferred="not here") == "w0"


# Batches.


def batching(clock: Clock, slots: int = 8, **rules: Any) -> Dispatcher:
    dispatcher = make_dispatcher(clock, batch_wait_s=0.05, **rules)
    dispatcher.roster.join("w0", "cpu", slots)
    return dispatcher


def newcomer(name: str, clock: Clock, **fields: Any) -> Ticket:
    given: dict[str, Any] = {"tier": "standard", "waits_for_batch": True, **fields}
    return Ticket(name, "cpu", tenant="t", arrived_at=clock.now, **given)


def test_an_idle_worker_gets_work_at_once_and_a_busy_one_gets_newcomers_together() -> None:
    clock = Clock()
    dispatcher = batching(clock)
    dispatcher.enqueue(newcomer("a", clock))
    assert assignments(dispatcher) == [("a", "w0")]
    dispatcher.enqueue(newcomer("b", clock))
    assert assignments(dispatcher) == []
    assert dispatcher.due_at == pytest.approx(clock.now + 0.05)
    clock.now += 0.03
    dispatcher.enqueue(newcomer("c", clock))
    assert assignments(dispatcher) == []
    clock.now = dispatcher.due_at
    assert [name for name, _ in assignments(dispatcher)] == ["b", "c"]


def test_a_batch_that_fills_the_worker_is_not_waited_for() -> None:
    clock = Clock()
    dispatcher = batching(clock, slots=3)
    dispatcher.enqueue(newcomer("a", clock))
    assignments(dispatcher)
    dispatcher.enqueue(newcomer("b", clock))
    assert assignments(dispatcher) == []
    dispatcher.enqueue(newcomer("c", clock))
    assert [name for name, _ in assignments(dispatcher)] == ["b", "c"]


@pytest.mark.parametrize("fields", [{"tier": "vip"}, {"waits_for_batch": False}])
def test_a_vip_and_one_that_came_degraded_wait_for_no_batch(fields: dict[str, Any]) -> None:
    clock = Clock()
    dispatcher = batching(clock)
    dispatcher.enqueue(newcomer("a", clock))
    assignments(dispatcher)
    dispatcher.enqueue(newcomer("b", clock, **fields))
    assert [name for name, _ in assignments(dispatcher)] == ["b"]


# Stealing.


def test_an_idle_class_takes_what_has_waited_for_a_busy_one() -> None:
    clock = Clock()
    dispatcher = make_dispatcher(clock, steal_after_s=0.25)
    dispatcher.roster.join("g0", "gpu", 1)
    dispatcher.roster.join("c0", "cpu", 2)
    for name in "abc":
        dispatcher.enqueue(ticket(name, "gpu"))
    assert assignments(dispatcher) == [("a", "g0")]
    assert dispatcher.due_at == pytest.approx(clock.now + 0.25)
    clock.now += 0.25
    assignment = dispatcher.next_assignment()
    assert assignment is not None and assignment.is_stolen
    assert (assignment.ticket.request_id, assignment.served_by) == ("b", "cpu")
    assert assignments(dispatcher) == [("c", "c0")]


def test_a_class_with_requests_of_its_own_steals_nothing() -> None:
    clock = Clock()
    dispatcher = make_dispatcher(clock, steal_after_s=0.25)
    dispatcher.roster.join("g0", "gpu", 1)
    dispatcher.roster.join("c0", "cpu", 1)
    for name, kind in (("a", "gpu"), ("b", "cpu"), ("c", "gpu"), ("d", "cpu")):
        dispatcher.enqueue(ticket(name, kind))
    assert sorted(assignments(dispatcher)) == [("a", "g0"), ("b", "c0")]
    clock.now += 10
    dispatcher.release("b")
    assert assignments(dispatcher) == [("d", "c0")]
    dispatcher.release("d")
    assert assignments(dispatcher) == [("c", "c0")]


def test_a_class_that_is_held_back_steals_nothing() -> None:
    clock = Clock()
    dispatcher = make_dispatcher(clock, steal_after_s=0.25)
    dispatcher.roster.join("g0", "gpu", 4)
    dispatcher.roster.join("c0", "cpu", 1)
    for name in "abc":
        dispatcher.enqueue(ticket(name, "cpu", spare=("gpu",) if name != "c" else ()))
    assert assignments(dispatcher) == [("a", "c0")]
    clock.now += 10
    dispatcher.release("a")
    assert assignments(dispatcher) == [("b", "c0"), ("c", "g0")]


def test_a_stream_that_is_resumed_waits_longer_before_it_is_stolen() -> None:
    clock = Clock()
    dispatcher = make_dispatcher(clock, steal_after_s=0.25)
    dispatcher.roster.join("g0", "gpu", 1)
    dispatcher.roster.join("c0", "cpu", 1)
    dispatcher.enqueue(ticket("a", "gpu"))
    dispatcher.enqueue(ticket("b", "gpu", is_resumed=True))
    assert assignments(dispatcher) == [("a", "g0")]
    clock.now += 1
    assert assignments(dispatcher) == []
    clock.now += 2
    assert assignments(dispatcher) == [("b", "c0")]


# Displacement.


def full(clock: Clock, *tokens_left: int, **rules: Any) -> Dispatcher:
    """A worker whose slots are taken by standard requests with so many tokens left."""
    dispatcher = make_dispatcher(clock, preemption=True, **rules)
    dispatcher.roster.join("w0", "cpu", len(tokens_left))
    for i, tokens in enumerate(tokens_left):
        dispatcher.enqueue(ticket(f"s{i}", tokens_left=tokens))
    assert len(assignments(dispatcher)) == len(tokens_left)
    return dispatcher


def left(ticket: Ticket) -> int:
    return ticket.tokens_left


def test_a_vip_displaces_the_standard_request_with_most_left() -> None:
    dispatcher = full(Clock(), 50, 200, 100)
    dispatcher.enqueue(ticket("v", tier="vip"))
    assert assignments(dispatcher) == []
    assert dispatcher.next_displaced(left) == "s1"
    dispatcher.release("s1")
    dispatcher.note_displaced("s1")
    dispatcher.enqueue(ticket("s1", tokens_left=150, is_resumed=True))
    assert assignments(dispatcher) == [("v", "w0")]
    assert dispatcher.next_displaced(left) is None, "no VIP waits"


def test_a_standard_request_displaces_nobody_and_a_vip_no_vip() -> None:
    clock = Clock()
    dispatcher = full(clock, 50)
    dispatcher.enqueue(ticket("s"))
    assert dispatcher.next_displaced(left) is None
    dispatcher.release("s0")
    dispatcher.withdraw("s")
    dispatcher.enqueue(ticket("v0", tier="vip", tokens_left=500))
    assert assignments(dispatcher) == [("v0", "w0")]
    dispatcher.enqueue(ticket("v1", tier="vip"))
    assert dispatcher.next_displaced(left) is None


def test_nobody_is_displaced_twice_within_a_second() -> None:
    clock = Clock()
    dispatcher = full(clock, 100, 50)
    for name in ("v0", "v1"):
        dispatcher.enqueue(ticket(name, tier="vip"))
    dispatcher.note_displaced("s0")
    clock.now += 0.9
    assert dispatcher.next_displaced(left) == "s1"
    dispatcher.note_displaced("s1")
    dispatcher.release("s1")
    assert assignments(dispatcher) == [("v0", "w0")]
    assert dispatcher.next_displaced(left) is None, "a tenth of a second too soon"
    clock.now += 0.2
    assert dispatcher.next_displaced(left) == "s0"


def test_one_that_is_about_to_end_is_left_alone() -> None:
    dispatcher = full(Clock(), 2)
    dispatcher.enqueue(ticket("v", tier="vip"))
    assert dispatcher.next_displaced(left) is None


def test_nobody_is_displaced_while_another_worker_of_the_class_has_a_slot() -> None:
    dispatcher = full(Clock(), 100)
    dispatcher.roster.join("w1", "cpu", 1)
    dispatcher.enqueue(ticket("v", tier="vip"))
    assert dispatcher.next_displaced(left) is None
    assert assignments(dispatcher) == [("v", "w1")]


def test_one_whose_turn_it_was_by_age_or_share_is_not_displaced() -> None:
    clock = Clock()
    dispatcher = make_dispatcher(clock, queue=QueueRules(limit=100, max_wait_s=10), preemption=True)
    dispatcher.enqueue(ticket("old", tokens_left=100))
    clock.now += 9
    dispatcher.roster.join("w0", "cpu", 1)
    dispatcher.enqueue(ticket("v", tier="vip"))
    assert assignments(dispatcher) == [("old", "w0")]
    clock.now += 4.9
    assert dispatcher.next_displaced(left) is None
    clock.now += 0.2
    assert dispatcher.next_displaced(left) == "old", "it has had its time"


def test_a_slot_that_was_made_free_for_a_vip_goes_to_it() -> None:
    clock = Clock()
    queue = QueueRules(limit=100, max_wait_s=10)
    dispatcher = full(clock, 100, queue=queue)
    dispatcher.enqueue(ticket("old", tokens_left=100))
    clock.now += 9
    dispatcher.enqueue(ticket("v", tier="vip"))
    assert dispatcher.next_displaced(left) == "s0"
    dispatcher.release("s0")
    assert assignments(dispatcher) == [("v", "w0")]
    dispatcher.release("v")
    dispatcher.enqueue(ticket("v1", tier="vip"))
    assert assignments(dispatcher) == [("old", "w0")], "the next one is for whose turn it is"


def test_preemption_can_be_switched_off() -> None:
    dispatcher = full(Clock(), 100)
    off = make_dispatcher(Clock())
    off.roster.join("w0", "cpu", 1)
    off.enqueue(ticket("s", tokens_left=100))
    assignments(off)
    for each in (dispatcher, off):
        each.enqueue(ticket("v", tier="vip"))
    assert (dispatcher.next_displaced(left), off.next_displaced(left)) == ("s0", None)


class DispatcherMachine(RuleBasedStateMachine):
    """Whatever happens, no request is lost, doubled, or given without credit."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.dispatcher = make_dispatcher(self.clock, preemption=True)
        self.tiers: dict[str, str] = {}
        self.waiting: set[str] = set()
        self.running: dict[str, str] = {}
        self.workers: dict[str, tuple[str, int]] = {}
        self.draining: set[str] = set()
        self.numbers = iter(range(10**6))

    @rule(device_class=st.sampled_from(CLASSES), tier=st.sampled_from(["vip", "standard"]))
    def enqueue(self, device_class: str, tier: str) -> None:
        name = f"r{next(self.numbers)}"
        try:
            self.dispatcher.enqueue(ticket(name, device_class, tier=tier, tokens_left=100))
            self.waiting.add(name)
            self.tiers[name] = tier
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
            self.dispatcher.release(request_id)
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

    @rule()
    def displace(self) -> None:
        self.dispatch()
        name = self.dispatcher.next_displaced(lambda ticket: ticket.tokens_left)
        if name is None:
            return
        assert self.tiers[name] == "standard" and name in self.running
        kinds = {self.workers[self.running[name]][0]}
        assert any(self.tiers[other] == "vip" for other in self.waiting), "for nobody"
        assert kinds <= set(CLASSES)
        worker_id = self.dispatcher.release(name)
        assert worker_id == self.running.pop(name)
        self.dispatcher.note_displaced(name)
        assert self.dispatcher.next_displaced(lambda ticket: ticket.tokens_left) != name
        assignment = self.dispatcher.next_assignment()
        assert assignment is not None and assignment.worker_id == worker_id
        assert self.tiers[assignment.ticket.request_id] == "vip"
        self.waiting.remove(assignment.ticket.request_id)
        self.running[assignment.ticket.request_id] = worker_id

    @invariant()
    def books_agree(self) -> None:
        self.dispatcher.check_integrity()
        assert self.dispatcher.waiting == len(self.waiting)
        for name, (_, slots) in self.workers.items():
            held = sum(worker == name for worker in self.running.values())
            assert self.dispatcher.roster.held(name) == held <= slots


DispatcherMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=SLOW_IS_FINE
)
TestDispatcherMachine = DispatcherMachine.TestCase
