"""The gateway's requests, which outlive whatever they talk to.

The client holds each request's whole state (`Delivery`), so what it talks to may die:

    Failed(retryable)            a worker was lost: submit the rest, after a pause that grows
    Failed(displaced)            a VIP took its place: submit the rest at once
    Pong with another instance   the broker lost all requests: submit every rest at once
    connection broken and back   frames may be lost: the same
    a gap in the tokens          cancel that attempt, submit the rest under another wire id

No answer at all only makes `alive` false: ZeroMQ reconnects, requests wait until their deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

from mirror_sd import messages, telemetry
from mirror_sd.config import BrokerConfig
from mirror_sd.errors import (
    BY_CODE,
    CapacityError,
    DeadlineExceeded,
    InternalError,
    MirrorError,
    NoWorker,
    PayloadTooLarge,
    QueueFull,
)
from mirror_sd.messages import (
    MAX_FRAME_BYTES,
    AnyMessage,
    Cancel,
    Chunk,
    Failed,
    Finished,
    Output,
    Outputs,
    Pong,
    Stats,
    StatsRequest,
    Submit,
)
from mirror_sd.serving.broker_link import BrokerLink
from mirror_sd.serving.call import Call, Event
from mirror_sd.serving.delivery import Gap

_log = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
DEFAULT_TIMEOUT_S = 3600.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


class BrokerClient:
    """Make it anywhere, `start` it in the process and loop that use it (after any fork)."""

    def __init__(
        self, endpoint: str, identity: str, config: BrokerConfig, *, max_outstanding: int = 4096
    ) -> None:
        self._link = BrokerLink(
            endpoint, identity, config, on_message=self._hear, on_lost=self._lose_link
        )
        self._max_outstanding = max_outstanding
        self._calls: dict[str, Call] = {}
        self._questions: dict[int, asyncio.Future[Stats]] = {}
        self._tokens = itertools.count(1)
        # The broker's instance while it has all our calls; None until a pong says so.
        self._instance: str | None = None

    @property
    def alive(self) -> bool:
        """Whether the broker was heard within its missed heartbeats."""
        return self._link.is_alive

    async def start(self) -> None:
        """Connect in the background; returns at once, whether or not the broker is there."""
        self._link.start()

    async def close(self) -> None:
        """Cancel what still runs (its callers get `NoWorker`) and free the socket."""
        for call in list(self._calls.values()):
            self._stop(call, NoWorker("the gateway is shutting down"))
        for question in self._questions.values():
            question.cancel()
        await self._link.close()

    def open(self, submit: Submit, on_event: Callable[[Event], None]) -> Callable[[], None]:
        """Run a request; `on_event` gets its chunks without duplicates or gaps, then `Finished`,
        or instead, as the last one, the error that ended it: that of a `Failed`,
        `DeadlineExceeded` when `timeout_s` is over (an hour where none is given).

        `on_event` is called from the event loop and must not raise. Returns what leaves the
        request: no event comes any more, and what still runs is cancelled. It must be called, at
        the end too. Raises `QueueFull` when this process has too many requests, `PayloadTooLarge`.
        """
        call = self._open(submit, on_event)
        return lambda: self._leave(call)

    async def stats(self) -> Stats:
        """The broker's view; raises `NoWorker` if it does not answer within the heartbeats."""
        token = next(self._tokens)
        question: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._questions[token] = question
        try:
            async with asyncio.timeout(max(1.0, self._link.patience_s)):
                await self._link.connected.wait()
                self._link.send(StatsRequest(token=token))
                return await question
        except TimeoutError as error:
            raise NoWorker("the broker does not answer") from error
        finally:
            del self._questions[token]

    # Requests.

    def _open(self, submit: Submit, on_event: Callable[[Event], None]) -> Call:
        if not self._link.is_started:
            raise RuntimeError("BrokerClient.start has not been called")
        if submit.request_id in self._calls:
            raise ValueError(f"request {submit.request_id} is running already")
        if len(self._calls) >= self._max_outstanding:
            raise QueueFull(f"this gateway has {self._max_outstanding} requests running")
        # Resumed, it grows by what was delivered. A token takes 9 bytes at most.
        is_large = len(submit.prompt) * 9 > MAX_FRAME_BYTES // 4
        if is_large and len(messages.encode(submit)) > MAX_FRAME_BYTES // 2:
            raise PayloadTooLarge("the request is too large")
        call = Call(submit, on_event)
        timeout_s = DEFAULT_TIMEOUT_S if submit.timeout_s is None else submit.timeout_s
        call.deadline = asyncio.get_running_loop().call_later(
            max(0.0, timeout_s - submit.age_s(time.time())),
            self._stop,
            call,
            DeadlineExceeded("the request's time ran out"),
        )
        self._calls[call.delivery.wire_id] = call
        self._submit(call)
        return call

    def _leave(self, call: Call) -> None:
        if not call.is_over:
            self._cancel(call)
            call.abandon()
        self._calls.pop(call.delivery.wire_id, None)

    def _submit(self, call: Call) -> None:
        """Submit what is not yet delivered; without a link that is left to the pong that makes
        one."""
        call.plan_retry(None)
        if self._instance is None:
            return
        if call.is_submitted:
            telemetry.RESUMES.inc()
            _log.info("%s: submitted again after %d tokens", call.name, call.delivery.count)
        self._send_remainder(call)

    def _send_remainder(self, call: Call) -> None:
        call.is_submitted = True
        self._link.send(call.delivery.remainder())

    def _submit_displaced(self, call: Call) -> None:
        """At once: the broker has kept its place."""
        telemetry.DISPLACEMENTS.inc()
        _log.info("%s: displaced after %d tokens", call.name, call.delivery.count)
        if self._instance is not None:
            self._send_remainder(call)

    def _cancel(self, call: Call) -> None:
        if call.is_submitted:
            self._link.send(Cancel(request_id=call.delivery.wire_id))

    def _stop(self, call: Call, error: MirrorError) -> None:
        if not call.is_over:
            self._cancel(call)
            call.end(error)

    def _mend(self, call: Call, gap: Gap) -> None:
        _log.error("%s: %s", call.name, gap)
        self._cancel(call)
        del self._calls[call.delivery.wire_id]
        call.delivery.renew()
        self._calls[call.delivery.wire_id] = call
        self._retry(call, InternalError(gap.message))

    def _retry(self, call: Call, error: MirrorError) -> None:
        """Submit the rest after a pause; give up after `MAX_ATTEMPTS` without a new token."""
        call.failures += 1
        if call.failures >= MAX_ATTEMPTS:
            _log.error("%s: given up after %d attempts: %s", call.name, call.failures, error)
            call.end(error)
            return
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 4 ** (call.failures - 1))
        _log.warning("%s: to be submitted again in %.2f s: %s", call.name, pause_s, error)
        loop = asyncio.get_running_loop()
        call.plan_retry(loop.call_later(pause_s, self._submit, call))

    # Messages from the broker.

    def _lose_link(self) -> None:
        self._instance = None

    def _hear(self, message: AnyMessage) -> None:
        match message:
            case Outputs(items=outputs):
                for output in outputs:
                    self._hear_output(output)
            case Chunk() | Finished() | Failed():
                self._hear_output(message)
            case Pong(instance=instance):
                self._hear_pong(instance)
            case Stats():
                question = self._questions.get(message.token)
                if question is not None and not question.done():
                    question.set_result(message)
            case _:
                _log.error("the broker sent a %s", type(message).__name__)

    def _hear_output(self, output: Output) -> None:
        call = self._calls.get(output.request_id)
        if call is not None and not call.is_over:
            self._deliver(call, output)

    def _deliver(self, call: Call, message: Output) -> None:
        try:
            match message:
                case Chunk():
                    chunk = call.delivery.accept(message)
                    if chunk is not None:
                        call.progress(chunk)
                case Finished():
                    call.end(call.delivery.complete(message))
                case Failed(displaced=True):
                    self._submit_displaced(call)
                case Failed(retryable=True):
                    self._retry(call, _error_of(message))
                case Failed():
                    call.end(_error_of(message))
        except Gap as gap:
            self._mend(call, gap)

    def _hear_pong(self, instance: str) -> None:
        if instance == self._instance:
            return
        _log.info("linked to broker %s; %d requests to submit", instance, len(self._calls))
        self._instance = instance
        for call in self._calls.values():
            if not call.is_over:
                self._submit(call)


def _error_of(failed: Failed) -> MirrorError:
    error = BY_CODE.get(failed.code, InternalError)(failed.message, param=failed.param)
    if isinstance(error, CapacityError) and failed.retry_after_s is not None:
        error.retry_after_s = failed.retry_after_s
    return error
