"""The live requests and the generations that answer them: whose they are, where they wait, which
worker has them.

A request is in the book from its submit until a `Finished` or `Failed` has gone to its gateway, or
nobody wants it any more. A generation is there as long as a request that it answers.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable

import msgspec

from mirror_sd import messages, telemetry
from mirror_sd.errors import MirrorError, NoWorker
from mirror_sd.messages import Cancel, ChunkHead, Finished, OutputHead, Submit
from mirror_sd.scheduler.dispatcher import Assignment, Dispatcher
from mirror_sd.scheduler.ticket import Ticket
from mirror_sd.serving.merging import Merging, last_for
from mirror_sd.serving.outbox import Outbox
from mirror_sd.serving.peers import Generation, Member

_log = logging.getLogger(__name__)

# How long a request whose generation was lost is expected back.
_RETURNING_S = 10.0

Shares = dict[bytes, list[msgspec.Raw]]


class RequestBook:
    def __init__(
        self,
        dispatcher: Dispatcher,
        outbox: Outbox,
        merging: Merging,
        clock: Callable[[], float],
    ) -> None:
        self._dispatcher = dispatcher
        self._outbox = outbox
        self._merging = merging
        self._clock = clock
        self._generations: dict[str, Generation] = {}
        self._answered_by: dict[str, Generation] = {}
        self._returning: dict[str, float] = {}
        self._numbers = itertools.count(2)

    def __len__(self) -> int:
        """Generations, waiting and running."""
        return len(self._generations)

    # Requests, as gateways see them.

    def owner(self, request_id: str) -> bytes | None:
        """The gateway of a live request."""
        generation = self._answered_by.get(request_id)
        if generation is None:
            return None
        follower = generation.followers.get(request_id)
        return generation.leader if follower is None else follower.gateway

    def owned_by(self, gateway: bytes) -> list[str]:
        return [name for name in self._answered_by if self.owner(name) == gateway]

    def is_returning(self, request_id: str) -> bool:
        """Whether its gateway was told, a moment ago, to submit it again."""
        return self._returning.get(request_id, 0.0) > self._clock()

    def open(self, gateway: bytes, submit: Submit, ticket: Ticket, frame: bytes) -> None:
        """Queue a request, or have it answered by a generation that there is; raises
        `CapacityError`, and then it is not in the book."""
        match = self._merging.match(submit)
        source = match.source
        joined = None if match.join is None else self._generations.get(match.join.name)
        if joined is not None and joined.answer is match.join:
            if self._suits(joined, ticket):
                member = Member(gateway, len(submit.prompt))
                self._merging.join(joined, submit, member, match.kind)
                self._answered_by[submit.request_id] = joined
                self._upgrade(joined, ticket)
                return
            source = match.join
        name = submit.request_id
        if name in self._generations:
            # Its own first generation, which it has left, lives on for others.
            name = f"{name}#{next(self._numbers)}"
            frame = messages.encode(msgspec.structs.replace(submit, request_id=name))
            ticket = dataclasses.replace(ticket, request_id=name)
        self._dispatcher.enqueue(ticket)
        generation = Generation(name, ticket, frame, gateway, len(submit.delivered))
        if name != submit.request_id:
            generation.leader = None
            generation.followers[submit.request_id] = Member(gateway, len(submit.prompt))
        self._generations[name] = generation
        self._answered_by[submit.request_id] = generation
        self._merging.begin(generation, submit, source)
        self._returning.pop(submit.request_id, None)

    def withdraw(self, request_id: str) -> None:
        """Nobody wants this request's answer any more; a generation that answers others too goes
        on for them."""
        generation = self._answered_by.pop(request_id)
        if generation.followers.pop(request_id, None) is None:
            generation.leader = None
        if generation.leader is None and not generation.followers:
            self._stop(generation)

    # Generations, as workers see them.

    def generation(self, name: str) -> Generation | None:
        return self._generations.get(name)

    def preferred_worker(self, name: str) -> str | None:
        """The worker that has most of a waiting generation's prompt in its cache."""
        generation = self._generations.get(name)
        source = None if generation is None else generation.source
        return None if source is None else source.worker_id

    def tokens_left(self, ticket: Ticket) -> int:
        generation = self._generations.get(ticket.request_id)
        return 0 if generation is None else generation.tokens_left

    def deliver(
        self, generation: Generation, head: OutputHead, item: msgspec.Raw, shares: Shares
    ) -> None:
        """Put an output of its worker into the share of each gateway that waits for it."""
        leader = generation.leader
        if leader is not None:
            share = shares.get(leader)
            if share is None:
                shares[leader] = [item]
            else:
                share.append(item)
        if isinstance(head, ChunkHead):
            generation.made = head.index + 1 - generation.delivered
            if generation.answer is not None:
                for gateway, chunk in self._merging.fan_out(generation, generation.answer, item):
                    shares.setdefault(gateway, []).append(messages.encode_output(chunk))
            return
        for name, member in generation.followers.items():
            last = messages.encode_output(last_for(name, member, head))
            shares.setdefault(member.gateway, []).append(last)
        self._close(generation, is_complete=isinstance(head, Finished))

    def lose(self, name: str) -> None:
        """Its worker was lost: every gateway is to submit its own again."""
        self._return(self._generations[name], NoWorker("the worker was lost"), is_displaced=False)

    def fail_all(self, error: MirrorError) -> None:
        for generation in list(self._generations.values()):
            self._fail(generation, error)

    def fail_waiting(self, error: MirrorError) -> None:
        """End what no worker has yet."""
        for ticket in self._dispatcher.withdraw_all():
            self._fail(self._generations[ticket.request_id], error)

    def tick(self) -> None:
        """End what has waited too long."""
        for ticket, error in self._dispatcher.overdue():
            _log.warning("%s: %s", ticket.request_id, error)
            self._fail(self._generations[ticket.request_id], error)
        now = self._clock()
        self._returning = {name: at for name, at in self._returning.items() if at > now}
        self._merging.tick()

    def next_assignment(self) -> Assignment | None:
        """Send the next generation that some worker has credit for to that worker."""
        assignment = self._dispatcher.next_assignment()
        if assignment is None:
            return None
        ticket = assignment.ticket
        generation = self._generations[ticket.request_id]
        # The gateway keeps the state of a request; from here on the frame is not needed.
        self._outbox.post("worker", assignment.worker_id.encode(), generation.frame)
        generation.frame = b""
        self._merging.dispatched(generation, assignment.worker_id)
        telemetry.QUEUE_WAIT.labels(ticket.device_class, ticket.tier).observe(assignment.waited_s)
        if assignment.served_by != ticket.device_class:
            moves = telemetry.STEALS if assignment.is_stolen else telemetry.FALLBACKS
            moves.labels(ticket.device_class, assignment.served_by).inc()
        _log.debug(
            "%s: to worker %s after %.3f s",
            ticket.request_id,
            assignment.worker_id,
            assignment.waited_s,
        )
        return assignment

    def displace_one(self) -> bool:
        """Take a slot from a standard request for a VIP that waits for one; False if none may."""
        name = self._dispatcher.next_displaced(self.tokens_left)
        if name is None:
            return False
        generation = self._generations[name]
        _log.info("%s: displaced by a VIP after %d tokens", name, generation.made)
        telemetry.BROKER_DISPLACEMENTS.labels(generation.ticket.device_class).inc()
        for request_id, _ in generation.members():
            self._dispatcher.note_displaced(request_id)
        self._return(generation, NoWorker("a VIP request took its place"), is_displaced=True)
        return True

    def check_integrity(self) -> None:
        """Raises `AssertionError` if requests and generations do not belong together."""
        answered = {
            request_id: generation
            for generation in self._generations.values()
            for request_id, _ in generation.members()
        }
        if answered != self._answered_by:
            raise AssertionError(f"{sorted(answered)}, but {sorted(self._answered_by)} recorded")
        if not all(generation.members() for generation in self._generations.values()):
            raise AssertionError("a generation that nobody wants")
        self._merging.check_integrity()

    def _suits(self, generation: Generation, ticket: Ticket) -> bool:
        """Whether the class that serves it will do: a VIP is not held to the pace of another."""
        roster = self._dispatcher.roster
        worker_id = roster.holder(generation.name)
        served_by = generation.ticket.device_class
        if worker_id is not None:
            served_by = roster.class_of(worker_id)
        return not ticket.is_vip or served_by == ticket.device_class

    def _upgrade(self, generation: Generation, ticket: Ticket) -> None:
        """A generation is as urgent as the most urgent of its requests, and lives as long as the
        one that may live longest."""
        old = generation.ticket
        generation.ticket = dataclasses.replace(
            old,
            tier=ticket.tier if ticket.is_vip else old.tier,
            deadline=max(old.deadline, ticket.deadline),
            arrived_at=min(old.arrived_at, ticket.arrived_at),
        )
        if generation.ticket != old:
            self._dispatcher.upgrade(generation.ticket)

    def _return(self, generation: Generation, error: MirrorError, *, is_displaced: bool) -> None:
        """End a generation whose requests their gateways are to submit again."""
        until = self._clock() + _RETURNING_S
        self._returning |= dict.fromkeys((name for name, _ in generation.members()), until)
        self._fail(generation, error, is_retryable=True, is_displaced=is_displaced)

    def _fail(
        self,
        generation: Generation,
        error: MirrorError,
        *,
        is_retryable: bool = False,
        is_displaced: bool = False,
    ) -> None:
        """End a generation, wherever it is, with an error to the gateways of its requests."""
        self._stop(generation)
        for request_id, gateway in generation.members():
            self._outbox.fail(
                gateway, request_id, error, is_retryable=is_retryable, is_displaced=is_displaced
            )

    def _stop(self, generation: Generation) -> None:
        """Take it out of its queue or from its worker."""
        self._dispatcher.withdraw(generation.name)
        worker_id = self._close(generation, is_complete=False)
        if worker_id is not None:
            cancel = Cancel(request_id=generation.name)
            self._outbox.send("worker", worker_id.encode(), cancel)

    def _close(self, generation: Generation, *, is_complete: bool) -> str | None:
        """The generation is over; the worker that had it, None if none did."""
        del self._generations[generation.name]
        for request_id, _ in generation.members():
            del self._answered_by[request_id]
        self._merging.end(generation, is_complete=is_complete)
        return self._dispatcher.release(generation.name)
