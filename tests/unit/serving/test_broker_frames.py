"""The wire format: recorded frames keep their meaning, and no bytes do harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mirror_sd import messages
from mirror_sd.config import Config
from mirror_sd.errors import ProtocolError
from mirror_sd.serving.switchboard import Switchboard

CONTRACT = Path(__file__).parents[2] / "contracts" / "frames.json"
RECORDED: list[dict[str, Any]] = json.loads(CONTRACT.read_text(encoding="utf-8"))
FRAMES = [bytes.fromhex(record["frame"]) for record in RECORDED]
VERSION = bytes([messages.PROTOCOL_VERSION])


@pytest.mark.parametrize("record", RECORDED, ids=lambda record: record["type"])
def test_recorded_frame_decodes_to_the_recorded_message(record: dict[str, Any]) -> None:
    kind = getattr(messages, record["type"])
    message = messages.decode(bytes.fromhex(record["frame"]))
    # JSON has only string keys; msgspec reads the integers in them when told to.
    assert message == msgspec.convert(record["message"], kind, str_keys=True)
    assert messages.encode(message).hex() == record["frame"]


def test_every_message_type_is_recorded() -> None:
    recorded = {record["type"] for record in RECORDED}
    assert recorded == {kind.__name__ for kind in get_args(messages.AnyMessage)}


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x00" + FRAMES[0][1:],
        bytes([messages.PROTOCOL_VERSION + 1]) + FRAMES[0][1:],
        VERSION,
        VERSION + b"\x80",
        VERSION + b"\x81\xa1t\xa7unknown",
        VERSION + b"\x91" * 100_000,
        messages.encode(
            messages.Failed(request_id="a", code="b", message="x" * messages.MAX_FRAME_BYTES)
        ),
        b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins\x94.",
    ],
    ids=[
        "empty",
        "v0",
        "v2",
        "bare",
        "no tag",
        "tag",
        "deep",
        "oversize",
        "pickle",
    ],
)
def test_malformed_frame_raises_protocol_error(frame: bytes) -> None:
    for decode in (messages.decode, messages.decode_from_worker):
        with pytest.raises(ProtocolError) as failure:
            decode(frame)
        assert len(str(failure.value)) < 500, "the frame itself must not go into the log"


def test_every_truncation_of_every_frame_raises_protocol_error() -> None:
    for frame in FRAMES:
        for length in range(len(frame)):
            with pytest.raises(ProtocolError):
                messages.decode(frame[:length])


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A recorded frame with some bytes changed, and perhaps an end cut off or added."""
    frame = bytearray(draw(st.sampled_from(FRAMES)))
    for _ in range(draw(st.integers(0, 4))):
        frame[draw(st.integers(0, len(frame) - 1))] = draw(st.integers(0, 255))
    return bytes(frame[: draw(st.integers(1, len(frame)))]) + draw(st.binary(max_size=4))


ANY_BYTES = st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(VERSION.__add__))


@given(st.one_of(ANY_BYTES, damaged()))
@example(VERSION + b"\x82\xa1t\xa6cancel\xaarequest_id\xa2\xff\xfe")
@example(VERSION + b"\x81\xa1t\xd6\xff\x00\x00\x00\x00")
def test_any_bytes_decode_or_raise_protocol_error(frame: bytes) -> None:
    for decode in (messages.decode, messages.decode_from_worker):
        try:
            message = decode(frame)
        except ProtocolError:
            continue
        assert isinstance(message, messages.Message)


@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from([b"a", b"cpu-0-1234"]), damaged()), max_size=30
    )
)
def test_switchboard_survives_any_frames_in_any_order(frames: list[tuple]) -> None:
    board = Switchboard(Config(), "x")
    for is_gateway, identity, frame in frames:
        (board.from_gateway if is_gateway else board.from_worker)(identity, frame)
        board.dispatch()
        board.tick()
        board.check_integrity()
    board.pids()
    messages.encode(board.stats(1))


def small_chunk(number: int) -> messages.Chunk:
    return messages.Chunk(request_id=f"r{number}", index=number, tokens=(number, 50_000))


def test_outputs_of_a_step_share_a_frame_and_keep_their_order() -> None:
    outputs = [small_chunk(number) for number in range(20)]
    frame, count = messages.encode_outputs(outputs)
    assert count == 20
    assert messages.decode(frame) == messages.Outputs(items=tuple(outputs))


def test_one_output_alone_is_framed_as_itself() -> None:
    assert messages.encode_outputs([small_chunk(1)]) == (messages.encode(small_chunk(1)), 1)


def test_large_outputs_are_spread_over_frames_that_all_fit() -> None:
    wide = messages.Failed(request_id="a", code="b", message="x" * 700_000)
    outputs: list[messages.Output] = [small_chunk(0), wide, wide, small_chunk(3), wide]
    frames: list[bytes] = []
    rest = outputs
    while rest:
        frame, count = messages.encode_outputs(rest)
        frames.append(frame)
        rest = rest[count:]
    assert all(len(frame) < 2 * 700_000 for frame in frames) and len(frames) == 3
    read = [messages.decode(frame) for frame in frames]
    assert [o for m in read for o in getattr(m, "items", (m,))] == outputs


def test_outputs_with_one_unreadable_item_are_refused_as_a_whole() -> None:
    frame, _ = messages.encode_outputs([small_chunk(1), small_chunk(2)])
    broken = frame.replace(b"chunk", b"chuck", 1)
    head = messages.decode_from_worker(broken)
    assert isinstance(head, messages.OutputsHead)
    for read in (lambda: messages.decode(broken), lambda: messages.heads_of(head)):
        with pytest.raises(ProtocolError):
            read()
