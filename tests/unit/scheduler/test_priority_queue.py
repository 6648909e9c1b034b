"""Order, bound, removal and age of the waiting queue."""

from __future__ import annotations

from typing import Any

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


def ticket(name: str, tier: str = "standard", arrived_at: float = 0.0, **fields: Any) -> Ticket:
    fields = {"tenant": "default", **fields}
    return Ticket(name, "cpu", tier, arrived_at=arrived_at, **fields)


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


def rules(**fields: float) -> QueueRules:
    return QueueRules(**{"limit": 10_000, **fields})


def test_standard_gets_its_share_while_vip_waits_too() -> None:
    queue = PriorityQueue(rules(standard_share=0.2), Clock())
    for i in range(100):
        queue.push(ticket(f"v{i}", "vip"))
        queue.push(ticket(f"s{i}"))
    taken = [queue.pop()[0].tier for _ in range(50)]
    assert taken.count("standard") == 10
    assert max(len(run) for run in "".join(t[0] for t in taken).split("s")) <= 5


def test_a_share_is_not_saved_up_while_one_tier_waits_alone() -> None:
    queue = PriorityQueue(rules(standard_share=0.25), Clock())
    for i in range(100):
        queue.push(ticket(f"v{i}", "vip"))
    for _ in range(50):
        queue.pop()
    queue.push(ticket("s"))
    assert [queue.pop()[0].tier for _ in range(3)] == ["vip"] * 3


def test_a_standard_request_near_its_longest_wait_goes_before_vip() -> None:
    clock = Clock()
    queue = PriorityQueue(rules(max_wait_s=10.0), clock)
    queue.push(ticket("old"))
    clock.now += 3
    queue.push(ticket("newer"))
    queue.push(ticket("v", "vip"))
    clock.now += 5
    pick = queue.pick()
    assert pick is not None and pick.ticket.request_id == "old" and pick.is_entitled
    assert drain(queue) == ["old", "v", "newer"]


def test_old_standard_requests_take_every_second_turn_and_no_more() -> None:
    clock = Clock()
    queue = PriorityQueue(rules(max_wait_s=10.0), clock)
    for i in range(3):
        queue.push(ticket(f"old{i}"))
    clock.now += 9
    for i in range(3):
        queue.push(ticket(f"v{i}", "vip"))
    assert drain(queue) == ["old0", "v0", "old1", "v1", "old2", "v2"]


def test_a_vip_can_be_asked_for_whoever_is_next() -> None:
    clock = Clock()
    queue = PriorityQueue(rules(max_wait_s=10.0), clock)
    queue.push(ticket("old"))
    queue.push(ticket("v", "vip"))
    clock.now += 20
    picks = [queue.pick(vip_first=is_first) for is_first in (False, True)]
    assert [pick.ticket.request_id for pick in picks if pick] == ["old", "v"]


def test_within_a_tenant_the_one_that_must_be_served_soonest_is_next() -> None:
    queue = PriorityQueue(rules(max_wait_s=30.0), Clock())
    queue.push(ticket("patient", arrived_at=100.0, deadline=700.0))
    queue.push(ticket("urgent", arrived_at=104.0, deadline=110.0))
    queue.push(ticket("later", arrived_at=102.0))
    assert drain(queue) == ["urgent", "patient", "later"]


def test_a_resumed_request_keeps_its_place() -> None:
    queue = PriorityQueue(rules(), Clock())
    for i in range(5):
        queue.push(ticket(f"s{i}", arrived_at=50.0 + i))
    queue.push(ticket("resumed", arrived_at=10.0, is_resumed=True))
    assert drain(queue)[0] == "resumed"


COSTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 50).map(float)), min_size=30, max_size=120
)


@given(COSTS)
def test_tenants_that_wait_are_served_equal_work(asked: list[tuple[str, float]]) -> None:
    queue = PriorityQueue(rules(), Clock())
    for i, (tenant, cost) in enumerate(asked):
        queue.push(Ticket(f"r{i}", "cpu", "standard", tenant, 0.0, cost=cost))
    served = dict.fromkeys("abc", 0.0)
    left = {tenant: sum(t == tenant for t, _ in asked) for tenant in "abc"}
    while all(left[tenant] for tenant in {tenant for tenant, _ in asked}):
        taken, _ = queue.pop()
        served[taken.tenant] += taken.cost
        left[taken.tenant] -= 1
        waiting = [served[tenant] for tenant in "abc" if left[tenant]]
        if len(waiting) > 1:
            # Nobody is ahead by more than two of the largest requests there are.
            assert max(waiting) - min(waiting) <= 2 * 50.0


def test_a_tenant_that_floods_does_not_delay_another() -> None:
    queue = PriorityQueue(rules(), Clock())
    for i in range(1000):
        queue.push(Ticket(f"flood{i}", "cpu", "standard", "a", 0.0, cost=10.0))
    for _ in range(10):
        queue.pop()
    queue.push(Ticket("one", "cpu", "standard", "b", 5.0, cost=10.0))
    assert "one" in [queue.pop()[0].request_id for _ in range(2)]


def test_idling_saves_nothing_up() -> None:
    queue = PriorityQueue(rules(), Clock())
    queue.push(Ticket("b0", "cpu", "standard", "b", 0.0))
    for i in range(200):
        queue.push(Ticket(f"a{i}", "cpu", "standard", "a", 0.0))
    for _ in range(150):
        queue.pop()
    for i in range(100):
        queue.push(Ticket(f"b{i + 1}", "cpu", "standard", "b", 0.0))
    taken = [queue.pop()[0].tenant for _ in range(20)]
    assert taken.count("a") in (9, 10, 11), "b was idle for long, and is owed nothing"


def test_nor_does_coming_and_going_cancel_a_debt() -> None:
    queue = PriorityQueue(rules(), Clock())
    for i in range(20):
        queue.push(Ticket(f"a{i}", "cpu", "standard", "a", 0.0, cost=1.0))
    queue.push(Ticket("b0", "cpu", "standard", "b", 0.0, cost=10.0))
    while "b0" in queue:
        queue.pop()
    queue.push(Ticket("b1", "cpu", "standard", "b", 0.0, cost=10.0))
    taken = [queue.pop()[0].request_id for _ in range(9)]
    assert "b1" not in taken, "it was served ten a's worth"


def test_vip_may_wait_beyond_the_limit_and_no_others() -> None:
    queue = PriorityQueue(rules(limit=10, vip_extra=0.25), Clock())
    for i in range(10):
        queue.push(ticket(f"s{i}"))
    for i in range(3):
        queue.push(ticket(f"v{i}", "vip"))
    for name, tier in (("s", "standard"), ("v", "vip")):
        with pytest.raises(QueueFull):
            queue.push(ticket(name, tier))
    queue.push(ticket("resumed", is_resumed=True))


def test_a_longer_wait_than_is_allowed_is_foreseen_and_refused() -> None:
    clock = Clock()
    queue = PriorityQueue(rules(max_wait_s=10.0), clock)
    for i in range(100):
        queue.push(ticket(f"s{i}"))
    for _ in range(40):
        clock.now += 0.5
        queue.pop()
    # Two leave in a second, and sixty are waiting.
    with pytest.raises(QueueFull, match="no wait is certain") as refusal:
        queue.push(ticket("more"))
    assert refusal.value.retry_after_s == pytest.approx(30 - 6, abs=2)
    queue.push(ticket("v", "vip"))
    for _ in range(42):
        queue.pop()
    queue.push(ticket("more"))


def test_a_burst_after_calm_is_not_refused_for_how_little_came_before() -> None:
    clock = Clock()
    queue = PriorityQueue(rules(max_wait_s=5.0), clock)
    for i in range(40):
        for name in (f"calm{i}", f"pair{i}", f"third{i}"):
            queue.push(ticket(name))
        queue.pop()
        queue.pop()
        queue.remove(f"third{i}")
        clock.now += 2
    for i in range(200):
        queue.push(ticket(f"burst{i}"))


def test_a_ticket_that_becomes_more_urgent_keeps_its_age() -> None:
    clock = Clock()
    queue = PriorityQueue(rules(), clock)
    queue.push(ticket("a"))
    queue.push(ticket("b"))
    clock.now += 3
    assert queue.replace(ticket("b", "vip")) and not queue.replace(ticket("c"))
    assert (queue.depth("vip"), queue.oldest_age_s("vip")) == (1, 3.0)
    assert drain(queue) == ["b", "a"]


@pytest.mark.parametrize("tier", ["standard", "vip"])
def test_a_ticket_that_is_changed_is_still_the_oldest(tier: str) -> None:
    clock = Clock()
    queue = PriorityQueue(rules(max_wait_s=10.0), clock)
    queue.push(ticket("old"))
    clock.now += 5
    queue.push(ticket("young"))
    queue.push(ticket("young vip", "vip", 5.0))
    for _ in range(50):
        assert queue.replace(ticket("old", tier, deadline=clock.now + 600))
    assert sum(len(lane.heap) for lane in queue._tiers[tier]._lanes.values()) < 20
    clock.now += 4
    assert (queue.oldest_age_s(tier), len(queue)) == (9.0, 3)
    assert queue.pop()[0].request_id == "old", "its time is nearly over"
    assert sorted(drain(queue)) == ["young", "young vip"]


def test_a_tenant_that_floods_does_not_have_another_refused() -> None:
    clock = Clock()
    queue = PriorityQueue(rules(max_wait_s=10.0), clock)
    flood = 0
    with pytest.raises(QueueFull):
        while True:
            queue.push(ticket(f"flood {flood}", tenant="many", cost=40.0))
            flood += 1
            if flood % 5 == 0 and flood > 10:
                clock.now += 1.0
                queue.pop()
    for i in range(3):
        queue.push(ticket(f"few {i}", tenant="few", cost=40.0))
    order = drain(queue)
    assert max(order.index(f"few {i}") for i in range(3)) < 7
    assert len(order) > 20


def test_a_tenant_is_refused_for_its_own_backlog_and_the_equal_shares_of_others() -> None:
    clock = Clock()
    queue = PriorityQueue(rules(max_wait_s=10.0), clock)
    refused = 0
    for i in range(60):
        clock.now += 0.25
        try:
            queue.push(ticket(f"r{i}", tenant="abc"[i % 3], cost=40.0))
        except QueueFull:
            refused += 1
        if i % 4 == 3:
            queue.pop()
    assert refused > 20 and len(queue) < 10
