"""Order, bound, removal and age of the waiting queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror_sd.errors import QueueFull
from mirror_sd.scheduler.priority_queue import PriorityQueue, QueueRules
from mirror_sd.scheduler.ticket import Ticket


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ticket(name: str, tier: str = "standard", arrived_at: float = 0.0, **fields: float) -> Ticket:
    return Ticket(name, "cpu", tier, "default", arrived_at, **fields)


def drain(queue: PriorityQueue) -> list[str]:
    return [queue.pop()[0].request_id for _ in range(len(queue))]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("push"),
            st.integers(0, 9),
            st.sampled_from(["vip", "standard", "unheard of"]),
            st.integers(0, 5).map(float),
        ),
        st.tuples(st.just("pop"), st.just(0), st.just(""), st.just(0.0)),
        st.tuples(st.just("remove"), st.integers(0, 9), st.just(""), st.just(0.0)),
    ),
    max_size=80,
)


@given(OPERATIONS)
def test_queue_behaves_like_a_sorted_list(operations: list[tuple[str, int, str, float]]) -> None:
    queue = PriorityQueue(QueueRules(1000), Clock())
    model: list[tuple[tuple[bool, float, int], str]] = []
    for step, (kind, number, tier, arrived_at) in enumerate(operations):
        name = f"r{number}"
        is_there = name in [entry[1] for entry in model]
        assert (name in queue) == is_there
        if kind == "push" and not is_there:
            queue.push(ticket(name, tier, arrived_at))
            model.append(((tier != "vip", arrived_at, step), name))
            model.sort()
        elif kind == "pop" and model:
            assert queue.pop()[0].request_id == model.pop(0)[1]
        elif kind == "remove":
            assert (queue.remove(name) is not None) == is_there
            model = [entry for entry in model if entry[1] != name]
        assert len(queue) == len(model)
        assert queue.depth("vip") == sum(not key[0] for key, _ in model)
    assert drain(queue) == [name for _, name in model]


def test_vip_goes_first_and_each_tier_in_order_of_arrival() -> None:
    queue = PriorityQueue(QueueRules(10), Clock())
    for name, tier, arrived_at in (
        ("s2", "standard", 2),
        ("v3", "vip", 3),
        ("s1", "standard", 1),
        ("v1", "vip", 1),
    ):
        queue.push(ticket(name, tier, arrived_at))
    assert drain(queue) == ["v1", "v3", "s1", "s2"]


def test_another_key_makes_another_order_within_a_tier() -> None:
    queue = PriorityQueue(QueueRules(10), Clock(), order=lambda t: (-t.arrived_at,))
    queue.push(ticket("late", arrived_at=3.0))
    queue.push(ticket("soon", arrived_at=9.0))
    assert drain(queue) == ["soon", "late"]


def test_removals_do_not_let_the_heap_grow() -> None:
    queue = PriorityQueue(QueueRules(10), Clock())
    for i in range(10_000):
        queue.push(ticket(f"r{i}"))
        queue.remove(f"r{i}")
    assert all(len(tier._turns) < 200 for tier in queue._tiers.values())


def test_full_queue_refuses_with_the_time_its_drain_takes() -> None:
    clock = Clock()
    queue = PriorityQueue(QueueRules(10), clock)
    for i in range(10):
        queue.push(ticket(f"r{i}"))
    with pytest.raises(QueueFull) as full:
        queue.push(ticket("more"))
    assert full.value.retry_after_s == 60.0, "nothing has left yet"
    for i in range(5):
        queue.push(ticket(f"s{i}")) if len(queue) < 10 else None
        clock.now += 2.0
        queue.pop()
    while len(queue) < 10:
        queue.push(ticket(f"t{len(queue)}"))
    with pytest.raises(QueueFull) as full:
        queue.push(ticket("more"))
    # Five left in the eight seconds since the first of them did: ten take about sixteen.
    assert full.value.retry_after_s == pytest.approx(16.0)
    assert len(queue) == 10 and "more" not in queue


def test_the_same_id_cannot_wait_twice() -> None:
    queue = PriorityQueue(QueueRules(10), Clock())
    queue.push(ticket("a"))
    with pytest.raises(ValueError, match="waiting already"):
        queue.push(ticket("a"))


def test_age_is_that_of_the_longest_waiting_and_zero_when_empty() -> None:
    clock = Clock()
    queue = PriorityQueue(QueueRules(10), clock)
    assert queue.oldest_age_s() == 0.0
    queue.push(ticket("a"))
    clock.now += 3
    queue.push(ticket("b", "vip"))
    clock.now += 1
    assert queue.oldest_age_s() == 4.0
    queue.remove("a")
    assert queue.oldest_age_s() == 1.0
    _, waited_s = queue.pop()
    assert (waited_s, queue.oldest_age_s()) == (1.0, 0.0)


def test_expired_tickets_leave_the_queue() -> None:
    clock = Clock()
    queue = PriorityQueue(QueueRules(10), clock)
    queue.push(ticket("a", deadline=101.0))
    queue.push(ticket("b", deadline=103.0))
    queue.push(ticket("c"))
    clock.now = 102.0
    assert [t.request_id for t in queue.expired()] == ["a"]
    assert queue.expired() == [] and drain(queue) == ["b", "c"]
