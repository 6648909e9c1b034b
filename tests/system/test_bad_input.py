"""What a client can get wrong: a 4xx that names the field, and a server that goes on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.system.stack import MODEL, Stack

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES: Any = [{"role": "user", "content": "Hello."}]


@pytest.fixture(autouse=True)
def the_next_request_works(http: httpx.Client) -> Iterator[None]:
    yield
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1}
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text


def assert_refused(answer: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-request-id"]
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["message"]
    return error


CHAT_CASES: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "ten"}, "max_tokens"),
    ({"max_tokens": 10**40}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"top_k": 0.5}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 100_000}, "n"),
    ({"seed": "abc"}, "seed"),
    ({"seed": 2**200}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": [1, 2]}, "logit_bias"),
    ({"logit_bias": {"word": 1}}, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 3}, "stream": True}, "stream_options.include_usage"),
    ({"logprobs": 5}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"speculation": "sometimes"}, "speculation"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_CASES, ids=lambda value: str(value)[:40])
def test_a_bad_chat_field_is_named(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1} | fields
    # json.dumps by hand: httpx refuses NaN, and huge integers must arrive as they are.
    content = json.dumps({key: value for key, value in body.items() if value is not None})
    error = assert_refused(http.post(CHAT, content=content), 400, param)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"echo": "yes"}, "echo"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_a_bad_completion_field_is_named(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 1} | fields
    answer = http.post(COMPLETIONS, json={k: v for k, v in body.items() if v is not None})
    assert answer.status_code == 400, answer.text
    # A list may be blamed as a whole or by its element.
    assert answer.json()["error"]["param"].split("[")[0] == param


GARBAGE = {
    "empty": b"",
    "not_json": b"{model: 1",
    "half": b'{"model": "smollm2-135m-instruct", "mess',
    "an_array": b"[1, 2, 3]",
    "a_number": b"17",
    "random_bytes": bytes(range(256)) * 400,
    "deep_nesting": b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "not_a_number": b'{"model": "smollm2-135m-instruct", "temperature": NaN}',
    "lone_surrogate": b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}',
    "bad_utf8": b'{"model": "\xff\xfe"}',
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused_in_the_openai_shape(http: httpx.Client, name: str, path: str) -> None:
    answer = http.post(path, content=GARBAGE[name], headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_prompt_over_the_context_limit_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "word " * 9000}], max_tokens=1
        )
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="word " * 9000, max_tokens=1)
    assert caught.value.param == "prompt"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-99", messages=MESSAGES)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_an_unknown_path_is_not_found(http: httpx.Client) -> None:
    assert_refused(http.get("/v1/nothing"), 404, None)
    assert_refused(http.post("/v2/chat/completions"), 404, None)


def test_a_wrong_method_is_refused(http: httpx.Client) -> None:
    answer = http.get(CHAT)
    assert_refused(answer, 405, None)
    assert "POST" in answer.headers["allow"]


def test_a_body_over_the_limit_is_refused(http: httpx.Client) -> None:
    assert_refused(http.post(CHAT, content=b"x" * (4 * 1024 * 1024 + 1)), 413, None)


def test_errors_reach_the_client_as_its_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    assert caught.value.param == "temperature"
    assert caught.value.request_id


def _raw(stack: Stack, request: bytes, *, then_close: bool) -> bytes:
    with socket.create_connection(("127.0.0.1", stack.port), timeout=10) as connection:
        connection.sendall(request)
        if then_close:
            return b""
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


def test_half_a_request_harms_nobody(stack: Stack) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n".encode()
    for part in (b"POST /v1/ch", head, head + b'{"model": "smo'):
        _raw(stack, part, then_close=True)
        answer = _raw(stack, part, then_close=False)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")


def test_a_malformed_request_line_is_a_400(stack: Stack) -> None:
    answer = _raw(stack, b"\x16\x03\x01 garbage\r\n\r\n", then_close=False)
    assert answer.startswith(b"HTTP/1.1 400") or b"400 Bad Request" in answer
