"""The verifier's end: a connection to each drafter, used from the engine's thread.

ZeroMQ's own thread moves the bytes; nothing here blocks but `receive`, which has a time limit. A
drafter is asked now and then whether it lives; one that does not answer loses its sessions and is
given none until it does. What cannot be read is dropped, and who sends much of it is left alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import zmq

from mirror_sd.drafting.frames import (
    MAX_FRAME_BYTES,
    Commit,
    Hello,
    Open,
    Proposal,
    Proposals,
    Ready,
    Refused,
    Update,
    decode_from_drafter,
    encode,
    encode_update,
)
from mirror_sd.errors import ProtocolError
from mirror_sd.speculative.drafters.remote import Offer, Terms

logger = logging.getLogger(__name__)

_HIGH_WATER = 1_000
_READ_LIMIT = 64
_ASK_S = 0.25
_ASK_ANEW_S = 1.0
# A drafter that has been asked and says nothing for so long is gone.
_SILENT_S = 1.0
# Waits in vain, with no frame between, after which it is not waited for.
_LATE = 2
_BAD_FRAMES, _BANNED_S = 3, 30.0
# At five bytes each they leave half a frame for the rest of an `Open`.
_MOST_TOKENS = MAX_FRAME_BYTES // 10


@dataclass(slots=True)
class _Peer:
    """One drafter. `instance` is None while it is not known to draft for us."""

    name: str
    socket: zmq.Socket[bytes]
    offer: Offer
    instance: str | None = None
    sessions: set[int] = field(default_factory=set)
    closed: list[int] = field(default_factory=list)
    opened: list[Open] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    heard_at: float = float("-inf")
    # When a question was sent that nothing has followed yet.
    asked_at: float | None = None
    ask_again_at: float = 0.0
    banned_until: float = float("-inf")
    late: int = 0
    # Since it was last found sound, or banned.
    bad_frames: int = 0


class DraftClient:
    """See `speculative.drafters.remote.DraftLink`. Connects when made; drafters may come later."""

    def __init__(
        self,
        endpoints: Sequence[tuple[str, str, Terms]],
        hello: Hello,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`endpoints`: (name for the log, address, terms) of each drafter."""
        self._hello = encode(hello)
        self._clock = clock
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._peers = [self._connect(*endpoint) for endpoint in endpoints]
        self._of_session: dict[int, _Peer] = {}
        self._gone: list[int] = []
        self.bad_frames = 0
        self.flush()

    def _connect(self, name: str, endpoint: str, terms: Terms) -> _Peer:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.set_hwm(_HIGH_WATER)
        # Frames for a drafter that died must not reach its successor.
        socket.immediate = True
        socket.reconnect_ivl = 100
        socket.reconnect_ivl_max = 1000
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.connect(endpoint)
        self._poller.register(socket, zmq.POLLIN)
        return _Peer(name, socket, Offer(terms, max_context=0))

    @property
    def ready(self) -> int:
        """Drafters that can be had now."""
        return sum(peer.instance is not None for peer in self._peers)

    def assign(self, session: int, length: int) -> Offer | None:
        able = [
            peer
            for peer in self._peers
            if peer.instance is not None and length < min(peer.offer.max_context, _MOST_TOKENS)
        ]
        if not able:
            return None
        peer = min(able, key=lambda peer: len(peer.sessions))
        peer.sessions.add(session)
        self._of_session[session] = peer
        return peer.offer

    def open(self, request: Open) -> None:
        peer = self._of_session.get(request.session)
        if peer is not None:
            peer.opened.append(request)

    def commit(self, commit: Commit) -> None:
        peer = self._of_session.get(commit.session)
        if peer is not None:
            peer.commits.append(commit)

    def close(self, session: int) -> None:
        peer = self._of_session.pop(session, None)
        if peer is not None:
            peer.sessions.discard(session)
            peer.closed.append(session)
            peer.opened = [item for item in peer.opened if item.session != session]
            peer.commits = [item for item in peer.commits if item.session != session]

    def flush(self) -> None:
        now = self._clock()
        for peer in self._peers:
            if peer.closed or peer.opened or peer.commits:
                update = Update(
                    closed=tuple(peer.closed),
                    opened=tuple(peer.opened),
                    commits=tuple(peer.commits),
                )
                peer.closed, peer.opened, peer.commits = [], [], []
                if not all(self._send(peer, data) for data in encode_update(update)):
                    self._lose(peer, "it takes no frames")
            self._look_after(peer, now)

    def _look_after(self, peer: _Peer, now: float) -> None:
        if peer.instance is None:
            if now >= peer.ask_again_at:
                peer.ask_again_at = now + _ASK_ANEW_S
                self._send(peer, self._hello)
        elif peer.asked_at is None and now - peer.heard_at >= _ASK_S:
            if self._send(peer, self._hello):
                peer.asked_at = now
            else:
                self._lose(peer, "the connection is lost")

    def _send(self, peer: _Peer, data: bytes) -> bool:
        try:
            peer.socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_s: float) -> tuple[list[Proposal], list[int]]:
        proposals: list[Proposal] = []
        wait_ms = -int(-1e3 * timeout_s // 1) if timeout_s > 0 and not self._gone else 0
        ready = dict(self._poller.poll(wait_ms))
        for peer in self._peers:
            if peer.socket in ready:
                self._read(peer, proposals)
            # Only now: what it said may have waited here for as long.
            if peer.asked_at is not None and self._clock() - peer.asked_at >= _SILENT_S:
                self._lose(peer, f"it has said nothing for {_SILENT_S:g} s")
        gone, self._gone = self._gone, []
        return proposals, gone

    def _read(self, peer: _Peer, proposals: list[Proposal]) -> None:
        with suppress(zmq.Again):
            for _ in range(_READ_LIMIT):
                parts = peer.socket.recv_multipart(zmq.NOBLOCK)
                try:
                    if len(parts) != 1:
                        raise ProtocolError(f"{len(parts)} parts; a frame has one")
                    self._take(peer, decode_from_drafter(parts[0]), proposals)
                except ProtocolError as error:
                    self._count_bad(peer, error.message)
                    continue
                peer.heard_at = self._clock()
                peer.asked_at = None
                peer.late = 0

    def _take(
        self, peer: _Peer, frame: Ready | Refused | Proposals, proposals: list[Proposal]
    ) -> None:
        match frame:
            case Ready(instance=instance):
                if self._clock() < peer.banned_until:
                    return
                if peer.instance not in (None, instance):
                    self._lose(peer, "it was started anew")
                if peer.instance is None:
                    logger.info(
                        "%s drafts on %s %s (%s)",
                        peer.name,
                        frame.engine,
                        frame.precision,
                        frame.device,
                    )
                peer.instance, peer.bad_frames = instance, 0
                peer.offer = replace(peer.offer, max_context=frame.max_context)
            case Refused(sessions=None, reason=reason):
                if peer.instance is not None:
                    self._lose(peer, reason)
                if frame.for_good:
                    logger.warning("%s cannot draft for us: %s", peer.name, reason)
                    peer.ask_again_at = self._clock() + _BANNED_S
            case Refused(sessions=sessions):
                for session in sessions or ():
                    self._forget(peer, session)
            case Proposals(items=items):
                # A drafter has a say in its own sessions only.
                proposals.extend(item for item in items if item.session in peer.sessions)

    def _count_bad(self, peer: _Peer, reason: str) -> None:
        self.bad_frames += 1
        peer.bad_frames += 1
        if peer.bad_frames >= _BAD_FRAMES:
            if peer.instance is not None:
                self._lose(peer, f"it sends what cannot be read: {reason}")
            peer.bad_frames = 0
            peer.banned_until = peer.ask_again_at = self._clock() + _BANNED_S

    def _forget(self, peer: _Peer, session: int) -> None:
        if session in peer.sessions:
            peer.sessions.discard(session)
            del self._of_session[session]
            self._gone.append(session)

    def _lose(self, peer: _Peer, reason: str) -> None:
        if peer.instance is not None:
            logger.warning("%s drafts no more: %s", peer.name, reason)
        peer.instance, peer.asked_at, peer.late = None, None, 0
        peer.ask_again_at = self._clock() + _ASK_ANEW_S
        peer.opened, peer.commits = [], []
        peer.closed = sorted(peer.sessions)
        # Should it come back, it is not to draft for what nobody waits for.
        update = Update(closed=tuple(peer.closed))
        if peer.closed and all(self._send(peer, data) for data in encode_update(update)):
            peer.closed = []
        for session in list(peer.sessions):
            self._forget(peer, session)

    def is_answering(self, session: int) -> bool:
        peer = self._of_session.get(session)
        return peer is not None and peer.late < _LATE

    def was_late(self, sessions: Sequence[int]) -> None:
        for peer in {id(p): p for s in sessions if (p := self._of_session.get(s))}.values():
            peer.late += 1

    def close_all(self) -> None:
        """End the connections."""
        self._context.destroy(linger=0)
