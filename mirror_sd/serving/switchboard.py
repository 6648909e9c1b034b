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
import os
import time
from collections.abc import Callable
from typing import get_args

from mirror_sd import messages, telemetry
from mirror_sd.config import Config, SchedulerConfig
from mirror_sd.config_section import DeviceClass
from mirror_sd.errors import NoWorker, ProtocolError
from mirror_sd.messages import Cancel, Ping, QueueStats, Stats, StatsRequest, Submit
from mirror_sd.scheduler.dispatcher import Dispatcher, DispatchRules
from mirror_sd.scheduler.priority_queue import QueueRules
from mirror_sd.scheduler.ticket import TIERS
from mirror_sd.serving.gateway_desk import GatewayDesk
from mirror_sd.serving.merging import Merging
from mirror_sd.serving.outbox import Outbox, Side
from mirror_sd.serving.request_book import RequestBook
from mirror_sd.serving.worker_desk import WorkerDesk

_log = logging.getLogger(__name__)

# A dead gateway is noticed by its process or its connection. One that lives but is silent is
# starved of CPU, most likely; cancelling its requests, to get them again, would starve it more.
_GATEWAY_PATIENCE = 10


class Switchboard:
    def __init__(
        self,
        config: Config,
        instance: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        broker = config.broker
        self._instance = instance
        self._clock = clock
        self._patience_s = broker.heartbeat_ms * broker.missed_heartbeats / 1e3
        self._ticked_at = clock()
        # The classes with a pool first: what asks for no known class goes to the first of them.
        classes = tuple(dict.fromkeys((*config.pools, *get_args(DeviceClass))))
        self.outbox = Outbox()
        self._dispatcher = Dispatcher(
            classes,
            config.pools,
            clock=clock,
            queue_rules=_queue_rules(config.scheduler),
            rules=_dispatch_rules(config),
            preferred_worker=lambda name: self._book.preferred_worker(name),
        )
        self._merging = Merging(config, self.outbox, clock)
        self._book = RequestBook(self._dispatcher, self.outbox, self._merging, clock)
        self._gateways = GatewayDesk(
            self._book,
            self.outbox,
            instance=instance,
            classes=classes,
            patience_s=self._patience_s * _GATEWAY_PATIENCE,
            clock=clock,
            unix_clock=unix_clock,
            stats=self.stats,
        )
        self._workers = WorkerDesk(
            self._book,
            self._dispatcher.roster,
            self.outbox,
            instance=instance,
            classes=classes,
            patience_s=self._patience_s,
            stall_s=broker.stall_s,
            scheduler=config.scheduler,
            clock=clock,
        )

    @property
    def due_at(self) -> float:
        """When `dispatch` will find more to do, if nothing happens until then."""
        return self._dispatcher.due_at

    @property
    def is_idle(self) -> bool:
        return not len(self._book)

    def pids(self) -> set[int]:
        """Processes of all peers that have told theirs."""
        return {pid for pid in (*self._workers.pids(), *self._gateways.pids()) if pid > 0}

    def from_gateway(self, identity: bytes, frame: bytes) -> None:
        try:
            message = messages.decode(frame)
            if not isinstance(message, Submit | Cancel | Ping | StatsRequest):
                raise ProtocolError(f"a gateway does not send {type(message).__name__}")
            self._gateways.handle(identity, message, frame)
            if isinstance(message, Submit):
                # At once, or a burst would be refused for a full queue while workers are free.
                self.dispatch()
        except ProtocolError as error:
            self.drop_frame("gateway", identity, error.message)

    def from_worker(self, identity: bytes, frame: bytes) -> None:
        try:
            self._workers.handle(identity, messages.decode_from_worker(frame), frame)
        except ProtocolError as error:
            self.drop_frame("worker", identity, error.message)

    def drop_frame(self, side: Side, identity: bytes, reason: str) -> None:
        telemetry.BAD_FRAMES.labels(side).inc()
        _log.warning("frame from %s %r dropped: %s", side, identity[:80], reason[:500])

    def process_died(self, pid: int) -> None:
        """The process of a peer has ended."""
        self._workers.process_died(pid)
        self._gateways.process_died(pid)

    def unreachable(self, side: Side, identity: bytes, reason: str) -> None:
        """A frame could not be handed to this peer."""
        if side == "worker":
            self._workers.lose(identity, reason)
        else:
            self._gateways.lose(identity, reason)

    def dispatch(self) -> None:
        """Send waiting requests to workers while any has credit, or must make room."""
        while self._dispatcher.waiting:
            while (assignment := self._book.next_assignment()) is not None:
                self._workers.note_assignment(assignment.worker_id)
            if not self._book.displace_one():
                return

    def tick(self) -> None:
        """Call a few times a heartbeat."""
        now = self._clock()
        if now - self._ticked_at > self._patience_s / 2:
            # While this process was stopped or starved it could not have heard anyone.
            self._workers.forgive()
            self._gateways.forgive()
        self._ticked_at = now
        self._workers.tick()
        self._gateways.tick()
        self._book.tick()
        self._set_gauges()

    def start_drain(self) -> None:
        """Take nothing new and let what runs finish; what waits is refused."""
        self._gateways.is_closed = True
        self._workers.start_drain()
        self._book.fail_waiting(NoWorker("the server is shutting down"))

    def end_drain(self) -> None:
        """Time is up: fail what still runs."""
        self._book.fail_all(NoWorker("the server is shutting down"))

    def stats(self, token: int) -> Stats:
        queues = [self._dispatcher.queue(name) for name in self._dispatcher.classes]
        return Stats(
            token=token,
            instance=self._instance,
            pid=os.getpid(),
            running=len(self._book) - self._dispatcher.waiting,
            waiting=self._dispatcher.waiting,
            oldest_wait_s=max(queue.oldest_age_s() for queue in queues),
            workers=self._workers.stats(),
            gateways=tuple(self._gateways.pids()),
            queues=tuple(
                QueueStats(
                    device_class=name,
                    tier=tier,
                    depth=self._dispatcher.queue(name).depth(tier),
                    oldest_wait_s=self._dispatcher.queue(name).oldest_age_s(tier),
                )
                for name in self._dispatcher.classes
                for tier in TIERS
            ),
        )

    def check_integrity(self) -> None:
        """Raises `AssertionError` if the book, the queues and the roster disagree."""
        self._dispatcher.check_integrity()
        self._book.check_integrity()
        in_flight = sum(self._dispatcher.roster.in_flight(n) for n in self._dispatcher.classes)
        if len(self._book) != self._dispatcher.waiting + in_flight:
            raise AssertionError(
                f"{len(self._book)} generations, but {self._dispatcher.waiting} wait"
                f" and {in_flight} run"
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
            telemetry.BATCH_LIMIT.labels(name).set(roster.limits(name))
        telemetry.DRAFT_SOURCES.set(self._merging.draft_sources)


def _queue_rules(scheduler: SchedulerConfig) -> QueueRules:
    return QueueRules(
        limit=scheduler.max_queue,
        vip_extra=scheduler.vip_queue_extra,
        standard_share=scheduler.standard_share,
        max_wait_s=scheduler.max_wait_s,
    )


def _dispatch_rules(config: Config) -> DispatchRules:
    scheduler, broker = config.scheduler, config.broker
    return DispatchRules(
        fallback_s=broker.fallback_s,
        worker_wait_s=broker.worker_wait_s,
        batch_wait_s=scheduler.timeout_ms / 1e3,
        steal_after_s=scheduler.steal_after_ms / 1e3,
        preemption=scheduler.preemption,
    )
