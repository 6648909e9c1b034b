"""Requests that are merged: each gets exactly its answer, whatever happens to those it shares
with, and nothing of one tenant's ever reaches another's."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mirror_sd import messages, telemetry
from mirror_sd.messages import (
    AnyMessage,
    Cancel,
    Chunk,
    DraftHint,
    Failed,
    Finished,
    Heartbeat,
    MergeProfile,
    Outputs,
    SamplingParams,
    SequenceUsage,
    StatsRequest,
    Submit,
    TokenLogprob,
)
from mirror_sd.serving.delivery import Delivery
from tests.unit.serving.test_broker_switchboard import Desk, of_type

# The machine may be busy with other tests.
SLOW_IS_FINE = [HealthCheck.too_slow]
PERMUTATIONS = 64


def signature(seed: int, changed: int = 0) -> bytes:
    """Random minima; `changed` of 64 differ from those of the same seed without."""
    minima = np.random.default_rng(seed).integers(0, 2**32, PERMUTATIONS, dtype=np.uint32)
    minima[:changed] += np.uint32(1)
    return minima.astype("<u4").tobytes()


def submit(
    name: str,
    text: str = "a1",
    *,
    tenant: str = "t",
    tokens: int = 10,
    changed: int = 0,
    partition: str = "p",
    exact: bool = True,
    **fields: Any,
) -> Submit:
    """A request whose text is a letter, which says what is alike, and a number."""
    prompt = (ord(text[0]), *map(int, text[1:]))
    profile = MergeProfile(
        exact=f"{tenant}{text}{tokens}".encode() if exact else b"",
        partition=f"{tenant}{partition}".encode(),
        scope=tenant.encode(),
        signature=signature(ord(text[0]), changed),
    )
    params = SamplingParams(max_tokens=tokens, seed=1, temperature=0.0, **fields.pop("params", {}))
    given: dict[str, Any] = {"model": "m", "timeout_s": None, "merge": profile, **fields}
    return Submit(request_id=name, tenant=tenant, prompt=prompt, params=params, **given)


def chunk(name: str, index: int, *tokens: int) -> Chunk:
    return Chunk(request_id=name, index=index, tokens=tokens)


def finished(name: str, count: int, prompt_tokens: int = 2) -> Finished:
    usage = SequenceUsage(prompt_tokens=prompt_tokens, completion_tokens=count)
    return Finished(request_id=name, reason="length", usage=usage)


def desk(slots: int = 4, **sections: Any) -> Desk:
    made = Desk(**sections)
    made.register(slots=slots)
    return made


def test_identical_requests_are_one_generation_with_the_text_so_far_for_late_ones() -> None:
    board = desk()
    assert of_type(board.gateway(submit("a"), b"g1"), Submit)
    assert board.gateway(submit("b"), b"g2") == [], "it waits for nothing and starts nothing"
    assert board.worker(chunk("a", 0, 7, 8)) == [
        (b"g1", chunk("a", 0, 7, 8)),
        (b"g2", chunk("b", 0, 7, 8)),
    ]
    assert board.worker(chunk("a", 2, 9))[1] == (b"g2", chunk("b", 2, 9))
    assert board.gateway(submit("c"), b"g1") == [(b"g1", chunk("c", 0, 7, 8, 9))]
    sent = board.worker(Outputs(items=(chunk("a", 3, 5), finished("a", 4))))
    assert sent == [
        (
            b"g1",
            Outputs(items=(chunk("a", 3, 5), chunk("c", 3, 5), finished("a", 4), finished("c", 4))),
        ),
        (b"g2", Outputs(items=(chunk("b", 3, 5), finished("b", 4)))),
    ]
    assert board.board.is_idle


def test_a_finished_answer_is_no_answer_to_the_next_request_but_a_draft() -> None:
    board = desk()
    board.gateway(submit("a"))
    board.worker(chunk("a", 0, 7, 8))
    board.worker(finished("a", 2))
    sent = board.gateway(submit("b"))
    assert [type(message) for _, message in sent] == [Submit, DraftHint]
    assert sent[1] == (b"w", DraftHint(request_id="b", index=0, tokens=(7, 8)))


@pytest.mark.parametrize(
    "other",
    [
        submit("b", "a2"),
        submit("b", tokens=11),
        submit("b", exact=False),
        submit("b", tenant="u"),
        submit("b", model="n"),
        msgspec.structs.replace(submit("b"), tenant="u"),
        msgspec.structs.replace(submit("b"), merge=None),
    ],
    ids=["prompt", "parameters", "chance", "tenant", "model", "forged tenant", "no profile"],
)
def test_other_requests_run_alone(other: Submit) -> None:
    board = desk()
    board.gateway(submit("a"))
    assert of_type(board.gateway(other), Submit)


def test_without_merging_identical_requests_run_alone() -> None:
    board = desk(merge={"enabled": False})
    board.gateway(submit("a"))
    assert [type(m) for _, m in board.gateway(submit("b"))] == [Submit]


def test_an_answer_goes_on_for_others_when_the_request_that_began_it_is_cancelled() -> None:
    board = desk()
    board.gateway(submit("a"), b"g1")
    board.gateway(submit("b"), b"g2")
    board.worker(chunk("a", 0, 7))
    assert board.gateway(Cancel(request_id="a"), b"g1") == []
    assert board.worker(chunk("a", 1, 8)) == [(b"g2", chunk("b", 1, 8))]
    assert board.gateway(submit("a"), b"g1") == [(b"g1", chunk("a", 0, 7, 8))], "it may come again"
    assert board.gateway(Cancel(request_id="b"), b"g2") == []
    assert board.gateway(Cancel(request_id="a"), b"g1") == [(b"w", Cancel(request_id="a"))]
    assert board.board.is_idle


def test_an_id_that_comes_again_with_another_request_gets_a_generation_of_its_own() -> None:
    board = desk()
    board.gateway(submit("a"), b"g1")
    board.gateway(submit("b"), b"g2")
    board.gateway(Cancel(request_id="a"), b"g1")
    [(_, again)] = of_type(board.gateway(submit("a", "z9"), b"g1"), Submit)
    assert isinstance(again, Submit) and again.request_id != "a" and again.prompt == (122, 9)
    assert board.worker(chunk("a", 0, 7)) == [(b"g2", chunk("b", 0, 7))]
    assert board.worker(chunk(again.request_id, 0, 5)) == [(b"g1", chunk("a", 0, 5))]
    assert board.worker(finished(again.request_id, 1)) == [(b"g1", finished("a", 1))]
    assert board.gateway(Cancel(request_id="b"), b"g2") == [(b"w", Cancel(request_id="a"))]


def test_a_lost_gateway_leaves_the_answer_to_the_others() -> None:
    board = desk()
    board.gateway(submit("a"), b"g1")
    board.gateway(submit("b"), b"g2")
    board.board.unreachable("gateway", b"g1", "gone")
    assert board.worker(chunk("a", 0, 7)) == [(b"g2", chunk("b", 0, 7))]


def test_all_that_share_a_lost_generation_are_told_and_meet_again() -> None:
    board = desk()
    board.gateway(submit("a"), b"g1")
    board.gateway(submit("b"), b"g2")
    board.worker(chunk("a", 0, 7, 8))
    board.board.unreachable("worker", b"w", "gone")
    failed = of_type(board.sent(), Failed)
    assert [(gateway, m.request_id, m.retryable) for gateway, m in failed] == [
        (b"g1", "a", True),
        (b"g2", "b", True),
    ]
    board.register("v", pid=12)
    [(_, again)] = of_type(board.gateway(submit("b", delivered=(7, 8)), b"g2"), Submit)
    assert again.delivered == (7, 8)
    assert board.gateway(submit("a", delivered=(7,)), b"g1") == [(b"g1", chunk("a", 1, 8))]
    assert board.worker(chunk("b", 2, 9), b"v") == [
        (b"g2", chunk("b", 2, 9)),
        (b"g1", chunk("a", 2, 9)),
    ]


def test_one_that_has_other_tokens_or_more_than_there_are_runs_alone() -> None:
    for delivered in ((7, 9), (7, 8, 9)):
        board = desk()
        board.gateway(submit("a"))
        board.worker(chunk("a", 0, 7, 8))
        assert of_type(board.gateway(submit("b", delivered=delivered)), Submit)


def test_a_generation_with_a_gap_takes_nobody_in() -> None:
    board = desk()
    board.gateway(submit("a"))
    board.worker(chunk("a", 0, 7))
    board.worker(chunk("a", 2, 8))
    assert of_type(board.gateway(submit("b")), Submit)


def test_log_probabilities_are_replayed_with_the_tokens() -> None:
    board = desk()
    wanted = {"logprobs": 0, "prompt_logprobs": True}
    first = Chunk(
        request_id="a",
        index=0,
        tokens=(7,),
        logprobs=(TokenLogprob(7, -0.5),),
        prompt_logprobs=(None, TokenLogprob(1, -1.0)),
    )
    board.gateway(submit("a", params=wanted))
    board.worker(first)
    assert board.gateway(submit("b", params=wanted)) == [
        (b"g", msgspec.structs.replace(first, request_id="b"))
    ]


def test_a_refusal_by_the_engine_reaches_all() -> None:
    board = desk()
    board.gateway(submit("a"), b"g1")
    board.gateway(submit("b"), b"g2")
    refusal = Failed(request_id="a", code="context_length_exceeded", message="no", param="messages")
    sent = board.worker(refusal)
    assert sent == [(b"g1", refusal), (b"g2", msgspec.structs.replace(refusal, request_id="b"))]
    assert board.board.is_idle


def test_a_vip_that_joins_makes_a_waiting_generation_go_first() -> None:
    board = desk(slots=1)
    board.gateway(submit("runs", "x1", tier="vip"))
    board.gateway(submit("first", "y1"))
    board.gateway(submit("a"))
    board.gateway(submit("vip", tier="vip"), b"v")
    [(_, next_one)] = of_type(board.worker(finished("runs", 0)), Submit)
    assert next_one.request_id == "a"


def test_a_vip_is_not_held_to_the_pace_of_another_class_but_drafts_from_it() -> None:
    board = desk()
    board.register("v", pid=12, slots=4, kind="gpu")
    board.gateway(submit("a"))
    board.worker(chunk("a", 0, 7))
    assert of_type(board.gateway(submit("b", device_class="gpu")), Chunk), "a standard one is"
    sent = board.gateway(submit("vip", tier="vip", device_class="gpu"))
    assert [(to, type(m)) for to, m in sent] == [(b"v", Submit), (b"v", DraftHint)]
    assert not board.gateway(submit("c", tier="vip", device_class="gpu")), "now there is one there"


def test_a_full_queue_still_takes_what_needs_no_place_in_it() -> None:
    board = desk(slots=1, scheduler={"max_queue": 1})
    board.gateway(submit("runs", "x1"))
    board.gateway(submit("waits", "y1"))
    assert of_type(board.gateway(submit("refused", "z1")), Failed)
    assert board.gateway(submit("joins", "x1")) == []


def test_a_similar_request_drafts_from_one_in_flight_and_from_a_finished_one() -> None:
    board = desk()
    board.gateway(submit("a"))
    board.worker(chunk("a", 0, 7))
    sent = board.gateway(submit("b", "a2", changed=10))
    assert sent[-1] == (b"w", DraftHint(request_id="b", index=0, tokens=(7,)))
    assert (b"w", DraftHint(request_id="b", index=1, tokens=(8, 9))) in board.worker(
        chunk("a", 1, 8, 9)
    )
    board.worker(finished("a", 3))
    assert board.gateway(submit("c", "a3", changed=20))[-1] == (
        b"w",
        DraftHint(request_id="c", index=0, tokens=(7, 8, 9)),
    )
    board.worker(finished("b", 0))
    board.worker(finished("c", 0))
    assert board.board.is_idle


def test_hints_stop_with_the_request_that_wanted_them() -> None:
    board = desk()
    board.gateway(submit("a"))
    board.gateway(submit("b", "a2"))
    board.gateway(Cancel(request_id="b"))
    assert board.worker(chunk("a", 0, 7)) == [(b"g", chunk("a", 0, 7))]


@pytest.mark.parametrize("changed", [33, 64])
def test_what_is_not_alike_gets_no_hint(changed: int) -> None:
    board = desk()
    board.gateway(submit("a"))
    board.worker(chunk("a", 0, 7))
    assert not of_type(board.gateway(submit("b", "a2", changed=changed)), DraftHint)


@pytest.mark.parametrize(
    "other",
    [
        submit("b", tenant="u"),
        msgspec.structs.replace(submit("b"), tenant="u"),
        submit("b", model="n"),
    ],
    ids=["tenant", "forged profile", "model"],
)
def test_hints_never_cross_tenants_or_models(other: Submit) -> None:
    board = desk()
    board.gateway(submit("a"))
    board.worker(chunk("a", 0, 7))
    assert not of_type(board.gateway(other), DraftHint)
    board.worker(finished("a", 1))
    again = msgspec.structs.replace(other, request_id="c")
    assert not of_type(board.gateway(again), DraftHint)


def test_a_finished_answer_is_forgotten_in_time_and_by_number() -> None:
    board = desk(merge={"expire_s": 5, "max_entries": 2})
    for name, text in (("a", "a1"), ("b", "b1"), ("c", "c1")):
        board.gateway(submit(name, text))
        board.worker(chunk(name, 0, 7))
        board.worker(finished(name, 1))
    assert not of_type(board.gateway(submit("d", "a2")), DraftHint), "there is room for two"
    assert of_type(board.gateway(submit("e", "c2")), DraftHint)
    board.wait(6)
    assert not of_type(board.gateway(submit("f", "b2")), DraftHint)


def test_the_tenant_that_keeps_most_answers_loses_first() -> None:
    board = desk(merge={"max_entries": 3})
    for name, text, tenant in (
        ("a", "a1", "u"),
        *((f"r{i}", f"{chr(98 + i)}1", "t") for i in range(6)),
    ):
        board.gateway(submit(name, text, tenant=tenant))
        board.worker(chunk(name, 0, 7))
        board.worker(finished(name, 1))
    assert of_type(board.gateway(submit("z", "a2", tenant="u")), DraftHint)


def test_a_similar_request_goes_to_the_worker_that_has_its_prefix() -> None:
    board = desk()
    board.register("v", pid=12, slots=4)
    [(first, _)] = of_type(board.gateway(submit("a")), Submit)
    board.worker(chunk("a", 0, 7), first)
    [(second, _)] = of_type(board.gateway(submit("b", "a2")), Submit)
    [(third, _)] = of_type(board.gateway(submit("c", "z1")), Submit)
    assert second == first != third


def test_an_answer_is_shared_only_by_choice_and_within_the_partition() -> None:
    for tenants, partition, changed, is_shared in (
        (["t"], "p", 5, True),
        (["t"], "other digits", 5, False),
        (["t"], "p", 12, False),
        (["u"], "p", 5, False),
        ([], "p", 5, False),
    ):
        board = desk(merge={"share_answers": tenants})
        board.gateway(submit("a"))
        board.worker(chunk("a", 0, 7))
        sent = board.gateway(submit("b", "a2345", changed=changed, partition=partition))
        assert bool(of_type(sent, Submit)) is not is_shared
        if is_shared:
            assert sent == [(b"g", chunk("b", 0, 7))]
            [(_, outputs)] = board.worker(finished("a", 1))
            assert outputs.items[1].usage.prompt_tokens == 5, "its own prompt's"


def test_merges_are_counted_by_kind() -> None:
    def counts() -> list[float]:
        kinds = ("coalesced", "shared", "hinted")
        return [telemetry.MERGED.labels(kind, "cpu")._value.get() for kind in kinds]

    before = counts()
    board = desk(merge={"share_answers": ["t"]})
    board.gateway(submit("a"))
    board.gateway(submit("b"))
    board.gateway(submit("c", "a2", changed=3))
    board.gateway(submit("d", "a3", partition="q"))
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [1, 1, 1]


def test_a_chunk_that_cannot_be_read_breaks_only_its_own_answer() -> None:
    board = desk()
    board.gateway(submit("a"), b"g1")
    board.gateway(submit("b"), b"g2")
    board.gateway(submit("z", "z1"), b"g2")
    frame = messages.encode(chunk("a", 0, 7)).replace(b"tokens\x91\x07", b"tokens\x91\xc0")
    board.board.from_worker(b"w", frame)
    assert [gateway for _, gateway, raw in (board.board.outbox.pop(),)] == [b"g1"]
    assert board.worker(chunk("z", 0, 5)) == [(b"g2", chunk("z", 0, 5))]
    assert of_type(board.gateway(submit("c"), b"g2"), Submit), "nobody joins it any more"


# Random interleavings, against gateways that hold their requests and workers that make tokens.

TENANTS = ("t", "u", "s")
SHARING = "s"
TEXTS = ("a1", "a2", "b1", "b2")
TOKENS = 6


def token_of(tenant: str, text: str, position: int) -> int:
    return TENANTS.index(tenant) * 10_000 + TEXTS.index(text) * 100 + position


@dataclass
class Client:
    """A request in a gateway, and what it may be answered."""

    gateway: bytes
    tenant: str
    text: str
    delivery: Delivery
    tokens: list[int] = field(default_factory=list)

    def allowed(self, position: int) -> set[int]:
        alike = (
            [t for t in TEXTS if t[0] == self.text[0]] if self.tenant == SHARING else [self.text]
        )
        return {token_of(self.tenant, text, position) for text in alike}


@dataclass
class Sequence:
    submit: Submit
    position: int


class MergingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()
        self.clients: dict[str, Client] = {}
        self.waiting_to_return: list[str] = []
        self.workers: dict[bytes, dict[str, Sequence]] = {}
        self.done: list[Client] = []

    @initialize(slots=st.integers(1, 3))
    def start(self, slots: int) -> None:
        self.slots = slots
        self.desk = Desk(
            merge={"share_answers": [SHARING], "max_entries": 3},
            broker={"heartbeat_ms": 10_000, "stall_s": 1e6, "worker_wait_s": 1e6},
            scheduler={"max_wait_s": 1e6},
        )

    # What happens.

    @rule(
        tenant=st.sampled_from(TENANTS),
        text=st.sampled_from(TEXTS),
        tier=st.sampled_from(["vip", "standard", "standard"]),
        gateway=st.sampled_from([b"g1", b"g2"]),
    )
    def ask(self, tenant: str, text: str, tier: str, gateway: bytes) -> None:
        name = f"r{next(self.numbers)}"
        asked = submit(name, text, tenant=tenant, tokens=TOKENS, tier=tier, partition=text[0])
        self.clients[name] = Client(gateway, tenant, text, Delivery(asked))
        self.route(self.desk.gateway(asked, gateway))

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.clients)))
        client = self.clients.pop(name)
        self.route(self.desk.gateway(Cancel(request_id=name), client.gateway))

    @rule(kind=st.sampled_from(["cpu", "gpu"]))
    def start_worker(self, kind: str) -> None:
        number = next(self.numbers)
        name = f"w{number}"
        self.workers[name.encode()] = {}
        self.route(self.desk.register(name, slots=self.slots, pid=1000 + number, kind=kind))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def lose_worker(self, data: st.DataObject) -> None:
        identity = data.draw(st.sampled_from(sorted(self.workers)))
        del self.workers[identity]
        self.desk.board.unreachable("worker", identity, "gone")
        self.route(self.desk.sent())

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), count=st.integers(1, 3))
    def step(self, data: st.DataObject, count: int) -> None:
        self.step_worker(data.draw(st.sampled_from(sorted(self.workers))), count)

    @rule(seconds=st.sampled_from([0.1, 2.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.desk.clock.now += seconds
        self.desk.board.tick()
        self.route(self.desk.sent())

    @precondition(lambda self: self.waiting_to_return)
    @rule()
    def return_one(self) -> None:
        name = self.waiting_to_return.pop(0)
        client = self.clients.get(name)
        if client is not None:
            self.route(self.desk.gateway(client.delivery.remainder(), client.gateway))

    def teardown(self) -> None:
        """Whatever has happened, all that are left get their answers."""
        if not hasattr(self, "desk"):
            return
        self.start_worker("cpu")
        for _ in range(400):
            if not self.clients:
                break
            while self.waiting_to_return:
                self.return_one()
            self.wait(2.0)
            for identity in list(self.workers):
                self.step_worker(identity, 2)
        assert not self.clients, f"never answered: {sorted(self.clients)}"
        assert self.desk.board.is_idle
        for sequences in self.workers.values():
            assert not sequences, "work that nobody wants"

    # Both ends.

    def step_worker(self, identity: bytes, count: int) -> None:
        made: list[messages.Output] = []
        for name, sequence in list(self.workers[identity].items()):
            asked = sequence.submit
            text = TEXTS[[tuple(submit("x", t).prompt) for t in TEXTS].index(asked.prompt)]
            end = min(TOKENS, sequence.position + count)
            tokens = [token_of(asked.tenant, text, i) for i in range(sequence.position, end)]
            if tokens:
                made.append(chunk(name, sequence.position, *tokens))
            sequence.position = end
            if end == TOKENS:
                made.append(finished(name, TOKENS))
                del self.workers[identity][name]
        if made:
            self.route(self.desk.worker(Outputs(items=tuple(made)), identity))

    def route(self, sent: list[tuple[bytes, AnyMessage]]) -> None:
        for identity, message in sent:
            if identity.startswith(b"w"):
                self.hear_worker(identity, message)
            else:
                for output in getattr(message, "items", (message,)):
                    self.hear_gateway(identity, output)

    def hear_worker(self, identity: bytes, message: AnyMessage) -> None:
        sequences = self.workers.get(identity)
        if sequences is None:
            return
        match message:
            case Submit():
                assert message.request_id not in sequences
                sequences[message.request_id] = Sequence(message, len(message.delivered))
                assert len(sequences) <= self.slots, "more than it has slots for"
            case Cancel():
                sequences.pop(message.request_id, None)
            case DraftHint():
                if message.request_id not in sequences:
                    return  # It ended with the step that made the tokens.
                asked = sequences[message.request_id].submit
                base = TENANTS.index(asked.tenant) * 10_000
                for i, token in enumerate(message.tokens):
                    assert base <= token < base + 10_000, "another tenant's token"
                    assert token % 100 == message.index + i

    def hear_gateway(self, identity: bytes, message: AnyMessage) -> None:
        client = self.clients.get(getattr(message, "request_id", ""))
        if client is None:
            return
        assert identity == client.gateway
        match message:
            case Chunk():
                accepted = client.delivery.accept(message)
                for token in accepted.tokens if accepted else ():
                    assert token in client.allowed(len(client.tokens))
                    client.tokens.append(token)
            case Finished():
                client.delivery.complete(message)
                assert len(client.tokens) == TOKENS
                self.done.append(self.clients.pop(message.request_id))
            case Failed(displaced=True):
                remainder = client.delivery.remainder()
                assert remainder.tier == "standard"
                self.route(self.desk.gateway(remainder, client.gateway))
            case Failed():
                assert message.retryable, message
                self.waiting_to_return.append(message.request_id)


MergingMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=SLOW_IS_FINE
)
test_every_request_gets_its_answer_whatever_happens = MergingMachine.TestCase


def test_stats_show_each_queue() -> None:
    board = desk(slots=1)
    board.gateway(submit("runs", "x1"))
    board.gateway(submit("waits", "y1", device_class="cpu"))
    board.clock.now += 2
    [(_, stats)] = of_type(board.gateway(StatsRequest(token=1)), messages.Stats)
    waiting = [(q.device_class, q.tier, q.depth, q.oldest_wait_s) for q in stats.queues if q.depth]
    assert waiting == [("cpu", "standard", 1, 2.0)]
    assert {q.tier for q in stats.queues} == {"vip", "standard"}


def test_a_worker_says_what_it_is_and_how_it_feels() -> None:
    board = desk()
    health = messages.DeviceHealth(temperature_c=61.0)
    pace = messages.Pace(curve=((1, 0.005), (8, 0.006)), prefill_tok_s=2000.0)
    load = {"running": 1, "waiting": 0, "kv_blocks_used": 0, "kv_blocks_free": 0, "steps": 1}
    board.worker(Heartbeat(worker_id="w", tokens=5, health=health, pace=pace, **load))
    [(_, stats)] = of_type(board.gateway(StatsRequest(token=1)), messages.Stats)
    assert (stats.workers[0].tokens, stats.workers[0].health) == (5, health)
    assert stats.workers[0].pace == pace
