"""`/v1/completions` through nginx, with the openai client."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion

from tests.system.events import stream as stream_events
from tests.system.events import text_of
from tests.system.stack import MODEL, Stack

PROMPT = "Once upon a time, in a harbour town,"


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Completion:
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 16} | fields
    return client.completions.create(prompt=prompt, **body)


def test_a_completion_has_the_shape_and_counts_its_tokens(
    client: openai.OpenAI, stack: Stack
) -> None:
    answer = complete(client)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason) == (0, "length")
    assert choice.text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.usage.prompt_tokens == len(stack.tokenizer().encode(PROMPT).ids)


def test_a_streamed_completion_is_the_same_text(client: openai.OpenAI, http: httpx.Client) -> None:
    fields = {"temperature": 0, "max_tokens": 16, "stream_options": {"include_usage": True}}
    chunks = stream_events(http, "/v1/completions", {"model": MODEL, "prompt": PROMPT} | fields)
    assert text_of(chunks) == complete(client).choices[0].text
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 16
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


def test_a_prompt_may_be_token_ids(client: openai.OpenAI, stack: Stack) -> None:
    ids = stack.tokenizer().encode(PROMPT).ids
    assert complete(client, ids).choices[0].text == complete(client).choices[0].text


def test_several_prompts_are_answered_in_order(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "1, 2, 3, 4, 5,"]
    together = complete(client, prompts, n=2)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    alone = [complete(client, prompt).choices[0].text for prompt in prompts]
    assert [choice.text for choice in together.choices] == [alone[0]] * 2 + [alone[1]] * 2


def test_logprobs_are_four_parallel_lists(client: openai.OpenAI) -> None:
    [choice] = complete(client, logprobs=2).choices
    assert choice.logprobs is not None
    found = choice.logprobs
    assert found.tokens is not None and found.token_logprobs is not None
    assert found.top_logprobs is not None and found.text_offset is not None
    assert {16} == {
        len(found.tokens),
        len(found.token_logprobs),
        len(found.top_logprobs),
        len(found.text_offset),
    }
    assert "".join(found.tokens) == choice.text
    offset = found.text_offset[0]
    assert [
        choice.text[at - offset :][: len(token)]
        for at, token in zip(found.text_offset, found.tokens, strict=True)
    ] == found.tokens
    for token, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert top[token] == pytest.approx(logprob, abs=1e-6)
        assert logprob == pytest.approx(max(top.values()), abs=1e-6)


def test_echo_gives_the_prompt_back_with_its_logprobs(client: openai.OpenAI, stack: Stack) -> None:
    [choice] = complete(client, echo=True, logprobs=1).choices
    assert choice.text == PROMPT + complete(client).choices[0].text
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None and choice.logprobs.tokens is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert len(choice.logprobs.tokens) == len(stack.tokenizer().encode(PROMPT).ids) + 16
    assert "".join(choice.logprobs.tokens) == choice.text


def test_an_echoed_stream_begins_with_the_prompt(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 4, "echo": True}
    assert text_of(stream_events(http, "/v1/completions", body)).startswith(PROMPT)


def test_stop_and_seed_work_as_in_chat(client: openai.OpenAI) -> None:
    plain = complete(client).choices[0].text
    stop = plain[6:9]
    stopped = complete(client, stop=stop).choices[0]
    assert stopped.text == plain.split(stop)[0]
    assert stopped.finish_reason == "stop"
    sampled = [complete(client, temperature=1.0, seed=4).choices[0].text for _ in range(2)]
    assert sampled[0] == sampled[1] != plain
