"""The drafter's end: a ROUTER that many verifiers speak to, and the engine behind it.

One thread. Frames are read between forwards, so an update waits for one forward at most. A frame
that cannot be read, or a session that is wrong, costs nobody else anything.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path

import zmq

from mirror_sd import telemetry
from mirror_sd.drafting.draft_engine import DraftEngine, Refusal
from mirror_sd.drafting.frames import (
    MAX_FRAME_BYTES,
    FromDrafter,
    Hello,
    Proposal,
    Proposals,
    Ready,
    Refused,
    Update,
    decode_to_drafter,
    encode,
)
from mirror_sd.errors import ConfigError, ProtocolError

logger = logging.getLogger(__name__)

_HIGH_WATER = 1_000
_POLL_LIMIT = 64
_IDLE_S = 0.5
# A verifier that says nothing of a sequence for so long has lost it, or was lost.
_SILENT_S = 60.0
_SWEEP_S = 5.0
_PUBLISH_S = 0.5


class DraftServer:
    """Drafts for whoever speaks the protocol at `endpoint`; `stop` may come from a signal."""

    def __init__(
        self,
        engine: DraftEngine,
        endpoint: str,
        *,
        tokenizer: str,
        device_class: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._endpoint = endpoint
        self._tokenizer = tokenizer
        self._clock = clock
        self._instance = uuid.uuid4().hex
        # Size of the vocabulary of each verifier that may ask for drafts.
        self._welcome: dict[bytes, int] = {}
        self._stopping = False
        self._sweep_at = self._publish_at = clock()
        self._sessions = telemetry.DRAFTER_SESSIONS.labels(device_class)
        self._tokens = telemetry.DRAFTER_TOKENS.labels(device_class)
        self._pace = telemetry.DRAFTER_PACE.labels(device_class)
        self._bad_frames = telemetry.DRAFTER_BAD_FRAMES.labels(device_class)
        self._counted = 0

    def stop(self) -> None:
        self._stopping = True

    def run(self, ready: Path | None = None) -> None:
        """Serve until `stop`; `ready` is made once it listens. Raises `ConfigError` where the
        endpoint cannot be had."""
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            self._open(socket)
            if ready is not None:
                ready.touch()
            while not self._stopping:
                self.run_once(socket)

    def _open(self, socket: zmq.Socket[bytes]) -> None:
        socket.linger = 0
        socket.set_hwm(_HIGH_WATER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        try:
            if self._endpoint.startswith("ipc://"):
                Path(self._endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
            socket.bind(self._endpoint)
        except (zmq.ZMQError, OSError) as error:
            raise ConfigError(f"cannot listen on {self._endpoint}: {error}") from error

    def run_once(self, socket: zmq.Socket[bytes]) -> None:
        """Read what has come, make one forward, send what it brought."""
        if self._engine.has_work or socket.poll(int(1e3 * _IDLE_S)):
            self._receive(socket)
        self._answer(socket, self._engine.step())
        for key, reason in self._engine.refused:
            self._refuse(socket, key, reason)
        self._engine.refused.clear()
        now = self._clock()
        if now >= self._sweep_at:
            self._sweep_at = now + _SWEEP_S
            self._engine.close_silent(_SILENT_S)
        if now >= self._publish_at:
            self._publish_at = now + _PUBLISH_S
            self._publish()

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        with suppress(zmq.Again):
            for _ in range(_POLL_LIMIT):
                verifier, *parts = socket.recv_multipart(zmq.NOBLOCK)
                try:
                    if len(parts) != 1:
                        raise ProtocolError(f"{len(parts)} parts; a frame has one")
                    self._take(socket, verifier, parts[0])
                except ProtocolError as error:
                    self._bad_frames.inc()
                    logger.warning("a frame is dropped: %s", error.message)

    def _take(self, socket: zmq.Socket[bytes], verifier: bytes, data: bytes) -> None:
        match decode_to_drafter(data):
            case Hello() as hello:
                self._greet(socket, verifier, hello)
            case Update() as update:
                if verifier not in self._welcome:
                    reason = "the verifier has not said who it is"
                    self._send(socket, verifier, Refused(sessions=None, reason=reason))
                    return
                self._update(socket, verifier, update)

    def _greet(self, socket: zmq.Socket[bytes], verifier: bytes, hello: Hello) -> None:
        abilities = self._engine.capabilities
        if hello.tokenizer != self._tokenizer:
            reason = "its model has another tokenizer than the drafter's"
            refused = Refused(sessions=None, reason=reason, for_good=True)
            self._send(socket, verifier, refused)
            return
        self._welcome[verifier] = hello.vocab_size
        ready = Ready(
            instance=self._instance,
            device=abilities.device,
            engine=abilities.name,
            precision=abilities.precision,
            max_context=self._engine.max_context,
        )
        self._send(socket, verifier, ready)

    def _update(self, socket: zmq.Socket[bytes], verifier: bytes, update: Update) -> None:
        for session in update.closed:
            self._engine.close((verifier, session))
        for request in update.opened:
            key = (verifier, request.session)
            try:
                self._engine.open(key, request, self._welcome[verifier])
            except Refusal as refusal:
                self._refuse(socket, key, str(refusal))
        for commit in update.commits:
            key = (verifier, commit.session)
            try:
                self._engine.commit(key, commit)
            except Refusal as refusal:
                self._refuse(socket, key, str(refusal))

    def _refuse(self, socket: zmq.Socket[bytes], key: Hashable, reason: str) -> None:
        assert isinstance(key, tuple)
        verifier, session = key
        logger.debug("session %s is not drafted for: %s", session, reason)
        self._send(socket, verifier, Refused(sessions=(session,), reason=reason))

    def _answer(
        self, socket: zmq.Socket[bytes], proposals: list[tuple[Hashable, Proposal]]
    ) -> None:
        items: dict[bytes, list[Proposal]] = {}
        for key, proposal in proposals:
            assert isinstance(key, tuple)
            items.setdefault(key[0], []).append(proposal)
        for verifier, its in items.items():
            self._send(socket, verifier, Proposals(items=tuple(its)))

    def _send(self, socket: zmq.Socket[bytes], verifier: bytes, frame: FromDrafter) -> None:
        try:
            socket.send_multipart((verifier, encode(frame)), zmq.NOBLOCK)
        except zmq.Again:
            # It takes nothing: a later proposal says all that this one did.
            logger.debug("a verifier takes no frames")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._welcome.pop(verifier, None)
            self._engine.close_all(lambda key: isinstance(key, tuple) and key[0] == verifier)

    def _publish(self) -> None:
        self._sessions.set(self._engine.sessions)
        self._pace.set(self._engine.pace_s)
        fresh, self._counted = self._engine.tokens - self._counted, self._engine.tokens
        self._tokens.inc(fresh)
