"""The two resources that generate: chat completions and completions."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import falcon
import falcon.asgi
import msgspec

from mirror_sd import telemetry
from mirror_sd.api.responses import Json
from mirror_sd.config import Config
from mirror_sd.errors import InvalidRequest, MirrorError, PayloadTooLarge
from mirror_sd.serving.client_watch import ClientWatch
from mirror_sd.serving.generation import Broker, ClientGone, Generation
from mirror_sd.serving.intake import Caller, Intake, Plan
from mirror_sd.serving.streaming import CLIENT_GONE, EventStream, whole_answer
from mirror_sd.serving.text_thread import TextThread

_log = logging.getLogger(__name__)
RECEIVE = "mirror_sd.receive"
SEND = "mirror_sd.send"
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DEGRADE_LEVELS = ("0", "1", "2", "3")
_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True)
class Parts:
    """What both resources work with. `prompt_threads` take the heavy part of a request, reading
    and tokenising its body; `text_thread` the light one, each chunk of its answer."""

    config: Config
    intake: Intake
    broker: Broker
    prompt_threads: Executor
    text_thread: TextThread
    clock: Callable[[], float] = time.monotonic


class _Answers:
    def __init__(self, parts: Parts, plan: Callable[[bytes, Caller], Plan]) -> None:
        self._parts = parts
        self._plan = plan

    async def on_post(self, request: falcon.asgi.Request, response: falcon.asgi.Response) -> None:
        """Generate; streamed or not as the body says."""
        arrived_at = self._parts.clock()
        caller = caller_of(request, self._parts.config)
        try:
            await self._answer(request, response, caller, arrived_at)
        except ClientGone:
            response.status = CLIENT_GONE
            _log.info("%s: the client left before its answer", caller.request_id)
            telemetry.DISCONNECTS.inc()
            _count(caller, CLIENT_GONE)
        except Exception as error:
            _count(caller, _status_of(error))
            raise

    async def _answer(
        self,
        request: falcon.asgi.Request,
        response: falcon.asgi.Response,
        caller: Caller,
        arrived_at: float,
    ) -> None:
        body = await _read_body(request, self._parts.config.server.max_body_bytes)
        loop = asyncio.get_running_loop()
        plan = await loop.run_in_executor(self._parts.prompt_threads, self._plan, body, caller)
        generation = Generation(
            self._parts.broker,
            self._parts.text_thread,
            plan,
            arrived_at,
            self._parts.clock,
        )
        watch = ClientWatch(request.scope[RECEIVE], generation.abandon)

        async def release() -> None:
            await watch.stop()
            await generation.close()

        watch.start()
        try:
            generation.start()
            if plan.decoding.stream:
                # Until the first delta a failure still has a status of its own.
                first = await generation.next_deltas()
                response.content_type = "text/event-stream; charset=utf-8"
                response.set_headers(_SSE_HEADERS | _degradation(plan))
                response.stream = EventStream(
                    plan,
                    generation,
                    first,
                    request.scope[SEND],
                    on_end=partial(_count, caller),
                    on_close=release,
                )
                return
            body_out = await whole_answer(plan, generation)
        except BaseException:
            await release()
            raise
        await release()
        response.content_type = falcon.MEDIA_JSON
        response.data = msgspec.json.encode(body_out)
        response.set_headers(_counts(body_out["usage"]) | _degradation(plan))
        _count(caller, 200)


class ChatCompletions(_Answers):
    """`/v1/chat/completions`"""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts, parts.intake.chat)


class Completions(_Answers):
    """`/v1/completions`"""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts, parts.intake.completion)


def caller_of(request: falcon.asgi.Request, config: Config) -> Caller:
    """What the edge's headers say, held to the known classes and tiers (they label metrics)."""
    device_class = (request.get_header("X-Mirror-Device") or "").lower()
    if device_class not in config.pools:
        device_class = next(iter(config.pools))
    tenant = request.get_header("X-Mirror-Tenant") or ""
    return Caller(
        request_id=request.context.request_id,
        device_class=device_class,
        tier="vip" if request.get_header("X-Mirror-Tier") == "vip" else "standard",
        tenant=tenant if _TENANT.fullmatch(tenant) else "default",
        degrade_level=_degrade_level(request.get_header("X-Mirror-Degrade")),
    )


async def _read_body(request: falcon.asgi.Request, limit: int) -> bytes:
    length = request.content_length
    too_large = PayloadTooLarge(f"the request body is larger than {limit} bytes")
    if length is not None and length > limit:
        raise too_large
    body: bytes = await request.stream.read(limit + 1)
    if len(body) > limit:
        raise too_large
    if length is not None and len(body) < length:
        raise InvalidRequest(f"the request body ended after {len(body)} of {length} bytes")
    return body


def _counts(usage: Json) -> dict[str, str]:
    """For the edge, which learns from them and keeps them from the client."""
    return {
        "X-Mirror-Prompt-Tokens": str(usage["prompt_tokens"]),
        "X-Mirror-Completion-Tokens": str(usage["completion_tokens"]),
    }


def _degradation(plan: Plan) -> dict[str, str]:
    return {"X-Mirror-Degraded": "max_tokens"} if plan.is_capped else {}


def _degrade_level(text: str | None) -> int:
    return int(text) if text in _DEGRADE_LEVELS else 0


def _status_of(error: Exception) -> int:
    if isinstance(error, falcon.HTTPError):
        return error.status_code
    return error.status if isinstance(error, MirrorError) else 500


def _count(caller: Caller, status: int) -> None:
    telemetry.REQUESTS.labels(caller.device_class, caller.tier, str(status)).inc()
