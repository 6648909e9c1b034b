"""The live requests: whose they are, where they wait, which worker has them.

A request is in the book from its submit until a `Finished` or `Failed` has gone to its gateway, or
nobody wants it any more.
"""

from __future__ import annotations

import logging

from mirror_sd import telemetry
from mirror_sd.errors import MirrorError
from mirror_sd.messages import Cancel
from mirror_sd.scheduler.dispatcher import Assignment, Dispatcher
from mirror_sd.scheduler.priority_queue import Ticket
from mirror_sd.serving.outbox import Outbox
from mirror_sd.serving.peers import Request

_log = logging.getLogger(__name__)


class RequestBook:
    def __init__(self, dispatcher: Dispatcher, outbox: Outbox) -> None:
        self._dispatcher = dispatcher
        self._outbox = outbox
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def owner(self, request_id: str) -> bytes | None:
        """The gateway of a live request."""
        request = self._requests.get(request_id)
        return None if request is None else request.gateway

    def owned_by(self, gateway: bytes) -> list[str]:
        return [name for name, request in self._requests.items() if request.gateway == gateway]

    def open(self, gateway: bytes, ticket: Ticket, frame: bytes) -> None:
        """Queue a request; raises `CapacityError`, and then it is not in the book."""
        self._dispatcher.enqueue(ticket)
        self._requests[ticket.request_id] = Request(gateway, frame)

    def close(self, request_id: str) -> str | None:
        """The request is over; the worker that had it, None if none did."""
        del self._requests[request_id]
        return self._dispatcher.roster.release(request_id)

    def withdraw(self, request_id: str) -> None:
        """Nobody wants the answer: leave the queue, or stop the worker."""
        self._dispatcher.withdraw(request_id)
        worker_id = self.close(request_id)
        if worker_id is not None:
            self._outbox.send("worker", worker_id.encode(), Cancel(request_id=request_id))

    def fail(self, request_id: str, error: MirrorError, *, is_retryable: bool = False) -> None:
        """End a request, wherever it is, with an error to its gateway."""
        gateway = self._requests[request_id].gateway
        self.withdraw(request_id)
        self._outbox.fail(gateway, request_id, error, is_retryable=is_retryable)

    def fail_all(self, error: MirrorError) -> None:
        for request_id in list(self._requests):
            self.fail(request_id, error)

    def fail_waiting(self, error: MirrorError) -> None:
        """End what no worker has yet."""
        for ticket in self._dispatcher.withdraw_all():
            self.fail(ticket.request_id, error)

    def fail_overdue(self) -> None:
        """End what has waited too long."""
        for ticket, error in self._dispatcher.overdue():
            _log.warning("%s: %s", ticket.request_id, error)
            self.fail(ticket.request_id, error)

    def next_assignment(self) -> Assignment | None:
        """Send the next request that some worker has credit for to that worker."""
        assignment = self._dispatcher.next_assignment()
        if assignment is None:
            return None
        ticket = assignment.ticket
        request = self._requests[ticket.request_id]
        # The gateway keeps the state of a request; from here on the frame is not needed.
        self._outbox.post("worker", assignment.worker_id.encode(), request.frame)
        request.frame = b""
        telemetry.QUEUE_WAIT.labels(ticket.device_class, ticket.tier).observe(assignment.waited_s)
        if assignment.served_by != ticket.device_class:
            telemetry.FALLBACKS.labels(ticket.device_class, assignment.served_by).inc()
        _log.debug(
            "%s: to worker %s after %.3f s",
            ticket.request_id,
            assignment.worker_id,
            assignment.waited_s,
        )
        return assignment
