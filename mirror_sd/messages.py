"""What crosses ZeroMQ: typed msgpack frames, one per message.

    gateway (DEALER) --Submit, Cancel, Ping, StatsRequest--> broker (ROUTER)
    gateway          <--Chunk, Finished, Failed, Pong, Stats-- broker
    worker  (DEALER) --Register, Heartbeat, Chunk, Finished, Failed--> broker (ROUTER)
    worker           <--Welcome, Reset, Submit, DraftHint, Cancel, Drain-- broker

Where several Chunks, Finished and Failed go the same way at the same time, as those of one step
do, they travel as one `Outputs`.

A frame is one byte of protocol version followed by a msgpack map whose `t` names the struct.
Token positions are indexes into the *completion*: token 0 is the first generated one, whoever
generated it, so a resumed request (`Submit.delivered` not empty) numbers on from there and the
gateway can drop what it already has. Frames are immutable once decoded and own their memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import msgspec

from mirror_sd.errors import ProtocolError

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 16 * 1024 * 1024


class Message(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="t", omit_defaults=True, gc=False
):
    """Base of every frame. Immutable and without cycles, so the garbage collector skips it."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one sequence is decoded. Ranges are checked at the HTTP edge (`api`), not here.

    `seed` is always set: the gateway draws one where the client gave none. `top_k` 0 and `top_p`
    1.0 are off. `logprobs` None is off, k >= 0 asks for the token's own and the k best.
    Logprobs are those of the raw logits, before bias, penalties and temperature. `draft_source` is
    auto or the name of a drafter; `draft_tokens` 0 leaves the draft length to the server, else it
    is the most tokens of one draft. Neither changes any token.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    speculation: bool = True
    draft_source: str = "auto"
    draft_tokens: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability (natural log) of a token and of the best alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SequenceUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts of one sequence, complete when it finishes; tokens delivered before a resume count
    in `completion_tokens` only. `draft_sources`: drafted and accepted tokens of each source of
    drafts that was used, by its name."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verify_rounds: int = 0
    draft_sources: dict[str, tuple[int, int]] = {}


class MergeProfile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What the merger compares. All of it is derived from one request, tenant included, so that
    nothing can match across tenants.

    `exact`: digest of everything that the answer depends on; empty where two answers may differ
        (a seed that the client did not choose).
    `partition`: digest of tenant, model, system prompt, parameters, digits and negations: outside
        it answers are never shared.
    `scope`: digest of tenant and model: outside it there are not even draft hints.
    `signature`: MinHash of the shingles, uint32 little endian; empty where not compared.
    """

    exact: bytes = b""
    partition: bytes = b""
    scope: bytes = b""
    signature: bytes = b""


class Submit(Message, frozen=True, kw_only=True, tag="submit"):
    """One sequence to generate; `n` choices are n submits. The same id again, from the same
    gateway, is ignored while the request lives. `received_at` is unix time in seconds (0: now);
    `timeout_s` counts from it."""

    request_id: str
    model: str
    prompt: tuple[int, ...]
    params: SamplingParams
    delivered: tuple[int, ...] = ()
    device_class: str = "cpu"
    tier: str = "standard"
    tenant: str = "default"
    received_at: float = 0.0
    timeout_s: float | None = None
    merge: MergeProfile | None = None
    # Step 0..3 of the ladder of degradation that held when the request came.
    degrade_level: int = 0
    # How much of the usual drafting on other devices their links left room for then, 0..1.
    draft_factor: float = 1.0
    # Classes that must not take it over from its own: heat or memory holds them back.
    spare: tuple[str, ...] = ()

    def age_s(self, unix_now: float) -> float:
        """Seconds since the gateway received it; 0 where that is unknown or in the future."""
        age = unix_now - self.received_at
        return age if self.received_at > 0 and 0 < age < math.inf else 0.0


class DraftHint(Message, frozen=True, kw_only=True, tag="draft_hint"):
    """Broker to worker: tokens `index .. index + len(tokens)` of another answer that this request's
    may resemble. Only a source of drafts: unknown ids, gaps and nonsense do no harm."""

    request_id: str
    index: int
    tokens: tuple[int, ...]


class Cancel(Message, frozen=True, kw_only=True, tag="cancel"):
    request_id: str


class Chunk(Message, frozen=True, kw_only=True, tag="chunk"):
    """Tokens `index .. index + len(tokens)` of the completion, in order.

    `logprobs`, where asked for, has one entry per token. `prompt_logprobs` comes once, with the
    first chunk; its first entry is None (nothing precedes the first prompt token).
    """

    request_id: str
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


class Finished(Message, frozen=True, kw_only=True, tag="finished"):
    """The last frame of a sequence that ended well. `reason`: "stop" (a stop token, which is not
    among the chunks) or "length"."""

    request_id: str
    reason: str
    usage: SequenceUsage


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """The last frame of a sequence that did not. `code` is a key of `errors.BY_CODE`.
    `retryable`: the same submit with more `delivered` may succeed (its worker was lost)."""

    request_id: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    retryable: bool = False
    # It had to give way to a VIP request: to be submitted again at once, with what it has.
    displaced: bool = False


class Outputs(Message, frozen=True, kw_only=True, tag="outputs"):
    """What a worker has made since the last frame, in order; those of several sequences. It means
    what its items mean one by one."""

    items: tuple[Chunk | Finished | Failed, ...]


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """Gateway liveness, sent each `broker.heartbeat_ms`; the broker answers `Pong`."""

    role: str
    pid: int


class Pong(Message, frozen=True, kw_only=True, tag="pong"):
    """`instance` is drawn when the broker starts: another value means it lost all its requests."""

    instance: str


class Register(Message, frozen=True, kw_only=True, tag="register"):
    """First frame of a worker, and again after each `Reset`. `slots`: sequences it runs at once.
    The DEALER identity of a worker is its `worker_id`, unique to the process."""

    worker_id: str
    device_class: str
    pid: int
    model: str
    engine: str
    precision: str
    slots: int
    max_context: int
    emulated: bool = False


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """Answer to `Register`."""

    instance: str


class Reset(Message, frozen=True, kw_only=True, tag="reset"):
    """The broker does not know this worker (it restarted, or had given the worker up): the worker
    drops all its sequences and registers. Their gateways submit them again."""


class DeviceHealth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What a worker knows of its device; None where it cannot tell. Utilisation and memory
    pressure are 0..1."""

    temperature_c: float | None = None
    utilisation: float | None = None
    memory_pressure: float | None = None


class Pace(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a worker has measured of its forwards: (rows, seconds), rows rising; and prompt tokens
    read in a second."""

    curve: tuple[tuple[int, float], ...]
    prefill_tok_s: float


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """Worker liveness and load. `steps` counts forwards since start: the progress counter;
    `tokens` the tokens it has generated. `pace` is None before anything was measured.
    `kv_blocks_peak`: most that were used at once."""

    worker_id: str
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_free: int
    steps: int
    draining: bool = False
    tokens: int = 0
    health: DeviceHealth | None = None
    pace: Pace | None = None
    kv_blocks_peak: int = 0


class Drain(Message, frozen=True, kw_only=True, tag="drain"):
    """Broker to worker: finish what runs, take nothing new."""


class StatsRequest(Message, frozen=True, kw_only=True, tag="stats_request"):
    token: int


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    worker_id: str
    device_class: str
    pid: int
    model: str
    engine: str
    precision: str
    slots: int
    in_flight: int
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_free: int
    steps: int
    silent_s: float
    stalled_s: float
    draining: bool
    emulated: bool = False
    tokens: int = 0
    health: DeviceHealth | None = None
    pace: Pace | None = None
    kv_blocks_peak: int = 0


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    device_class: str
    tier: str
    depth: int
    oldest_wait_s: float


class Stats(Message, frozen=True, kw_only=True, tag="stats"):
    """The broker's view. `waiting` is the depth of its queues; `running` what workers hold."""

    token: int
    instance: str
    pid: int
    running: int
    waiting: int
    oldest_wait_s: float
    workers: tuple[WorkerStats, ...]
    gateways: tuple[int, ...]
    queues: tuple[QueueStats, ...] = ()


FromGateway: TypeAlias = Submit | Cancel | Ping | StatsRequest
Output: TypeAlias = Chunk | Finished | Failed
ToGateway: TypeAlias = Output | Outputs | Pong | Stats
FromWorker: TypeAlias = Register | Heartbeat | Output | Outputs
ToWorker: TypeAlias = Welcome | Reset | Submit | DraftHint | Cancel | Drain
AnyMessage: TypeAlias = (
    Submit
    | DraftHint
    | Cancel
    | Ping
    | StatsRequest
    | Chunk
    | Finished
    | Failed
    | Outputs
    | Pong
    | Stats
    | Register
    | Heartbeat
    | Welcome
    | Reset
    | Drain
)


class ChunkHead(Message, frozen=True, kw_only=True, tag="chunk"):
    """The part of a `Chunk` that the broker needs to forward it."""

    request_id: str
    index: int


class OutputsHead(Message, frozen=True, kw_only=True, tag="outputs"):
    """`Outputs` whose items are left encoded; `heads_of` reads as much of them as it takes to
    forward them."""

    items: tuple[msgspec.Raw, ...]


OutputHead: TypeAlias = ChunkHead | Finished | Failed
HeadFromWorker: TypeAlias = Register | Heartbeat | OutputHead | OutputsHead
T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_head_decoder: msgspec.msgpack.Decoder[HeadFromWorker] = msgspec.msgpack.Decoder(HeadFromWorker)
_item_decoder: msgspec.msgpack.Decoder[OutputHead] = msgspec.msgpack.Decoder(OutputHead)
_chunk_decoder: msgspec.msgpack.Decoder[Chunk] = msgspec.msgpack.Decoder(Chunk)
_chunks_decoder: msgspec.msgpack.Decoder[list[Chunk]] = msgspec.msgpack.Decoder(list[Chunk])
_VERSION_BYTE = bytes([PROTOCOL_VERSION])
# Of `Outputs` that are joined; one output alone may be larger.
_JOINED_BYTES = 1024 * 1024


def encode(message: AnyMessage) -> bytes:
    """The frame of `message`."""
    return _VERSION_BYTE + _encoder.encode(message)


def encode_outputs(outputs: Sequence[Output]) -> tuple[bytes, int]:
    """A frame of the first of `outputs`, at least one, and how many it holds: all, unless they
    are large."""
    items: list[msgspec.Raw] = []
    size = 0
    for output in outputs:
        item = _encoder.encode(output)
        size += len(item)
        if items and size > _JOINED_BYTES:
            break
        items.append(msgspec.Raw(item))
    return join(items), len(items)


def encode_output(output: Output) -> msgspec.Raw:
    """One output, to be joined with others."""
    return msgspec.Raw(_encoder.encode(output))


def join(items: Sequence[msgspec.Raw]) -> bytes:
    """The frame of encoded outputs, at least one: of that one itself, or of `Outputs`."""
    if len(items) == 1:
        return _VERSION_BYTE + bytes(memoryview(items[0]))
    return _VERSION_BYTE + _encoder.encode(OutputsHead(items=tuple(items)))


def decode(frame: bytes | memoryview) -> AnyMessage:
    """The message in `frame`; raises `ProtocolError` on another version, size or shape."""
    return _decode(_decoder, frame)


def decode_from_worker(frame: bytes | memoryview) -> HeadFromWorker:
    """As `decode`, for frames from a worker: of chunks only the heads are read and checked."""
    return _decode(_head_decoder, frame)


def heads_of(outputs: OutputsHead) -> list[OutputHead]:
    """The heads of the items, all of them checked; raises `ProtocolError`."""
    try:
        return [_item_decoder.decode(item) for item in outputs.items]
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"unreadable output: {error}") from error


def output_in(frame: bytes) -> msgspec.Raw:
    """The output that a frame of one holds, still encoded; it shares the frame's memory."""
    return msgspec.Raw(memoryview(frame)[1:])


def decode_chunk(item: bytes | msgspec.Raw) -> Chunk:
    """The whole of a chunk whose head was read; raises `ProtocolError`."""
    try:
        return _chunk_decoder.decode(item)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"unreadable chunk: {error}") from error


def decode_chunks(items: Sequence[bytes]) -> list[Chunk]:
    """As `decode_chunk`, of many at once."""
    array = b"\xdd" + len(items).to_bytes(4, "big") + b"".join(items)
    try:
        return _chunks_decoder.decode(array)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"unreadable chunk: {error}") from error


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes | memoryview) -> T:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES} are allowed")
    if len(frame) == 0 or frame[0] != PROTOCOL_VERSION:
        version = frame[0] if len(frame) else None
        raise ProtocolError(f"frame of protocol version {version}; this is {PROTOCOL_VERSION}")
    try:
        return decoder.decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"unreadable frame: {error}") from error
