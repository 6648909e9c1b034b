"""Every frame type, well-formed with senseless fields and damaged, into the broker's rules: nothing
raises, the books stay right, and nobody else's requests are lost."""

from __future__ import annotations

import itertools
import logging
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mirror_sd import messages
from mirror_sd.config import Config
from mirror_sd.messages import Chunk, Finished, Ping, Register, SequenceUsage, Submit
from mirror_sd.serving.switchboard import Switchboard
from tests.unit.scheduler.test_priority_queue import Clock
from tests.unit.serving.broker_stack import make_submit
from tests.unit.serving.test_broker_frames import ANY_BYTES, damaged

# The machine may be busy with other tests.
SLOW_IS_FINE = [HealthCheck.too_slow]
KINDS = get_args(messages.AnyMessage)
# Few, so that frames meet: ids of others, of themselves, of nobody.
NAMES = st.sampled_from(["a", "b", "c", "honest", "w1", "w2", "w1#2", ""])
INTEGERS = st.one_of(st.integers(-2, 5), st.sampled_from([-(2**63), 2**63 - 1, 2**64 - 1, 4096]))
FLOATS = st.one_of(st.floats(), st.integers(-3, 3).map(float))
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: INTEGERS,
    float: FLOATS,
    str: NAMES,
    bytes: st.binary(max_size=8),
    bool: st.booleans(),
}
PROFILES = st.builds(
    messages.MergeProfile,
    exact=st.sampled_from([b"", b"x", b"y"]),
    partition=st.sampled_from([b"", b"p"]),
    scope=st.sampled_from([b"", b"s"]),
    signature=st.sampled_from([b"", b"abc", bytes(16), bytes(64), bytes(range(64)), bytes(65536)]),
)
SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "request_id": NAMES,
    "worker_id": NAMES,
    "tenant": st.sampled_from(["t", "u", ""]),
    "model": st.sampled_from(["m", ""]),
    "device_class": st.sampled_from(["cpu", "gpu", "tpu", "abacus"]),
    "tier": st.sampled_from(["vip", "standard", "king"]),
    "merge": st.none() | PROFILES,
    "code": st.sampled_from(["no_worker", "queue_full", "made up"]),
    # A process id that is another peer's takes that peer's place, which is meant.
    "pid": st.integers(-1, 5),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Anything of the type of a field."""
    arguments = get_args(hint)
    if hint in PLAIN:
        return PLAIN[hint]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return instances(hint)
    if arguments and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    origin = getattr(hint, "__origin__", None)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=2)
    return st.one_of(*(st.none() if a is type(None) else values(a) for a in arguments))


def instances(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    names = [field.name for field in msgspec.structs.fields(kind)]
    made = {name: SPECIAL[name] if name in SPECIAL else values(hints[name]) for name in names}
    return st.builds(kind, **made)


WELL_FORMED = {kind: st.deferred(lambda kind=kind: instances(kind)) for kind in KINDS}
ANY_FRAME = st.one_of(
    *(strategy.map(messages.encode) for strategy in WELL_FORMED.values()), damaged(), ANY_BYTES
)


class Busy:
    """A switchboard with an honest gateway, an honest worker and a request between them."""

    def __init__(self) -> None:
        self.clock = Clock()
        config = Config.model_validate(
            {
                "broker": {"heartbeat_ms": 10_000, "missed_heartbeats": 100, "stall_s": 1e6},
                "scheduler": {"preemption": False, "timeout_ms": 0},
                "merge": {"share_answers": ["t"], "max_entries": 2},
            }
        )
        self.board = Switchboard(config, "x", clock=self.clock, unix_clock=lambda: 0.0)
        self.from_gateway(Ping(role="gateway", pid=900_001))
        fields = {"model": "m", "engine": "e", "precision": "fp32", "max_context": 100}
        self.from_worker(
            Register(worker_id="hw", device_class="cpu", pid=900_002, slots=64, **fields)
        )
        self.from_gateway(make_submit("honest", timeout_s=None, received_at=0.0))
        assert any(isinstance(message, Submit) for _, _, message in self.sent())

    def from_gateway(self, message: messages.AnyMessage) -> None:
        self.board.from_gateway(b"honest-gateway", messages.encode(message))

    def from_worker(self, message: messages.AnyMessage) -> None:
        self.board.from_worker(b"hw", messages.encode(message))

    def sent(self) -> list[tuple[str, bytes, messages.AnyMessage]]:
        self.board.dispatch()
        self.board.check_integrity()
        taken = []
        while len(self.board.outbox):
            side, identity, frame = self.board.outbox.pop()
            try:
                taken.append((side, identity, messages.decode(frame)))
            except messages.ProtocolError:
                # Chunks are passed on unread; their gateway drops what it cannot read.
                assert side == "gateway"
        return taken

    def is_honest_served(self) -> bool:
        chunk = Chunk(request_id="honest", index=0, tokens=(1, 2))
        usage = SequenceUsage(completion_tokens=2)
        finished = Finished(request_id="honest", reason="stop", usage=usage)
        self.from_worker(chunk)
        self.from_worker(finished)
        mine = [m for _, identity, m in self.sent() if identity == b"honest-gateway"]
        return mine == [chunk, finished]


STRANGERS = st.sampled_from([b"w1", b"w2", b"\xff"])


@pytest.fixture(autouse=True)
def quiet() -> Any:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@given(
    st.lists(
        st.tuples(st.booleans(), STRANGERS, ANY_FRAME, st.sampled_from([0.0, 1.0])), max_size=40
    )
)
@settings(max_examples=150, deadline=None, suppress_health_check=SLOW_IS_FINE)
def test_no_frame_of_a_stranger_harms_the_request_of_another(frames: list[tuple]) -> None:
    busy = Busy()
    for is_gateway, identity, frame, seconds in frames:
        board = busy.board
        (board.from_gateway if is_gateway else board.from_worker)(identity, frame)
        busy.clock.now += seconds
        board.tick()
        assert not [
            message
            for _, to, message in busy.sent()
            if to == b"honest-gateway" and not isinstance(message, messages.Pong)
        ]
    messages.encode(busy.board.stats(1))
    assert busy.is_honest_served()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("side", ["gateway", "worker"])
def test_every_frame_type_from_either_side_harms_nobody(kind: type, side: str) -> None:
    counter = itertools.count()

    @given(st.lists(WELL_FORMED[kind], min_size=1, max_size=5))
    @settings(max_examples=25, deadline=None, suppress_health_check=SLOW_IS_FINE)
    def hold(sent: list[messages.AnyMessage]) -> None:
        busy = Busy()
        for message in sent:
            frame = messages.encode(message)
            board = busy.board
            (board.from_gateway if side == "gateway" else board.from_worker)(b"w1", frame)
            board.tick()
            busy.sent()
        assert busy.is_honest_served()
        next(counter)

    hold()
    assert next(counter) > 0


@given(st.lists(st.tuples(st.booleans(), ANY_FRAME), max_size=30))
@settings(max_examples=100, deadline=None, suppress_health_check=SLOW_IS_FINE)
def test_peers_that_are_known_may_send_anything(frames: list[tuple]) -> None:
    busy = Busy()
    for is_gateway, frame in frames:
        if is_gateway:
            busy.board.from_gateway(b"honest-gateway", frame)
        else:
            busy.board.from_worker(b"hw", frame)
        busy.board.tick()
        busy.sent()
