"""The broker's state and rules, without its sockets: frames in, frames out.

    from_gateway, from_worker   take a frame; one that cannot be read is counted and dropped
    tick                        deadlines, silence, stalls, gauges
    dispatch                    hands waiting requests to workers with credit
    outbox                      what is to be sent, in order

Every peer is disposable. A lost worker's requests fail as retryable and their gateways submit them
again with what they have; a lost gateway's requests are cancelled. A peer that was given up and
turns out to be alive is told so: a worker by `Reset`, a gateway by another `Pong.instance`.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from mirror_sd import messages, telemetry
from mirror_sd.config import Config, DeviceClass
from mirror_sd.errors import CapacityError, InvalidRequest, MirrorError, NoWorker, ProtocolError
from mirror_sd.messages import (
    Cancel,
    ChunkHead,
    Drain,
    Failed,
    Finished,
    Heartbeat,
    Ping,
    Pong,
    Register,
    Reset,
    Stats,
    StatsRequest,
    Submit,
    Welcome,
)
from mirror_sd.scheduler.dispatcher import Assignment, Dispatcher
from mirror_sd.scheduler.priority_queue import TIERS, Ticket
from mirror_sd.serving.peers import Gateway, Request, Worker

_log = logging.getLogger(__name__)

Side = Literal["gateway", "worker"]
MAX_SLOTS = 4096


class Outgoing(NamedTuple):
    side: Side
    identity: bytes
    frame: bytes


class Switchboard:
    def __init__(
        self,
        config: Config,
        instance: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self.outbox: deque[Outgoing] = deque()
        self._instance = instance
        self._clock = clock
        self._unix_clock = unix_clock
        self._patience_s = config.broker.heartbeat_ms * config.broker.missed_heartbeats / 1e3
        self._stall_s = config.broker.stall_s
        self._dispatcher = Dispatcher(
            get_args(DeviceClass),
            config.pools,
            clock=clock,
            max_queue=config.scheduler.max_queue,
            fallback_s=config.broker.fallback_s,
            worker_wait_s=config.broker.worker_wait_s,
        )
        self._default_class = next(iter(config.pools))
        self._gateways: dict[bytes, Gateway] = {}
        self._workers: dict[bytes, Worker] = {}
        self._requests: dict[str, Request] = {}
        self._resets: dict[bytes, float] = {}
        self._sessions = 0
        self._is_draining = False
        self._ticked_at = clock()

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def pids(self) -> set[int]:
        """Processes of all peers that have told theirs."""
        known = {worker.register.pid for worker in self._workers.values()}
        known |= {gateway.pid for gateway in self._gateways.values()}
        return {pid for pid in known if pid > 0}

    # Gateways.

    def from_gateway(self, identity: bytes, frame: bytes) -> None:
        try:
            message = messages.decode(frame)
        except ProtocolError as error:
            self.drop_frame("gateway", identity, str(error))
            return
        if not isinstance(message, Submit | Cancel | Ping | StatsRequest):
            self.drop_frame("gateway", identity, f"{type(message).__name__} from a gateway")
            return
        gateway = self._hear_gateway(identity)
        match message:
            case Submit():
                self._submit(gateway, message, frame)
            case Cancel():
                self._cancel(gateway, message.request_id)
            case Ping():
                gateway.pid = message.pid
                self._send("gateway", identity, Pong(instance=gateway.session))
            case StatsRequest():
                self._send("gateway", identity, self.stats(message.token))

    def _hear_gateway(self, identity: bytes) -> Gateway:
        gateway = self._gateways.get(identity)
        if gateway is None:
            self._sessions += 1
            session = f"{self._instance}.{self._sessions}"
            gateway = self._gateways[identity] = Gateway(identity, session, self._clock())
            _log.info("gateway %s joined", _name(identity))
        gateway.heard_at = self._clock()
        return gateway

    def _submit(self, gateway: Gateway, submit: Submit, frame: bytes) -> None:
        request_id = submit.request_id
        held = self._requests.get(request_id)
        if held is not None:
            if held.gateway != gateway.identity:
                error = InvalidRequest(f"request id {request_id} is in use by another gateway")
                self._fail(gateway.identity, request_id, error)
            return
        if self._is_draining:
            self._fail(gateway.identity, request_id, NoWorker("the server is shutting down"))
            return
        try:
            self._dispatcher.enqueue(self._ticket(submit))
        except CapacityError as error:
            _log.warning("%s: refused: %s", request_id, error)
            self._fail(gateway.identity, request_id, error)
            return
        self._requests[request_id] = Request(gateway.identity, frame)
        gateway.requests.add(request_id)

    def _ticket(self, submit: Submit) -> Ticket:
        # Names that no class or tier has would make unbounded metric labels.
        known = submit.device_class in self._dispatcher.classes
        arrived_at = self._clock() - submit.age_s(self._unix_clock())
        timeout_s = submit.timeout_s
        lasts = timeout_s is None or math.isnan(timeout_s)
        return Ticket(
            request_id=submit.request_id,
            device_class=submit.device_class if known else self._default_class,
            tier=submit.tier if submit.tier in TIERS else TIERS[-1],
            tenant=submit.tenant,
            arrived_at=arrived_at,
            deadline=math.inf if lasts or timeout_s is None else arrived_at + timeout_s,
        )

    def _cancel(self, gateway: Gateway, request_id: str) -> None:
        if request_id not in gateway.requests:
            return
        self._withdraw(request_id)
        _log.info("%s: cancelled", request_id)

    def lose_gateway(self, identity: bytes, reason: str) -> None:
        """Cancel all its requests; an unknown one is ignored."""
        gateway = self._gateways.pop(identity, None)
        if gateway is None:
            return
        _log.warning(
            "gateway %s lost (%s); %d requests cancelled",
            _name(identity),
            reason,
            len(gateway.requests),
        )
        for request_id in list(gateway.requests):
            self._withdraw(request_id)

    def _withdraw(self, request_id: str) -> None:
        """Nobody wants the answer: leave the queue, or stop the worker."""
        self._dispatcher.withdraw(request_id)
        worker_id = self._forget(request_id)
        if worker_id is not None:
            self._send("worker", worker_id.encode(), Cancel(request_id=request_id))

    # Workers.

    def from_worker(self, identity: bytes, frame: bytes) -> None:
        try:
            message = messages.decode_from_worker(frame)
        except ProtocolError as error:
            self.drop_frame("worker", identity, str(error))
            return
        if isinstance(message, Register):
            self._register(identity, message)
            return
        worker = self._workers.get(identity)
        if worker is None:
            self._reset(identity)
            return
        worker.heard_at = self._clock()
        match message:
            case ChunkHead():
                worker.progressed_at = worker.heard_at
                self._forward(worker, message.request_id, frame)
            case Finished() | Failed():
                self._conclude(worker, message, frame)
            case Heartbeat():
                worker.beat(message, worker.heard_at)
                if message.draining:
                    self._dispatcher.roster.drain(worker.worker_id)

    def _register(self, identity: bytes, message: Register) -> None:
        if (
            message.worker_id.encode("utf-8", "replace") != identity
            or message.device_class not in self._dispatcher.classes
            or not 1 <= message.slots <= MAX_SLOTS
        ):
            self.drop_frame("worker", identity, f"bad registration {message!r}")
            return
        self._resets.pop(identity, None)
        self.lose_worker(identity, "it registered again")
        for other in list(self._workers.values()):
            if other.register.pid == message.pid:
                self.lose_worker(other.identity, f"its process is now {message.worker_id}")
        now = self._clock()
        self._workers[identity] = Worker(identity, message, now, now)
        self._dispatcher.roster.join(message.worker_id, message.device_class, message.slots)
        _log.info("worker %s joined: %s", message.worker_id, message)
        self._send("worker", identity, Welcome(instance=self._instance))
        if self._is_draining:
            self._dispatcher.roster.drain(message.worker_id)
            self._send("worker", identity, Drain())

    def _reset(self, identity: bytes) -> None:
        # One at a time: a second reset, read after the worker has registered, would make it drop
        # what it was given since.
        now = self._clock()
        if now - self._resets.get(identity, -math.inf) >= self._patience_s:
            self._resets[identity] = now
            self._send("worker", identity, Reset())

    def _forward(self, worker: Worker, request_id: str, frame: bytes) -> None:
        if self._dispatcher.roster.holder(request_id) != worker.worker_id:
            self._send("worker", worker.identity, Cancel(request_id=request_id))
            return
        self._post("gateway", self._requests[request_id].gateway, frame)

    def _conclude(self, worker: Worker, message: Finished | Failed, frame: bytes) -> None:
        worker.progressed_at = worker.heard_at
        if self._dispatcher.roster.holder(message.request_id) != worker.worker_id:
            return
        self._post("gateway", self._requests[message.request_id].gateway, frame)
        self._forget(message.request_id)
        if isinstance(message, Failed):
            _log.warning(
                "%s: failed on %s: %s", message.request_id, worker.worker_id, message.message
            )

    def lose_worker(self, identity: bytes, reason: str) -> None:
        """Fail its requests as retryable; an unknown worker is ignored."""
        worker = self._workers.pop(identity, None)
        if worker is None:
            return
        request_ids = self._dispatcher.roster.leave(worker.worker_id)
        telemetry.WORKERS_LOST.labels(worker.register.device_class).inc()
        _log.warning(
            "worker %s lost (%s); %d requests to resume",
            worker.worker_id,
            reason,
            len(request_ids),
        )
        for request_id in request_ids:
            _log.info("%s: its worker %s was lost", request_id, worker.worker_id)
            # Should it live on, it must not go on with what another will be given.
            self._send("worker", identity, Cancel(request_id=request_id))
            error = NoWorker("the worker was lost")
            self._fail(self._requests[request_id].gateway, request_id, error, is_retryable=True)
            self._forget(request_id)

    # Both.

    def process_died(self, pid: int) -> None:
        """The process of a peer has ended."""
        for worker in [w for w in self._workers.values() if w.register.pid == pid]:
            self.lose_worker(worker.identity, "its process ended")
        for gateway in [g for g in self._gateways.values() if g.pid == pid]:
            self.lose_gateway(gateway.identity, "its process ended")

    def unreachable(self, side: Side, identity: bytes, reason: str) -> None:
        """A frame could not be handed to this peer."""
        if side == "worker":
            self.lose_worker(identity, reason)
        else:
            self.lose_gateway(identity, reason)

    def drop_frame(self, side: Side, identity: bytes, reason: str) -> None:
        telemetry.BAD_FRAMES.labels(side).inc()
        _log.warning("frame from %s %s dropped: %s", side, _name(identity), reason[:500])

    def dispatch(self) -> None:
        """Send waiting requests to workers while any has credit."""
        while (assignment := self._dispatcher.next_assignment()) is not None:
            self._assign(assignment)

    def _assign(self, assignment: Assignment) -> None:
        ticket = assignment.ticket
        request = self._requests[ticket.request_id]
        frame, request.frame = request.frame, None
        assert frame is not None, "a waiting request keeps its frame"
        identity = assignment.worker_id.encode()
        if self._dispatcher.roster.held(assignment.worker_id) == 1:
            self._workers[identity].progressed_at = self._clock()
        self._post("worker", identity, frame)
        telemetry.QUEUE_WAIT.labels(ticket.device_class, ticket.tier).observe(assignment.waited_s)
        if assignment.served_by != ticket.device_class:
            telemetry.FALLBACKS.labels(ticket.device_class, assignment.served_by).inc()
        _log.info(
            "%s: to worker %s after %.3f s",
            ticket.request_id,
            assignment.worker_id,
            assignment.waited_s,
        )

    def tick(self) -> None:
        """Call a few times a heartbeat."""
        now = self._clock()
        self._forgive_own_pause(now)
        for worker in list(self._workers.values()):
            stalled_s = worker.stalled_s(self._dispatcher.roster.held(worker.worker_id), now)
            if now - worker.heard_at > self._patience_s:
                self.lose_worker(worker.identity, f"silent for {now - worker.heard_at:.1f} s")
            elif stalled_s > self._stall_s:
                self.lose_worker(worker.identity, f"no progress for {stalled_s:.1f} s")
        for gateway in list(self._gateways.values()):
            if now - gateway.heard_at > self._patience_s:
                self.lose_gateway(gateway.identity, f"silent for {now - gateway.heard_at:.1f} s")
        for ticket, error in self._dispatcher.overdue():
            _log.warning("%s: %s", ticket.request_id, error)
            self._fail(self._requests[ticket.request_id].gateway, ticket.request_id, error)
            self._forget(ticket.request_id)
        recent = now - self._patience_s
        self._resets = {peer: at for peer, at in self._resets.items() if at > recent}
        self._set_gauges()

    def _forgive_own_pause(self, now: float) -> None:
        # While this process was stopped or starved it could not have heard anyone.
        pause_s = now - self._ticked_at
        self._ticked_at = now
        if pause_s > self._patience_s / 2:
            for gateway in self._gateways.values():
                gateway.heard_at += pause_s
            for worker in self._workers.values():
                worker.heard_at += pause_s
                worker.progressed_at += pause_s

    def start_drain(self) -> None:
        """Take nothing new and let what runs finish; what waits is refused."""
        self._is_draining = True
        for worker in self._workers.values():
            self._dispatcher.roster.drain(worker.worker_id)
            self._send("worker", worker.identity, Drain())
        for ticket in self._dispatcher.withdraw_all():
            self._end(ticket.request_id)

    def end_drain(self) -> None:
        """Time is up: fail what still runs."""
        for request_id in list(self._requests):
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        gateway = self._requests[request_id].gateway
        self._withdraw(request_id)
        self._fail(gateway, request_id, NoWorker("the server is shutting down"))

    def stats(self, token: int) -> Stats:
        now = self._clock()
        roster = self._dispatcher.roster
        queues = [self._dispatcher.queue(name) for name in self._dispatcher.classes]
        return Stats(
            token=token,
            instance=self._instance,
            pid=os.getpid(),
            running=len(self._requests) - self._dispatcher.waiting,
            waiting=self._dispatcher.waiting,
            oldest_wait_s=max(queue.oldest_age_s() for queue in queues),
            workers=tuple(w.stats(roster.held(w.worker_id), now) for w in self._workers.values()),
            gateways=tuple(gateway.pid for gateway in self._gateways.values()),
        )

    def _set_gauges(self) -> None:
        roster = self._dispatcher.roster
        for name in self._dispatcher.classes:
            queue = self._dispatcher.queue(name)
            for tier in TIERS:
                telemetry.QUEUE_DEPTH.labels(name, tier).set(queue.depth(tier))
            telemetry.QUEUE_AGE.labels(name).set(queue.oldest_age_s())
            telemetry.IN_FLIGHT.labels(name).set(roster.in_flight(name))
            telemetry.WORKERS.labels(name).set(roster.workers(name))

    def _forget(self, request_id: str) -> str | None:
        """Drop a request; the worker that held it, None if none did."""
        request = self._requests.pop(request_id)
        gateway = self._gateways.get(request.gateway)
        if gateway is not None:
            gateway.requests.discard(request_id)
        return self._dispatcher.roster.release(request_id)

    def _fail(
        self, gateway: bytes, request_id: str, error: MirrorError, *, is_retryable: bool = False
    ) -> None:
        failed = Failed(
            request_id=request_id,
            code=error.code or "internal_error",
            message=error.message,
            param=error.param,
            retry_after_s=error.retry_after_s,
            retryable=is_retryable,
        )
        self._send("gateway", gateway, failed)

    def _send(self, side: Side, identity: bytes, message: messages.AnyMessage) -> None:
        self._post(side, identity, messages.encode(message))

    def _post(self, side: Side, identity: bytes, frame: bytes) -> None:
        self.outbox.append(Outgoing(side, identity, frame))


def _name(identity: bytes) -> str:
    return identity.decode("utf-8", "backslashreplace")[:80]
