"""The two routes that generate: chat completions and completions.

They are ASGI applications of their own, called before falcon's: routing, request and response
objects, and middleware cost more than all that these routes need of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import falcon
import falcon.asgi
import msgspec
from prometheus_client import Counter

from mirror_sd import telemetry
from mirror_sd.api.responses import Json
from mirror_sd.config import Config
from mirror_sd.errors import InvalidRequest, PayloadTooLarge
from mirror_sd.serving.client_watch import ClientWatch, Receive
from mirror_sd.serving.error_answers import answer_to, request_id_of
from mirror_sd.serving.generation import Broker, ClientGone, Generation
from mirror_sd.serving.intake import Caller, Intake, Plan
from mirror_sd.serving.streaming import CLIENT_GONE, EventStream, Send, whole_answer
from mirror_sd.serving.text_thread import TextThread

_log = logging.getLogger(__name__)
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DEGRADE_LEVELS = ("0", "1", "2", "3")
_SHARE = re.compile(r"0\.[0-9]{2}|1\.00")
_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_EVENT_STREAM = "text/event-stream; charset=utf-8"
# Planned on the event loop: a body of this size takes a few hundred microseconds, about what a hop
# to a thread and back costs, in which the thread would have to wait for the interpreter lock.
_SMALL_BODY_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Parts:
    """What both routes work with. `prompt_threads` take the heavy part of a request, reading and
    tokenising its body where it is large; `text_thread` the light one, each chunk of its answer."""

    config: Config
    intake: Intake
    broker: Broker
    prompt_threads: Executor
    text_thread: TextThread
    clock: Callable[[], float] = time.monotonic


class GenerationRoute:
    """Answers POST requests with what `plan` makes of their bodies."""

    def __init__(self, parts: Parts, plan: Callable[[bytes, Caller], Plan]) -> None:
        self._parts = parts
        self._plan = plan

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Generate; streamed or not as the body says."""
        arrived_at = self._parts.clock()
        # Of a header that comes twice the last counts; the edge sends each once.
        headers: dict[bytes, bytes] = dict(scope["headers"])
        caller = caller_of(headers, self._parts.config)
        reply = Reply(send, caller.request_id)
        try:
            await self._answer(headers, receive, reply, caller, arrived_at)
        except ClientGone:
            _log.info("%s: the client left before its answer", caller.request_id)
            telemetry.DISCONNECTS.inc()
            _count(caller, CLIENT_GONE)
            await reply.whole(CLIENT_GONE, b"", {})
        except Exception as error:
            answer = answer_to(error, caller.request_id)
            _count(caller, answer.status)
            if reply.has_begun:
                raise
            await reply.whole(answer.status, msgspec.json.encode(answer.body), answer.headers)

    async def _answer(
        self,
        headers: Mapping[bytes, bytes],
        receive: Receive,
        reply: Reply,
        caller: Caller,
        arrived_at: float,
    ) -> None:
        body = await _read_body(receive, headers, self._parts.config.server.max_body_bytes)
        plan = await self._make_plan(body, caller)
        generation = Generation(
            self._parts.broker,
            self._parts.text_thread,
            plan,
            arrived_at,
            self._parts.clock,
        )
        watch = ClientWatch(receive, generation.abandon)

        async def release() -> None:
            await watch.stop()
            await generation.close()

        watch.start()
        try:
            generation.start()
            if plan.decoding.stream:
                # Until the first delta a failure still has a status of its own.
                first = await generation.next_deltas()
                stream = EventStream(
                    plan,
                    generation,
                    first,
                    reply.send,
                    on_end=partial(_count, caller),
                    on_close=release,
                )
                await reply.stream(stream, _EVENT_STREAM, _SSE_HEADERS | _degradation(plan))
                return
            body_out = await whole_answer(plan, generation)
        finally:
            await release()
        _count(caller, 200)
        shown = _counts(body_out["usage"]) | _degradation(plan)
        await reply.whole(200, msgspec.json.encode(body_out), shown)

    async def _make_plan(self, body: bytes, caller: Caller) -> Plan:
        if len(body) <= _SMALL_BODY_BYTES and self._parts.intake.is_prepared:
            return self._plan(body, caller)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._parts.prompt_threads, self._plan, body, caller)


class Reply:
    """The response to one request."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.send = send
        self.has_begun = False
        self._request_id = request_id

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """One body, JSON unless it is empty."""
        length = str(len(body)).encode()
        await self._start(status, falcon.MEDIA_JSON, headers, (b"content-length", length))
        await self.send({"type": "http.response.body", "body": body})

    async def stream(
        self, stream: EventStream, content_type: str, headers: Mapping[str, str]
    ) -> None:
        """Blocks until `stream` ends; it is closed however that happens."""
        try:
            await self._start(200, content_type, headers)
            async for block in stream:
                await self.send({"type": "http.response.body", "body": block, "more_body": True})
        finally:
            await stream.close()
        await self.send({"type": "http.response.body", "body": b""})

    async def _start(
        self,
        status: int,
        content_type: str,
        headers: Mapping[str, str],
        *more: tuple[bytes, bytes],
    ) -> None:
        self.has_begun = True
        fields = [
            (b"content-type", content_type.encode()),
            (b"x-request-id", self._request_id.encode()),
            *((name.lower().encode(), value.encode()) for name, value in headers.items()),
            *more,
        ]
        await self.send({"type": "http.response.start", "status": status, "headers": fields})


class PostOnly:
    """Makes falcon refuse the other methods of a path whose POST never comes to it."""

    async def on_post(self, request: falcon.asgi.Request, response: falcon.asgi.Response) -> None:
        """Never called."""
        raise NotImplementedError


def caller_of(headers: Mapping[bytes, bytes], config: Config) -> Caller:
    """What the edge's headers say, held to the known classes and tiers (they label metrics)."""

    def given(name: bytes) -> str:
        return headers.get(name, b"").decode("latin-1")

    device_class = given(b"x-mirror-device").lower()
    if device_class not in config.pools:
        device_class = next(iter(config.pools))
    tenant = given(b"x-mirror-tenant")
    level, factor = given(b"x-mirror-degrade"), given(b"x-mirror-draft-factor")
    return Caller(
        request_id=request_id_of(given(b"x-request-id")),
        device_class=device_class,
        tier="vip" if given(b"x-mirror-tier") == "vip" else "standard",
        tenant=tenant if _TENANT.fullmatch(tenant) else "default",
        degrade_level=int(level) if level in _DEGRADE_LEVELS else 0,
        draft_factor=float(factor) if _SHARE.fullmatch(factor) else 1.0,
        spare=tuple(name for name in given(b"x-mirror-spare").split(",") if name in config.pools),
    )


async def _read_body(receive: Receive, headers: Mapping[bytes, bytes], limit: int) -> bytes:
    length = _content_length(headers)
    too_large = f"the request body is larger than {limit} bytes"
    if length is not None and length > limit:
        raise PayloadTooLarge(too_large)
    event = await receive()
    body: bytes = event.get("body", b"")
    if event.get("more_body"):
        pieces, size = [body], len(body)
        while event.get("more_body") and size <= limit:
            event = await receive()
            pieces.append(event.get("body", b""))
            size += len(pieces[-1])
        body = b"".join(pieces)
    if len(body) > limit:
        raise PayloadTooLarge(too_large)
    if length is not None and len(body) < length:
        raise InvalidRequest(f"the request body ended after {len(body)} of {length} bytes")
    return body


def _content_length(headers: Mapping[bytes, bytes]) -> int | None:
    text = headers.get(b"content-length")
    if text is None:
        return None
    if not text.isdigit():
        raise InvalidRequest("the Content-Length header is not a number")
    return int(text)


def _counts(usage: Json) -> dict[str, str]:
    """For the edge, which learns from them and keeps them from the client."""
    return {
        "X-Mirror-Prompt-Tokens": str(usage["prompt_tokens"]),
        "X-Mirror-Completion-Tokens": str(usage["completion_tokens"]),
    }


def _degradation(plan: Plan) -> dict[str, str]:
    return {"X-Mirror-Degraded": "max_tokens"} if plan.is_capped else {}


def _count(caller: Caller, status: int) -> None:
    _requests(caller.device_class, caller.tier, status).inc()


@lru_cache(maxsize=256)
def _requests(device_class: str, tier: str, status: int) -> Counter:
    return telemetry.REQUESTS.labels(device_class, tier, str(status))
