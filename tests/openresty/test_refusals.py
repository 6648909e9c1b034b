"""Real nginx: every error that it makes itself has the OpenAI shape."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.openresty.stack import (
    CHAT,
    MAX_BODY_BYTES,
    Edge,
    chat,
    error_of,
    head_and_body,
    post_head,
    wait_until,
)

pytestmark = pytest.mark.system


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/nowhere", 404, None),
        ("POST", "/nowhere", 404, None),
        ("OPTIONS", "/nowhere", 404, None),
        ("GET", CHAT, 405, "POST, OPTIONS"),
        ("HEAD", CHAT, 405, "POST, OPTIONS"),
        ("DELETE", "/v1/completions", 405, "POST, OPTIONS"),
        ("POST", "/v1/models", 405, "GET, HEAD, OPTIONS"),
        ("DELETE", "/v1/models/a/b", 405, "GET, HEAD, OPTIONS"),
        ("POST", "/", 405, "GET, HEAD, OPTIONS"),
        ("POST", "/metrics", 405, "GET, HEAD, OPTIONS"),
        ("TRACE", "/health", 405, "GET, HEAD, OPTIONS"),
        ("OPTIONS", CHAT, 204, "POST, OPTIONS"),
        ("OPTIONS", "/v1/models", 204, "GET, HEAD, OPTIONS"),
    ],
)
def test_a_path_or_method_that_is_not_served(
    edge: Edge, method: str, path: str, status: int, allow: str | None
) -> None:
    answer = httpx.request(method, edge.url + path)
    assert answer.status_code == status
    assert answer.headers.get("allow") == allow
    assert answer.headers["x-request-id"]
    if status >= 400:
        assert answer.headers["content-type"] == "application/json"
        if method != "HEAD":
            assert int(answer.headers["content-length"]) == len(answer.content)
            error_of(answer.content)


def test_a_body_over_the_limit_is_refused_before_it_is_read(edge: Edge) -> None:
    answer = edge.raw(post_head(CHAT, MAX_BODY_BYTES + 1))
    first, _, body = head_and_body(answer)
    assert " 413 " in first
    assert error_of(body)["code"] == "payload_too_large"


def test_a_chunked_body_over_the_limit_is_refused(edge: Edge) -> None:
    pieces = iter([b"x" * 65536] * (MAX_BODY_BYTES // 65536 + 1))
    answer = httpx.post(edge.url + CHAT, content=pieces)
    assert answer.status_code == 413
    assert error_of(answer.content)["code"] == "payload_too_large"


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"GARBAGE\r\n\r\n", 400, "bad_request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, "bad_request"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n", 400, "bad_request"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "bad_request"),
        (b"GET /health HTTP/9.9\r\nHost: a\r\n\r\n", 505, "http_version"),
        (post_head(CHAT, 0).replace(b"h: 0", b"h: x"), 400, "bad_request"),
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414, "uri_too_long"),
        (
            b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 40_000 + b"\r\n\r\n",
            431,
            "headers_too_large",
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: x\r\n\r\n",
            501,
            "not_implemented",
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
            b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
            400,
            "bad_request",
        ),
    ],
)
def test_what_is_not_http_gets_an_error_in_shape(
    edge: Edge, data: bytes, status: int, code: str
) -> None:
    first, headers, body = head_and_body(edge.raw(data))
    assert f" {status} " in first
    assert headers["content-type"] == "application/json"
    assert error_of(body)["code"] == code
    assert chat(edge, {}).status_code == 200


def test_a_body_that_stops_arriving_gets_a_408(edge: Edge) -> None:
    began = time.monotonic()
    first, headers, body = head_and_body(edge.raw(post_head(CHAT, 1000) + b'{"half": '))
    assert 0.9 < time.monotonic() - began < 3
    assert " 408 " in first
    assert headers["x-request-id"]
    assert headers["connection"] == "close"
    assert error_of(body)["code"] == "request_timeout"
    wait_until(lambda: edge.in_flight() == [0, 0])


def test_a_body_that_ends_too_early_gets_a_400(edge: Edge) -> None:
    answer = edge.raw(post_head(CHAT, 1000) + b'{"half": ', half_close=True)
    first, _, body = head_and_body(answer)
    assert " 400 " in first
    assert error_of(body)["code"] == "incomplete_body"


def test_an_html_error_of_a_gateway_is_put_into_shape(edge: Edge) -> None:
    answer = chat(edge, {"act": "html_error"})
    assert answer.status_code == 500
    assert error_of(answer.content)["code"] == "internal_error"
    assert answer.headers["x-request-id"] in answer.text


def test_a_json_error_of_a_gateway_passes_as_it_is(edge: Edge) -> None:
    answer = chat(edge, {"act": "json_error"})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "7"
    assert answer.json()["error"]["message"] == "full"
