"""Every failure of a request as an answer in OpenAI's shape."""

from __future__ import annotations

import logging
import math
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

import falcon
import falcon.asgi
import msgspec

from mirror_sd.api.body import shorten
from mirror_sd.errors import (
    CapacityError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    MirrorError,
    NotFound,
    PayloadTooLarge,
    RequestError,
)

_log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SHOWN = (RequestError, CapacityError, DeadlineExceeded)
_FALCON_ERRORS: dict[int, type[RequestError]] = {
    404: NotFound,
    405: MethodNotAllowed,
    413: PayloadTooLarge,
}


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """Status, headers and body of an error."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def answer_to(error: Exception, request_id: str) -> ErrorAnswer:
    """The answer to `error`. The text of a fault of ours is logged, with its traceback, and not
    shown: the client gets the request id instead."""
    if not isinstance(error, _SHOWN):
        _log.error("%s: %s", request_id, error, exc_info=error)
        error = InternalError(f"the server failed on this request; its id is {request_id}")
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["Retry-After-Ms"] = str(max(1, round(error.retry_after_s * 1000)))
    if isinstance(error, DeadlineExceeded):
        # openai-python would otherwise run the same long request twice more.
        headers["X-Should-Retry"] = "false"
    return ErrorAnswer(error.status, error.to_openai(), headers)


def request_id_of(given: str) -> str:
    """What a request is called: the edge's id where it sent a proper one, else one drawn now."""
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


class RequestIds:
    """Middleware: each request has an id, the edge's where it sent one, and each response says
    it."""

    async def process_request(
        self, request: falcon.asgi.Request, response: falcon.asgi.Response
    ) -> None:
        """Read or draw the id."""
        id = request_id_of(request.get_header("X-Request-Id") or "")
        request.context.request_id = id
        response.set_header("X-Request-Id", id)


def add_error_answers(app: falcon.asgi.App[Any, Any]) -> None:
    """Make `app` answer every exception in OpenAI's shape."""
    app.add_error_handler(Exception, _answer_error)
    app.add_error_handler(MirrorError, _answer_error)
    app.add_error_handler(falcon.HTTPError, _answer_falcon_error)


async def _answer_error(
    request: falcon.asgi.Request,
    response: falcon.asgi.Response,
    error: Exception,
    params: dict[str, Any],
) -> None:
    answer = answer_to(error, request.context.request_id)
    response.status = answer.status
    response.content_type = falcon.MEDIA_JSON
    response.data = msgspec.json.encode(answer.body)
    response.set_headers(answer.headers)


async def _answer_falcon_error(
    request: falcon.asgi.Request,
    response: falcon.asgi.Response,
    error: falcon.HTTPError,
    params: dict[str, Any],
) -> None:
    """Routing and header errors, which falcon itself finds."""
    kind = _FALCON_ERRORS.get(error.status_code, InvalidRequest)
    place = f"{request.method} {shorten(request.path)}"
    text = error.description or error.title or "bad request"
    if kind is NotFound:
        text = "there is no such path"
    elif kind is MethodNotAllowed:
        text = "the path does not take this method"
    await _answer_error(request, response, kind(f"{place}: {text}"), params)
    if error.headers:
        response.set_headers(error.headers)
