"""The gateway's line to the broker: one DEALER for all its requests.

The client holds each request's whole state (`Delivery`), so what it talks to may die:

    Failed(retryable)            a worker was lost: submit the rest, after a pause that grows
    Pong with another instance   the broker lost all requests: submit every rest at once
    connection broken and back   frames may be lost: the same
    a gap in the tokens          cancel that attempt, submit the rest under another wire id

No answer at all only makes `alive` false: ZeroMQ reconnects, requests wait until their deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

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
    ProtocolError,
    QueueFull,
)
from mirror_sd.messages import (
    Cancel,
    Chunk,
    Failed,
    Finished,
    Ping,
    Pong,
    Stats,
    StatsRequest,
    Submit,
)
from mirror_sd.serving import endpoint as endpoints
from mirror_sd.serving.delivery import Delivery, Gap

_log = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
DEFAULT_TIMEOUT_S = 3600.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_TURN = 256


class _Call:
    """One request on its way. `events` needs no bound: it holds at most its `max_tokens`."""

    def __init__(self, submit: Submit) -> None:
        self.delivery = Delivery(submit)
        self.events: asyncio.Queue[Chunk | Finished | MirrorError] = asyncio.Queue()
        self.failures = 0
        self.is_over = False
        self.is_submitted = False
        self.timers: dict[str, asyncio.TimerHandle] = {}

    @property
    def name(self) -> str:
        return self.delivery.request_id

    def end(self, event: Finished | MirrorError) -> None:
        """The last event; later ones are ignored."""
        if not self.is_over:
            self.is_over = True
            self.events.put_nowait(event)
        self.stop_timers()

    def stop_timers(self) -> None:
        for timer in self.timers.values():
            timer.cancel()
        self.timers.clear()


class BrokerClient:
    """Make it anywhere, `start` it in the process and loop that use it (after any fork).

    `identity` names the gateway; the process adds what makes it unique.
    """

    def __init__(
        self, endpoint: str, identity: str, config: BrokerConfig, *, max_outstanding: int = 4096
    ) -> None:
        self._endpoint = endpoint
        self._name = identity
        self._beat_s = config.heartbeat_ms / 1e3
        self._patience_s = self._beat_s * config.missed_heartbeats
        self._max_outstanding = max_outstanding
        self._calls: dict[str, _Call] = {}
        self._questions: dict[int, asyncio.Future[Stats]] = {}
        self._tokens = itertools.count(1)
        self._unsent: deque[bytes] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._instance: str | None = None
        self._connected = asyncio.Event()
        self._is_linked = False
        self._heard_at: float | None = None

    @property
    def alive(self) -> bool:
        """Whether the broker was heard within its missed heartbeats."""
        return self._heard_at is not None and time.monotonic() - self._heard_at <= self._patience_s

    async def start(self) -> None:
        """Connect in the background; returns at once, whether or not the broker is there."""
        self._context = zmq.asyncio.Context()
        identity = f"{self._name}-{os.getpid()}-{secrets.token_hex(4)}"
        self._socket = endpoints.dealer(self._context, self._endpoint, identity.encode())
        # In the receiver no other receive is pending, so the frames that are there are taken
        # without a future for each.
        self._direct: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._tasks = [
            asyncio.create_task(step, name=f"broker client {what}")
            for what, step in (
                ("receive", self._receive()),
                ("beat", self._beat()),
                ("watch", self._watch_connection()),
            )
        ]

    async def close(self) -> None:
        """Cancel what still runs (its callers get `NoWorker`) and free the socket."""
        for call in list(self._calls.values()):
            self._cancel(call)
            call.end(NoWorker("the gateway is shutting down"))
        for question in self._questions.values():
            question.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=200)
        self._context.term()

    async def generate(self, submit: Submit) -> AsyncGenerator[Chunk | Finished, None]:
        """Chunks without duplicates or gaps, then `Finished`.

        Raises the error of a `Failed`; `DeadlineExceeded` when `timeout_s` is over; `QueueFull`
        when this process has too many requests; `PayloadTooLarge`. Leaving early (`aclose`, or
        cancellation of the task that waits in it) cancels the request; use `contextlib.aclosing`.
        """
        call = self._open(submit)
        try:
            while True:
                event = await call.events.get()
                if isinstance(event, MirrorError):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self._close_call(call)

    async def stats(self) -> Stats:
        """The broker's view; raises `NoWorker` if it does not answer within the heartbeats."""
        token = next(self._tokens)
        question = self._questions[token] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(max(1.0, self._patience_s)):
                await self._connected.wait()
                self._send(StatsRequest(token=token))
                answer: Stats = await question
                return answer
        except TimeoutError as error:
            raise NoWorker("the broker does not answer") from error
        finally:
            del self._questions[token]

    def _open(self, submit: Submit) -> _Call:
        if not self._tasks:
            raise RuntimeError("BrokerClient.start has not been called")
        if submit.request_id in self._calls:
            raise ValueError(f"request {submit.request_id} is running already")
        if len(self._calls) >= self._max_outstanding:
            raise QueueFull(f"this gateway has {self._max_outstanding} requests running")
        if len(messages.encode(submit)) > messages.MAX_FRAME_BYTES // 2:
            raise PayloadTooLarge("the request is too large")
        call = _Call(submit)
        timeout_s = DEFAULT_TIMEOUT_S if submit.timeout_s is None else submit.timeout_s
        call.timers["deadline"] = asyncio.get_running_loop().call_later(
            max(0.0, timeout_s - submit.age_s(time.time())), self._expire, call
        )
        self._submit(call)
        return call

    def _close_call(self, call: _Call) -> None:
        if not call.is_over:
            self._cancel(call)
            call.is_over = True
        call.stop_timers()
        self._calls.pop(call.delivery.wire_id, None)

    def _expire(self, call: _Call) -> None:
        if not call.is_over:
            self._cancel(call)
            call.end(DeadlineExceeded("the request's time ran out"))

    def _submit(self, call: _Call) -> None:
        retry = call.timers.pop("retry", None)
        if retry is not None:
            retry.cancel()
        self._calls[call.delivery.wire_id] = call
        if not self._is_linked:
            return  # the pong that makes the link submits every call
        if call.is_submitted:
            telemetry.RESUMES.inc()
            _log.info("%s: submitted again after %d tokens", call.name, call.delivery.count)
        call.is_submitted = True
        self._send(call.delivery.remainder())

    def _cancel(self, call: _Call) -> None:
        if call.is_submitted:
            self._send(Cancel(request_id=call.delivery.wire_id))

    # Frames in.

    async def _receive(self) -> None:
        while True:
            self._handle(await self._socket.recv_multipart())
            for _ in range(_TURN):
                try:
                    self._handle(self._direct.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    break
            await asyncio.sleep(0)

    def _handle(self, parts: list[bytes]) -> None:
        try:
            message = messages.decode(parts[0])
        except ProtocolError as error:
            # A chunk lost here shows as a gap, and is asked for again.
            _log.error("frame from the broker dropped: %s", error)
            return
        self._heard_at = time.monotonic()
        match message:
            case Chunk() | Finished() | Failed():
                self._deliver(message)
            case Pong():
                self._hear_pong(message)
            case Stats():
                question = self._questions.get(message.token)
                if question is not None and not question.done():
                    question.set_result(message)
            case _:
                _log.error("the broker sent a %s", type(message).__name__)

    def _deliver(self, message: Chunk | Finished | Failed) -> None:
        call = self._calls.get(message.request_id)
        if call is None or call.is_over:
            return
        try:
            match message:
                case Chunk():
                    chunk = call.delivery.accept(message)
                    if chunk is not None:
                        call.failures = 0
                        call.events.put_nowait(chunk)
                case Finished():
                    call.end(call.delivery.complete(message))
                case Failed():
                    self._hear_failure(call, message)
        except Gap as gap:
            self._mend(call, gap)

    def _hear_failure(self, call: _Call, failed: Failed) -> None:
        error = _error_of(failed)
        if failed.retryable:
            self._retry(call, error)
        else:
            call.end(error)

    def _mend(self, call: _Call, gap: Gap) -> None:
        _log.error("%s: %s", call.name, gap)
        self._cancel(call)
        del self._calls[call.delivery.wire_id]
        call.delivery.renew()
        self._calls[call.delivery.wire_id] = call
        self._retry(call, InternalError(gap.message))

    def _retry(self, call: _Call, error: MirrorError) -> None:
        """Submit the rest after a pause; give up after `MAX_ATTEMPTS` without a new token."""
        call.failures += 1
        if call.failures >= MAX_ATTEMPTS:
            _log.error("%s: given up after %d attempts: %s", call.name, call.failures, error)
            call.end(error)
            return
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 4 ** (call.failures - 1))
        _log.warning("%s: to be submitted again in %.2f s: %s", call.name, pause_s, error)
        previous = call.timers.pop("retry", None)
        if previous is not None:
            previous.cancel()
        loop = asyncio.get_running_loop()
        call.timers["retry"] = loop.call_later(pause_s, self._submit, call)

    def _hear_pong(self, pong: Pong) -> None:
        if self._is_linked and pong.instance == self._instance:
            return
        _log.info("linked to broker %s; %d requests to submit", pong.instance, len(self._calls))
        self._is_linked = True
        self._instance = pong.instance
        for call in list(self._calls.values()):
            if not call.is_over:
                self._submit(call)

    # Frames out.

    def _send(self, message: messages.FromGateway) -> None:
        self._unsent.append(messages.encode(message))
        self._flush()

    def _flush(self) -> None:
        # Kept in order: a cancel must not overtake its submit. While there is no connection only
        # cancels come here, at most one a call.
        while self._unsent and self._connected.is_set():
            sent = asyncio.ensure_future(self._socket.send(self._unsent[0], zmq.NOBLOCK))
            if isinstance(sent.exception(), zmq.Again):
                return
            sent.result()
            self._unsent.popleft()

    async def _beat(self) -> None:
        while True:
            self._ping()
            await asyncio.sleep(self._beat_s)

    def _ping(self) -> None:
        # What could not be sent goes first; another ping would only make the queue longer.
        self._flush()
        if self._connected.is_set() and not self._unsent:
            self._send(Ping(role="gateway", pid=os.getpid()))

    async def _watch_connection(self) -> None:
        while True:
            event = await recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                _log.warning("connection to the broker lost")
                self._connected.clear()
                self._is_linked = False
                self._heard_at = None
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected.set()
                self._ping()


def _error_of(failed: Failed) -> MirrorError:
    error = BY_CODE.get(failed.code, InternalError)(failed.message, param=failed.param)
    if isinstance(error, CapacityError) and failed.retry_after_s is not None:
        error.retry_after_s = failed.retry_after_s
    return error
