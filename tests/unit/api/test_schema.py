from __future__ import annotations

import typing
from typing import Any

import pytest
from pydantic import ValidationError

from mirror_sd.api.schema import (
    DRAFT_SOURCES,
    MAX_DRAFT_TOKENS,
    ChatMessage,
    Speculation,
    read_chat,
    read_completion,
)
from mirror_sd.config_speculation import SpeculationConfig
from mirror_sd.errors import InvalidRequest, RequestError

VOCAB = 1000
HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": HELLO, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "hello", **fields}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    (chat(model=None), "model"),
    (chat(model=7), "model"),
    (chat(messages=None), "messages"),
    (chat(messages=[]), "messages"),
    (chat(messages="hi"), "messages"),
    (chat(messages={"role": "user"}), "messages"),
    (chat(messages=["hi"]), "messages[0]"),
    (chat(messages=[*HELLO, {"content": "x"}]), "messages[1].role"),
    (chat(messages=[{"role": "robot", "content": "x"}]), "messages[0].role"),
    (chat(messages=[{"role": ["user"], "content": "x"}]), "messages[0].role"),
    (chat(messages=user(None)), "messages[0].content"),
    (chat(messages=user(5)), "messages[0].content"),
    (chat(messages=user(["x"])), "messages[0].content[0]"),
    (chat(messages=user([{"type": "text"}])), "messages[0].content[0].text"),
    (chat(messages=user([{"type": "text", "text": 1}])), "messages[0].content[0].text"),
    (chat(messages=user([{"type": "image_url", "image_url": {}}])), "messages[0].content[0].type"),
    (
        chat(messages=[{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]),
        "messages[0].tool_calls",
    ),
    (chat(n=0), "n"),
    (chat(n=129), "n"),
    (chat(n=True), "n"),
    (chat(n=1.5), "n"),
    (chat(n="2"), "n"),
    (chat(n=10**300), "n"),
    (chat(stop=5), "stop"),
    (chat(stop=""), "stop"),
    (chat(stop=["a", ""]), "stop[1]"),
    (chat(stop="a" * 1025), "stop"),
    (chat(stop=["a", 1]), "stop[1]"),
    (chat(stop=list("abcde")), "stop"),
    (chat(max_tokens=0), "max_tokens"),
    (chat(max_tokens=-1), "max_tokens"),
    (chat(max_tokens="10"), "max_tokens"),
    (chat(max_completion_tokens=0), "max_completion_tokens"),
    (chat(temperature=-0.1), "temperature"),
    (chat(temperature=2.1), "temperature"),
    (chat(temperature="hot"), "temperature"),
    (chat(temperature=True), "temperature"),
    (chat(temperature=10**400), "temperature"),
    (chat(temperature=float("inf")), "temperature"),
    (chat(top_p=0), "top_p"),
    (chat(top_p=1.01), "top_p"),
    (chat(top_k=-2), "top_k"),
    (chat(top_k=1.5), "top_k"),
    (chat(seed=1.5), "seed"),
    (chat(seed=2**64), "seed"),
    (chat(seed=-(2**63) - 1), "seed"),
    (chat(presence_penalty=3), "presence_penalty"),
    (chat(frequency_penalty=-3), "frequency_penalty"),
    (chat(logit_bias=[1]), "logit_bias"),
    (chat(logit_bias={"x": 1}), "logit_bias"),
    (chat(logit_bias={"-1": 1}), "logit_bias"),
    (chat(logit_bias={"1000": 1}), "logit_bias"),
    (chat(logit_bias={"٣": 1}), "logit_bias"),
    (chat(logit_bias={"9" * 5000: 1}), "logit_bias"),
    (chat(logit_bias={"5": 101}), "logit_bias.5"),
    (chat(logit_bias={"5": None}), "logit_bias.5"),
    (chat(logit_bias={"5": float("inf")}), "logit_bias.5"),
    (chat(logit_bias={str(i): 0 for i in range(1025)}), "logit_bias"),
    (chat(logprobs=1), "logprobs"),
    (chat(top_logprobs=2), "top_logprobs"),
    (chat(logprobs=False, top_logprobs=0), "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (chat(stream="yes"), "stream"),
    (chat(stream_options={"include_usage": True}), "stream_options"),
    (chat(stream=True, stream_options=[]), "stream_options"),
    (chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
    (chat(speculation="on"), "speculation"),
    (chat(speculation=True), "speculation"),
    (chat(speculation=["lookup"]), "speculation"),
    (chat(speculation={"source": "hint"}), "speculation.source"),
    (chat(speculation={"max_token": 3}), "speculation"),
    (chat(speculation={"source": "head", "\ud800": 1}), "speculation"),
    (chat(speculation={"source": ["head"]}), "speculation.source"),
    (chat(speculation={"max_tokens": 0}), "speculation.max_tokens"),
    (chat(speculation={"max_tokens": 33}), "speculation.max_tokens"),
    (chat(speculation={"max_tokens": True}), "speculation.max_tokens"),
    (chat(speculation={"source": "head", "max_tokens": "8"}), "speculation.max_tokens"),
    (chat(user=5), "user"),
    (chat(service_tier=5), "service_tier"),
    (chat(response_format={"type": "json_object"}), "response_format.type"),
    (chat(response_format={}), "response_format.type"),
    (chat(response_format="text"), "response_format"),
    (chat(tools=[{"type": "function"}]), "tools"),
    (chat(functions=[{}]), "functions"),
]
BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    (completion(prompt=None), "prompt"),
    (completion(prompt=[]), "prompt"),
    (completion(prompt={}), "prompt"),
    (completion(prompt=5), "prompt"),
    (completion(prompt=[True]), "prompt[0]"),
    (completion(prompt=[None]), "prompt[0]"),
    (completion(prompt=[1, "a"]), "prompt[1]"),
    (completion(prompt=[1, 1000]), "prompt[1]"),
    (completion(prompt=[-1]), "prompt[0]"),
    (completion(prompt=["a", []]), "prompt[1]"),
    (completion(prompt=[[1], [2, 2000]]), "prompt[1][1]"),
    (completion(prompt=["a"] * 65, n=2), "prompt"),
    (completion(prompt=["a"] * 129), "prompt"),
    (completion(logprobs=6), "logprobs"),
    (completion(logprobs=True), "logprobs"),
    (completion(echo="yes"), "echo"),
    (completion(best_of=2), "best_of"),
    (completion(suffix="end"), "suffix"),
    (completion(max_tokens=0, echo=True), "max_tokens"),
]


@pytest.mark.parametrize(("body", "param"), BAD_CHATS, ids=range(len(BAD_CHATS)))
def test_a_bad_chat_field_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read_chat(body, VOCAB)
    assert refusal.value.param == param
    assert refusal.value.message.startswith(param.split("[")[0].split(".")[0])
    assert len(refusal.value.message) < 250


@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS, ids=range(len(BAD_COMPLETIONS)))
def test_a_bad_completion_field_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read_completion(body, VOCAB)
    assert refusal.value.param == param


def test_an_error_tells_the_value_and_what_is_allowed() -> None:
    with pytest.raises(RequestError) as refusal:
        read_chat(chat(temperature=2.5), VOCAB)
    assert refusal.value.message == "temperature: expected a number from 0 to 2, got 2.5"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("on", 'expected "auto", "off" or an object of source and max_tokens, got "on"'),
        (
            {"source": "tree"},
            'expected one of "auto", "lookup", "history", "head", "remote", got "tree"',
        ),
        ({"max_tokens": 64}, "expected an integer from 1 to 32, got 64"),
    ],
)
def test_a_wrong_speculation_tells_what_is_allowed(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read_chat(chat(speculation=value), VOCAB)
    assert refusal.value.message == f"{refusal.value.param}: {message}"


def test_a_request_may_choose_among_what_the_configuration_may() -> None:
    fields = SpeculationConfig.model_fields
    assert set(DRAFT_SOURCES) == set(typing.get_args(fields["drafter"].annotation))
    longest = SpeculationConfig(max_tokens=MAX_DRAFT_TOKENS).max_tokens
    assert longest == MAX_DRAFT_TOKENS
    with pytest.raises(ValidationError):
        SpeculationConfig(max_tokens=MAX_DRAFT_TOKENS + 1)


def test_defaults_are_openais() -> None:
    decoding = read_chat(chat(), VOCAB).decoding
    assert (decoding.n, decoding.temperature, decoding.top_p, decoding.top_k) == (1, 1.0, 1.0, 0)
    assert decoding.max_tokens is decoding.seed is decoding.logprobs is None
    assert decoding.stop == () and not decoding.stream
    assert decoding.speculation == Speculation(is_on=True, source="auto", max_tokens=0)


@pytest.mark.parametrize(
    ("fields", "attribute", "value"),
    [
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": None}, "temperature", 1.0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 40}, "top_k", 40),
        ({"seed": -1}, "seed", 2**64 - 1),
        ({"seed": 2**64 - 1}, "seed", 2**64 - 1),
        ({"seed": 0}, "seed", 0),
        ({"stop": "a"}, "stop", ("a",)),
        ({"stop": ["b", "a", "b"]}, "stop", ("b", "a")),
        ({"stop": []}, "stop", ()),
        ({"max_tokens": 5}, "max_tokens", 5),
        ({"max_tokens": 5, "max_completion_tokens": 7}, "max_tokens", 7),
        ({"logit_bias": {"5": -100, "007": 1.5}}, "logit_bias", {5: -100.0, 7: 1.5}),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": True, "top_logprobs": 20}, "logprobs", 20),
        ({"logprobs": False}, "logprobs", None),
        ({"speculation": None}, "speculation", Speculation()),
        ({"speculation": "auto"}, "speculation", Speculation()),
        ({"speculation": "off"}, "speculation", Speculation(is_on=False)),
        ({"speculation": {}}, "speculation", Speculation()),
        ({"speculation": {"source": None, "max_tokens": None}}, "speculation", Speculation()),
        ({"speculation": {"source": "head"}}, "speculation", Speculation(source="head")),
        ({"speculation": {"max_tokens": 32}}, "speculation", Speculation(max_tokens=32)),
        ({"stream": True, "stream_options": {"include_usage": True}}, "include_usage", True),
        ({"stream": True, "stream_options": None}, "include_usage", False),
        ({"service_tier": "priority"}, "service_tier", "priority"),
        ({"response_format": {"type": "text"}, "tools": [], "functions": None}, "n", 1),
        ({"unheard_of": {"a": [1]}, "user": "me", "tool_choice": "none"}, "n", 1),
        ({"best_of": 2, "n": 2}, "n", 2),
    ],
)
def test_a_field_is_read(fields: dict[str, Any], attribute: str, value: object) -> None:
    assert getattr(read_chat(chat(**fields), VOCAB).decoding, attribute) == value


def test_content_may_be_text_parts_and_an_assistant_may_have_none() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": ""}]
    messages = [
        {"role": "developer", "content": "be brief", "name": "ops"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant"},
        {"role": "tool", "content": "42", "tool_call_id": "x"},
    ]
    assert read_chat(chat(messages=messages), VOCAB).messages == (
        ChatMessage("developer", "be brief"),
        ChatMessage("user", "one\n"),
        ChatMessage("assistant", ""),
        ChatMessage("assistant", ""),
        ChatMessage("tool", "42"),
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["a", [3]], ("a", (3,))),
    ],
)
def test_a_prompt_has_many_forms(prompt: object, prompts: object) -> None:
    assert read_completion(completion(prompt=prompt), VOCAB).prompts == prompts
