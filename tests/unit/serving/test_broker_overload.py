"""The broker under more load than its devices can take, in simulated time.

Three classes of the emulated profiles' pace behind the broker's rules, a frame taking a third of a
millisecond each way; requests come at random whatever becomes of those before.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from mirror_sd import messages
from mirror_sd.config import Config
from mirror_sd.messages import (
    AnyMessage,
    Cancel,
    Chunk,
    Failed,
    Finished,
    Heartbeat,
    Outputs,
    Ping,
    Register,
    SamplingParams,
    SequenceUsage,
    Submit,
)
from mirror_sd.serving.delivery import Delivery
from mirror_sd.serving.switchboard import Switchboard
from tests.unit.scheduler.test_priority_queue import Clock

WIRE_S = 0.0003
BEAT_S = 0.5
PREFILL_CHUNK = 256


@dataclass
class Sequence:
    submit: Submit
    position: int
    unread: int


@dataclass
class Device:
    """Steps follow each other while there is work; what comes during one joins the next."""

    kind: str
    step_s: float
    slots: int
    prefill_tok_s: float
    waiting: list[Submit] = field(default_factory=list)
    running: dict[str, Sequence] = field(default_factory=dict)
    is_stepping: bool = False
    steps: int = 0
    tokens: int = 0

    @property
    def capacity_tok_s(self) -> float:
        return self.slots / self.step_s


def devices() -> dict[bytes, Device]:
    return {
        b"c": Device("cpu", 0.120, 8, 2_000),
        b"g": Device("gpu", 0.020, 32, 20_000),
        b"t": Device("tpu", 0.015, 64, 40_000),
    }


@dataclass
class Asked:
    delivery: Delivery
    tier: str
    at: float
    first_at: float | None = None
    end_at: float | None = None
    is_refused: bool = False
    displacements: int = 0


class Simulation:
    def __init__(self, scheduler: dict[str, Any] | None = None) -> None:
        self.clock = Clock()
        config = Config.model_validate(
            {
                "pools": {"cpu": {}, "gpu": {}, "tpu": {}},
                "scheduler": scheduler or {},
                "broker": {"stall_s": 1e6},
            }
        )
        self.board = Switchboard(config, "x", clock=self.clock, unix_clock=self.clock)
        self.devices = devices()
        self.asked: dict[str, Asked] = {}
        self.events: list[tuple[float, int, Any]] = []
        self.numbers = itertools.count()
        self.wakes_at = 0.0
        for identity, device in self.devices.items():
            fields = {"model": "m", "engine": "emulated", "precision": "fp32", "max_context": 4096}
            register = Register(
                worker_id=identity.decode(), device_class=device.kind, pid=0, **fields,
                slots=device.slots,
            )  # fmt: skip
            self.board.from_worker(identity, messages.encode(register))
            self.at(0.0, lambda identity=identity: self.beat(identity))
        self.at(0.0, self.tick)

    def at(self, delay_s: float, what: Any) -> None:
        heapq.heappush(self.events, (self.clock.now + delay_s, next(self.numbers), what))

    def ask(self, name: str, kind: str, tier: str, prompt: int, tokens: int) -> None:
        submit = Submit(
            request_id=name,
            model="m",
            prompt=(1,) * prompt,
            params=SamplingParams(max_tokens=tokens, seed=0),
            device_class=kind,
            tier=tier,
            received_at=self.clock.now,
        )
        self.asked[name] = Asked(Delivery(submit), tier, self.clock.now)
        self.submit(submit)

    def submit(self, submit: Submit) -> None:
        self.board.from_gateway(b"gateway", messages.encode(submit))
        self.pump()

    def run(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.events and self.events[0][0] <= end:
            self.clock.now, _, what = heapq.heappop(self.events)
            what()
        self.clock.now = end

    def pump(self) -> None:
        self.board.dispatch()
        while len(self.board.outbox):
            _, identity, frame = self.board.outbox.pop()
            message = messages.decode(frame)
            hear = self.hear_device if identity in self.devices else self.hear_gateway
            self.at(WIRE_S, lambda hear=hear, i=identity, m=message: hear(i, m))
        due_at = self.board.due_at
        if self.clock.now < due_at < float("inf") and not self.clock.now < self.wakes_at <= due_at:
            self.wakes_at = due_at
            self.at(due_at - self.clock.now, self.pump)

    def tick(self) -> None:
        self.board.from_gateway(b"gateway", messages.encode(Ping(role="gateway", pid=0)))
        self.board.tick()
        self.pump()
        self.at(BEAT_S / 4, self.tick)

    def beat(self, identity: bytes) -> None:
        device = self.devices[identity]
        load = {"running": len(device.running), "waiting": len(device.waiting)}
        beat = Heartbeat(
            worker_id=identity.decode(), kv_blocks_used=0, kv_blocks_free=0, steps=device.steps,
            tokens=device.tokens, **load,
        )  # fmt: skip
        self.board.from_worker(identity, messages.encode(beat))
        self.pump()
        self.at(BEAT_S, lambda: self.beat(identity))

    def hear_device(self, identity: bytes, message: AnyMessage) -> None:
        device = self.devices[identity]
        if isinstance(message, Submit):
            device.waiting.append(message)
            if not device.is_stepping:
                self.begin_step(identity)
        elif isinstance(message, Cancel):
            device.running.pop(message.request_id, None)
            device.waiting = [s for s in device.waiting if s.request_id != message.request_id]

    def begin_step(self, identity: bytes) -> None:
        device = self.devices[identity]
        while device.waiting and len(device.running) < device.slots:
            submit = device.waiting.pop(0)
            delivered = len(submit.delivered)
            device.running[submit.request_id] = Sequence(
                submit, delivered, len(submit.prompt) + delivered
            )
        read = 0
        for sequence in device.running.values():
            taken = min(sequence.unread, PREFILL_CHUNK - read)
            sequence.unread -= taken
            read += taken
        device.is_stepping = bool(device.running)
        if device.is_stepping:
            stepped = [name for name, sequence in device.running.items() if not sequence.unread]
            self.at(
                max(device.step_s, read / device.prefill_tok_s),
                lambda: self.end_step(identity, stepped),
            )

    def end_step(self, identity: bytes, stepped: list[str]) -> None:
        device = self.devices[identity]
        device.steps += 1
        made: list[messages.Output] = []
        for name in stepped:
            if name not in device.running:
                continue
            sequence = device.running[name]
            made.append(Chunk(request_id=name, index=sequence.position, tokens=(7,)))
            sequence.position += 1
            device.tokens += 1
            if sequence.position >= sequence.submit.params.max_tokens:
                usage = SequenceUsage(completion_tokens=sequence.position)
                made.append(Finished(request_id=name, reason="length", usage=usage))
                del device.running[name]
        self.begin_step(identity)
        if made:
            outputs = Outputs(items=tuple(made))
            self.at(WIRE_S, lambda: self.from_device(identity, outputs))

    def from_device(self, identity: bytes, outputs: Outputs) -> None:
        self.board.from_worker(identity, messages.encode(outputs))
        self.pump()

    def hear_gateway(self, identity: bytes, message: AnyMessage) -> None:
        for output in getattr(message, "items", (message,)):
            asked = self.asked.get(getattr(output, "request_id", ""))
            if asked is None:
                continue
            match output:
                case Chunk():
                    asked.delivery.accept(output)
                    asked.first_at = asked.first_at or self.clock.now
                case Finished():
                    asked.delivery.complete(output)
                    asked.end_at = self.clock.now
                case Failed(displaced=True):
                    asked.displacements += 1
                    self.at(WIRE_S, lambda a=asked: self.submit(a.delivery.remainder()))
                case Failed():
                    assert output.code == "queue_full", output
                    asked.is_refused = True


def load(
    simulation: Simulation, seconds: float, *, times_capacity: float, vip_only: bool = False
) -> None:
    """Poisson arrivals with answers of 70 tokens or so, sent to classes by their capacity; a tenth
    is VIP. The same VIPs whether or not others come."""
    rng = random.Random(5)
    capacities = {d.kind: d.capacity_tok_s for d in simulation.devices.values()}
    rate = times_capacity * sum(capacities.values()) / 70
    at, number = 0.0, 0
    while at < seconds:
        at += rng.expovariate(rate)
        number += 1
        kind = rng.choices(list(capacities), list(capacities.values()))[0]
        tier = "vip" if rng.random() < 0.1 else "standard"
        # VIP takes the fastest healthy class, as the edge would send it.
        kind = "tpu" if tier == "vip" else kind
        prompt, tokens = rng.randint(20, 300), rng.randint(20, 120)
        if tier == "vip" or not vip_only:
            name = f"r{number}"
            simulation.at(at, lambda a=(name, kind, tier, prompt, tokens): simulation.ask(*a))


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def vip_latencies(simulation: Simulation) -> list[float]:
    vips = [asked for asked in simulation.asked.values() if asked.tier == "vip"]
    assert all(asked.end_at is not None for asked in vips), "no VIP is left out"
    return [asked.end_at - asked.at for asked in vips if asked.end_at is not None]


@pytest.fixture(scope="module")
def overloaded() -> Simulation:
    simulation = Simulation({"max_wait_s": 8.0})
    load(simulation, 30.0, times_capacity=1.5)
    simulation.run(5.0)
    simulation.begun_with = {i: d.tokens for i, d in simulation.devices.items()}
    simulation.run(25.0)
    simulation.ended_with = {i: d.tokens for i, d in simulation.devices.items()}
    simulation.run(30.0)
    return simulation


def test_the_capacity_of_all_classes_is_used(overloaded: Simulation) -> None:
    made = sum(overloaded.ended_with.values()) - sum(overloaded.begun_with.values())
    capacity = sum(device.capacity_tok_s for device in overloaded.devices.values()) * 25.0
    assert made / capacity > 0.95


def test_vip_latency_stays_within_twice_the_unloaded_one(overloaded: Simulation) -> None:
    calm = Simulation()
    load(calm, 30.0, times_capacity=1.5, vip_only=True)
    calm.run(60.0)
    assert p99(vip_latencies(overloaded)) < 2 * p99(vip_latencies(calm))


def test_no_standard_request_waits_past_the_limit_and_the_rest_is_told_so(
    overloaded: Simulation,
) -> None:
    standard = [asked for asked in overloaded.asked.values() if asked.tier == "standard"]
    waits = [a.first_at - a.at for a in standard if a.first_at is not None]
    assert max(waits) < 8.0
    refused = sum(asked.is_refused for asked in standard)
    assert 0 < refused < 0.5 * len(standard)
    assert len(waits) + refused == len(standard), "nobody is left without an answer"


def test_everyone_gets_the_whole_answer_displaced_or_not(overloaded: Simulation) -> None:
    served = [asked for asked in overloaded.asked.values() if not asked.is_refused]
    assert all(asked.end_at is not None for asked in served)
    assert any(asked.displacements for asked in served)
    assert overloaded.board.is_idle


def test_only_what_comes_is_made_when_there_is_room(overloaded: Simulation) -> None:
    calm = Simulation()
    load(calm, 10.0, times_capacity=0.6)
    calm.run(20.0)
    assert not any(asked.is_refused or asked.displacements for asked in calm.asked.values())
    waits = [asked.first_at - asked.at for asked in calm.asked.values() if asked.first_at]
    assert p99(waits) < 0.5
