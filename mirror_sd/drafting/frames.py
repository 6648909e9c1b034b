"""What crosses ZeroMQ between verifiers and drafters: typed msgpack frames.

    verifier (DEALER) --Hello, Update--> drafter (ROUTER)
    verifier          <--Ready, Refused, Proposals-- drafter

A session is one sequence of one verifier, numbered by it and never numbered again. Positions are
absolute: token 0 is the first of the prompt. A proposal begins at `base`, the length of what the
drafter knew to be committed, and says all that it expects from there on; the verifier compares it
with what was committed since, so one that comes late is used as far as it agrees, or not at all.

A frame is one byte of protocol version followed by a msgpack map whose `t` names the struct.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from mirror_sd.errors import ProtocolError

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 8 * 1024 * 1024
# Tokens beyond what is committed that are drafted at most.
LONGEST = 32
# More sessions in a frame than a drafter can have, or more lines than one would send, are nonsense
# that is not worth the reading.
MOST_ITEMS, MOST_LINES = 4_096, 8

T = TypeVar("T")
_Items: TypeAlias = Annotated[tuple[T, ...], msgspec.Meta(max_length=MOST_ITEMS)]
_Lines: TypeAlias = Annotated[tuple[T, ...], msgspec.Meta(max_length=MOST_LINES)]


class _Frame(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="t", omit_defaults=True, gc=False
):
    """Base of every frame."""


class Hello(_Frame, frozen=True, kw_only=True, tag="hello"):
    """First frame of a verifier, and its question whether the drafter still lives. `tokenizer`:
    digest of tokenizer.json; drafts of another one would be right about nothing. `vocab_size`: rows
    of logits, which models of one tokenizer pad to different numbers; no draft has an id beyond."""

    verifier: str
    vocab_size: Annotated[int, msgspec.Meta(ge=1)]
    tokenizer: str


class Ready(_Frame, frozen=True, kw_only=True, tag="ready"):
    """Answer to `Hello`. `instance` is drawn when the drafter starts: another value means that it
    knows no session any more."""

    instance: str
    device: str
    engine: str
    precision: str
    max_context: int


class Refused(_Frame, frozen=True, kw_only=True, tag="refused"):
    """The drafter does not draft for these sessions, which it does not know, cannot hold, or found
    wrong. None: for none of this verifier, which it does not know, or, `for_good`, cannot serve."""

    sessions: _Items[int] | None
    reason: str
    for_good: bool = False


class DraftParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the target chooses tokens, as far as a drafter can do likewise."""

    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()


class Open(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Draft for a sequence that has `tokens`. `length`: tokens of a proposal. `runs_ahead`: go on
    while it is verified. `tenant`: prefixes are shared within it. `traces`: tell when each token
    was drafted."""

    session: int
    tokens: tuple[int, ...]
    params: DraftParams
    length: int
    runs_ahead: bool = True
    tenant: str = ""
    traces: bool = False


class Commit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The target chose `tokens` for positions `base ..`."""

    session: int
    base: int
    tokens: tuple[int, ...]
    length: int


class Update(_Frame, frozen=True, kw_only=True, tag="update"):
    """What one step of a verifier brought, in this order: ends, new sequences, new tokens."""

    closed: _Items[int] = ()
    opened: _Items[Open] = ()
    commits: _Items[Commit] = ()


class Line(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`tokens` from position `base` of the proposal plus `at` on. `strengths`: one byte for each,
    0..7, the more the surer. `times`: begin and end of the forward that gave each, in seconds of
    the monotonic clock of the drafter's machine, where `traces` asks for it."""

    at: int
    tokens: tuple[int, ...]
    strengths: bytes
    times: tuple[tuple[float, float], ...] = ()


class Proposal(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Of one session. `lines`: the likeliest first, from `base` on; each further one departs from
    it at `at`, in case the target corrects it there. `latency_s`: from the latest commit that
    changed the drafter's mind to the first token after it; `pace_s`: for each token, lately."""

    session: int
    base: int
    lines: _Lines[Line]
    latency_s: float
    pace_s: float


class Proposals(_Frame, frozen=True, kw_only=True, tag="proposals"):
    items: _Items[Proposal]


ToDrafter: TypeAlias = Hello | Update
FromDrafter: TypeAlias = Ready | Refused | Proposals

_VERSION_BYTE = bytes([PROTOCOL_VERSION])
_encoder = msgspec.msgpack.Encoder()
_to_drafter: msgspec.msgpack.Decoder[ToDrafter] = msgspec.msgpack.Decoder(ToDrafter)
_from_drafter: msgspec.msgpack.Decoder[FromDrafter] = msgspec.msgpack.Decoder(FromDrafter)


def encode(frame: ToDrafter | FromDrafter) -> bytes:
    return _VERSION_BYTE + _encoder.encode(frame)


def encode_update(update: Update) -> Iterator[bytes]:
    """Frames of which each may be sent, one where that will do. What is of one sequence is not
    divided."""
    data = encode(update)
    sizes = [len(update.closed), len(update.opened), len(update.commits)]
    if (len(data) <= MAX_FRAME_BYTES and max(sizes) <= MOST_ITEMS) or sum(sizes) == 1:
        yield data
        return
    for field, size in zip(("closed", "opened", "commits"), sizes, strict=True):
        items = getattr(update, field)
        half = size // 2 if size == sum(sizes) else size
        for part in (items[:half], items[half:]):
            if part:
                yield from encode_update(Update(**{field: part}))


def decode_to_drafter(data: bytes) -> ToDrafter:
    """Raises `ProtocolError` on another version, size or shape."""
    return _decode(_to_drafter, data)


def decode_from_drafter(data: bytes) -> FromDrafter:
    """Raises `ProtocolError` on another version, size or shape."""
    return _decode(_from_drafter, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    if len(data) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(data)} bytes; at most {MAX_FRAME_BYTES} are allowed")
    if not data or data[0] != PROTOCOL_VERSION:
        version = data[0] if data else None
        raise ProtocolError(f"frame of draft protocol {version}; this is {PROTOCOL_VERSION}")
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"unreadable frame: {error}") from error
