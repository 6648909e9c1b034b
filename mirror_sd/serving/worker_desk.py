"""The broker's dealings with workers.

A worker is given up when it is silent, when its process ends, when it cannot be reached, and when
it has work but makes no step (it beats, but hangs): to the requests it is the same. Given up, it
is heard again only when it registers; until then it is answered `Reset`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import msgspec

from mirror_sd import messages, telemetry
from mirror_sd.config import SchedulerConfig
from mirror_sd.errors import ProtocolError
from mirror_sd.messages import (
    Cancel,
    ChunkHead,
    Drain,
    Failed,
    Finished,
    HeadFromWorker,
    Heartbeat,
    OutputHead,
    OutputsHead,
    Register,
    Reset,
    Welcome,
    WorkerStats,
)
from mirror_sd.scheduler.batch_limit import BatchLimit
from mirror_sd.scheduler.roster import Roster
from mirror_sd.serving.outbox import Outbox
from mirror_sd.serving.peers import Worker
from mirror_sd.serving.request_book import RequestBook, Shares

_log = logging.getLogger(__name__)

MAX_SLOTS = 4096


class WorkerDesk:
    """Workers of `classes` may register."""

    def __init__(
        self,
        book: RequestBook,
        roster: Roster,
        outbox: Outbox,
        *,
        instance: str,
        classes: tuple[str, ...],
        patience_s: float,
        stall_s: float,
        scheduler: SchedulerConfig,
        clock: Callable[[], float],
    ) -> None:
        self._book = book
        self._roster = roster
        self._outbox = outbox
        self._instance = instance
        self._classes = classes
        self._patience_s = patience_s
        self._stall_s = stall_s
        self._is_batch_adaptive = scheduler.adaptive_batch
        self._target_inter_token_s = scheduler.target_inter_token_ms / 1e3
        self._clock = clock
        self._workers: dict[bytes, Worker] = {}
        self._resets: dict[bytes, float] = {}
        self._is_draining = False

    def pids(self) -> list[int]:
        return [worker.register.pid for worker in self._workers.values()]

    def stats(self) -> tuple[WorkerStats, ...]:
        now = self._clock()
        return tuple(
            worker.stats(self._roster.held(worker.worker_id), now)
            for worker in self._workers.values()
        )

    def handle(self, identity: bytes, message: HeadFromWorker, frame: bytes) -> None:
        """Act on a frame and its head; raises `ProtocolError` for a bad registration, and for
        outputs of which one is unreadable."""
        if isinstance(message, Register):
            self._register(identity, message)
            return
        worker = self._workers.get(identity)
        if worker is None:
            self._reset(identity)
            return
        worker.heard_at = self._clock()
        match message:
            case Heartbeat():
                worker.beat(message, worker.heard_at)
                if self._is_batch_adaptive:
                    self._roster.set_limit(worker.worker_id, worker.batch.limit)
                if message.draining:
                    self._roster.drain(worker.worker_id)
            case OutputsHead():
                # All heads are read before the first is acted on: one that is bad changes nothing.
                heads = messages.heads_of(message)
                for gateway, items in self._share(worker, heads, message.items).items():
                    self._outbox.post("gateway", gateway, messages.join(items))
            case ChunkHead() | Finished() | Failed():
                item = messages.output_in(frame)
                for gateway, items in self._share(worker, (message,), (item,)).items():
                    is_itself = len(items) == 1 and items[0] is item
                    out = frame if is_itself else messages.join(items)
                    self._outbox.post("gateway", gateway, out)

    def start_drain(self) -> None:
        """Tell all, and those that join from now on, to take nothing new."""
        self._is_draining = True
        for worker in self._workers.values():
            self._drain(worker)

    def note_assignment(self, worker_id: str) -> None:
        """An idle worker that is given work begins to be expected to make progress."""
        if self._roster.held(worker_id) == 1:
            self._workers[worker_id.encode()].progressed_at = self._clock()

    def lose(self, identity: bytes, reason: str) -> None:
        """Fail its requests as retryable; an unknown worker is ignored."""
        worker = self._workers.pop(identity, None)
        if worker is None:
            return
        telemetry.WORKERS_LOST.labels(worker.register.device_class).inc()
        request_ids = self._roster.leave(worker.worker_id)
        _log.log(
            logging.INFO if worker.is_draining and not request_ids else logging.WARNING,
            "worker %s lost (%s); %d requests to resume",
            worker.worker_id,
            reason,
            len(request_ids),
        )
        for request_id in request_ids:
            _log.info("%s: its worker %s was lost", request_id, worker.worker_id)
            # Should it live on, it must not go on with what another will be given.
            self._outbox.send("worker", identity, Cancel(request_id=request_id))
            self._book.lose(request_id)

    def process_died(self, pid: int) -> None:
        for worker in [w for w in self._workers.values() if w.register.pid == pid]:
            self.lose(worker.identity, "its process ended")

    def tick(self) -> None:
        """Give up the workers that are silent or hang."""
        now = self._clock()
        for worker in list(self._workers.values()):
            silent_s = now - worker.heard_at
            stalled_s = worker.stalled_s(self._roster.held(worker.worker_id), now)
            if silent_s > self._patience_s:
                self.lose(worker.identity, f"silent for {silent_s:.1f} s")
            elif stalled_s > self._stall_s:
                self.lose(worker.identity, f"no progress for {stalled_s:.1f} s")
        recent = now - self._patience_s
        self._resets = {peer: at for peer, at in self._resets.items() if at > recent}

    def forgive(self) -> None:
        """Count silence and stalls from now."""
        for worker in self._workers.values():
            worker.heard_at = worker.progressed_at = self._clock()

    def _register(self, identity: bytes, message: Register) -> None:
        is_itself = message.worker_id.encode("utf-8", "replace") == identity
        is_known = message.device_class in self._classes
        if not (is_itself and is_known and 1 <= message.slots <= MAX_SLOTS):
            raise ProtocolError(f"bad registration {message!r}")
        self._resets.pop(identity, None)
        self.lose(identity, "it registered again")
        for other in [w for w in self._workers.values() if w.register.pid == message.pid > 0]:
            self.lose(other.identity, f"its process is now {message.worker_id}")
        now = self._clock()
        batch = BatchLimit(message.slots, self._target_inter_token_s)
        worker = self._workers[identity] = Worker(identity, message, now, now, batch)
        self._roster.join(message.worker_id, message.device_class, message.slots)
        _log.info("worker %s joined: %s", message.worker_id, message)
        self._outbox.send("worker", identity, Welcome(instance=self._instance))
        if self._is_draining:
            self._drain(worker)

    def _drain(self, worker: Worker) -> None:
        self._roster.drain(worker.worker_id)
        self._outbox.send("worker", worker.identity, Drain())

    def _reset(self, identity: bytes) -> None:
        # One at a time: a second reset, read after the worker has registered, would make it drop
        # what it was given since.
        now = self._clock()
        if now - self._resets.get(identity, -math.inf) >= self._patience_s:
            self._resets[identity] = now
            self._outbox.send("worker", identity, Reset())

    def _share(
        self, worker: Worker, heads: Sequence[OutputHead], items: Sequence[msgspec.Raw]
    ) -> Shares:
        """What goes to each gateway; payloads that one request alone waits for are copied, never
        read."""
        shares: Shares = {}
        worker.progressed_at = worker.heard_at
        for head, item in zip(heads, items, strict=True):
            name = head.request_id
            generation = self._book.generation(name)
            if generation is None or self._roster.holder(name) != worker.worker_id:
                if isinstance(head, ChunkHead):
                    self._outbox.send("worker", worker.identity, Cancel(request_id=name))
                continue
            self._book.deliver(generation, head, item, shares)
            if isinstance(head, Failed):
                _log.warning("%s: failed on %s: %s", name, worker.worker_id, head.message)
        return shares
