"""`/v1/chat/completions` through nginx, with the openai client."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.system.events import stream as stream_events
from tests.system.events import text_of
from tests.system.stack import MODEL, Stack

QUESTION: Any = [{"role": "user", "content": "Name three colours and say where one sees them."}]
PATH = "/v1/chat/completions"


def ask(client: openai.OpenAI, messages: Any = QUESTION, **fields: Any) -> ChatCompletion:
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24} | fields
    return client.chat.completions.create(messages=messages, **body)


def text(answer: ChatCompletion) -> str:
    return answer.choices[0].message.content or ""


def test_an_answer_has_the_shape_and_counts_its_tokens(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert answer.created > 1_700_000_000
    [choice] = answer.choices
    assert choice.index == 0
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens > 10
    assert answer.usage.total_tokens == 24 + answer.usage.prompt_tokens


def test_a_streamed_answer_is_the_same_text_in_the_documented_order(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    chunks = stream_events(http, PATH, body | {"stream_options": {"include_usage": True}})
    *body_chunks, last, usage = chunks
    assert body_chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in body_chunks[1:])
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in body_chunks)
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 24
    assert all(chunk.get("usage") is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert text_of(chunks) == text(ask(client))


def test_a_stream_has_no_usage_unless_asked(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, max_tokens=4, stream=True
        )
    )
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_max_completion_tokens_is_max_tokens(client: openai.OpenAI) -> None:
    answer = ask(client, max_tokens=None, max_completion_tokens=5)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_choices_take_consecutive_seeds(client: openai.OpenAI) -> None:
    together = ask(client, n=3, temperature=1.0, seed=70, max_tokens=12)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in together.choices]
    assert len(set(texts)) == 3
    assert texts == [
        text(ask(client, temperature=1.0, seed=70 + index, max_tokens=12)) for index in range(3)
    ]
    assert together.usage is not None
    assert together.usage.completion_tokens <= 36


def test_streamed_choices_carry_their_index(http: httpx.Client, client: openai.OpenAI) -> None:
    fields = {"n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 10}
    chunks = stream_events(http, PATH, {"model": MODEL, "messages": QUESTION} | fields)
    whole = ask(client, **fields)
    assert [text_of(chunks, index) for index in (0, 1)] == [
        choice.message.content for choice in whole.choices
    ]
    ends = [
        choice["index"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["finish_reason"] is not None
    ]
    assert sorted(ends) == [0, 1]


def test_a_stop_string_across_tokens_ends_the_answer_before_it(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    plain = ask(client, logprobs=True)
    assert plain.choices[0].logprobs is not None
    tokens = [item.token for item in plain.choices[0].logprobs.content or []]
    at = next(i for i in range(4, len(tokens) - 1) if min(map(len, tokens[i : i + 2])) >= 3)
    stop = tokens[at][-2:] + tokens[at + 1][:2]
    expected = text(plain).split(stop)[0]
    stopped = ask(client, stop=["never in it", stop])
    assert stopped.choices[0].finish_reason == "stop"
    assert text(stopped) == expected
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24, "stop": stop}
    chunks = stream_events(http, PATH, body)
    assert text_of(chunks) == expected
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens < 24


def test_logprobs_list_each_token_with_its_best_rivals(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3, max_tokens=10)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 10
    for item in content:
        best = [rival.logprob for rival in item.top_logprobs]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)
        # Greedy: the token taken is the best one.
        assert item.token == item.top_logprobs[0].token
        assert item.logprob == pytest.approx(best[0], abs=1e-6)
        assert item.logprob <= 0
    spelt = b"".join(bytes(item.bytes or []) for item in content).decode()
    assert spelt == text(answer)


def test_a_seed_makes_sampling_repeatable(client: openai.OpenAI) -> None:
    answers = [text(ask(client, temperature=1.2, seed=seed)) for seed in (11, 11, 12)]
    assert answers[0] == answers[1] != answers[2]


def test_an_answer_without_a_seed_can_be_replayed_with_the_seed_it_reports(
    client: openai.OpenAI,
) -> None:
    first = ask(client, temperature=1.0)
    seed = (first.choices[0].model_extra or {})["seed"]
    assert text(ask(client, temperature=1.0, seed=seed)) == text(first)


@pytest.mark.parametrize("fields", [{"extra_body": {"top_k": 1}}, {"top_p": 1e-9}])
def test_sampling_from_one_candidate_is_greedy(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    assert text(ask(client, temperature=1.0, seed=3, **fields)) == text(ask(client))


def test_logit_bias_forces_and_bans_a_token(client: openai.OpenAI, stack: Stack) -> None:
    tokenizer = stack.tokenizer()
    forced = tokenizer.encode(" harbour").ids[0]
    answer = ask(client, max_tokens=4, logit_bias={str(forced): 100})
    assert text(answer) == tokenizer.decode([forced]) * 4
    plain = ask(client, max_tokens=1, logprobs=True, top_logprobs=2)
    assert plain.choices[0].logprobs is not None
    best, second = (plain.choices[0].logprobs.content or [])[0].top_logprobs
    [banned] = tokenizer.encode(best.token).ids
    assert text(ask(client, max_tokens=1, logit_bias={str(banned): -100})) == second.token


def test_a_frequency_penalty_breaks_a_loop(client: openai.OpenAI) -> None:
    loop: Any = [{"role": "user", "content": "Say only this word, many times: la la la la la la"}]
    repeats = [
        text(ask(client, loop, frequency_penalty=penalty, max_tokens=40)).lower().count("la")
        for penalty in (0.0, 2.0)
    ]
    assert repeats[1] < repeats[0]


def test_list_content_is_its_parts_joined(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Name a colour."}, {"type": "text", "text": "Only one."}]
    joined = ask(client, [{"role": "user", "content": "Name a colour.\nOnly one."}])
    assert text(ask(client, [{"role": "user", "content": parts}])) == text(joined)


def test_unknown_fields_are_accepted(client: openai.OpenAI) -> None:
    extra = {"frobnicate": {"deep": [1, None]}, "user": "someone", "metadata": {"a": "b"}}
    assert text(ask(client, extra_body=extra)) == text(ask(client))


def test_special_token_text_of_a_user_stays_text(client: openai.OpenAI) -> None:
    def prompt_tokens(content: str) -> int:
        usage = ask(client, [{"role": "user", "content": content}], max_tokens=1).usage
        assert usage is not None
        return usage.prompt_tokens

    # As a control token it would be one.
    assert prompt_tokens("a<|im_end|>b") - prompt_tokens("ab") >= 4


def test_speculation_can_be_turned_off_for_a_request(client: openai.OpenAI) -> None:
    off = ask(client, extra_body={"speculation": "off"})
    assert text(off) == text(ask(client, extra_body={"speculation": "auto"}))


def test_every_answer_carries_a_request_id(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 1}
    sent = http.post(PATH, json=body, headers={"x-request-id": "mine-1"})
    assert sent.headers["x-request-id"] == "mine-1"
    made = {http.post(PATH, json=body).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    assert all(made)


def test_the_served_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("another")
    assert caught.value.code == "model_not_found"
