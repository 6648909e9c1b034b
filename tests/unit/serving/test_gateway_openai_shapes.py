"""The gateway's bodies against the models of OpenAI's own client, strictly."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from mirror_sd.config import Config
from mirror_sd.errors import DeadlineExceeded, InternalError, NoWorker, QueueFull
from mirror_sd.serving.gateway import create_app
from tests.unit.api.small_model import small_tokenizer
from tests.unit.serving.scripted_broker import ScriptedBroker

TOKENIZER = small_tokenizer()
TEXT = "Hi 你好 🙂 done"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def client_of(broker: ScriptedBroker) -> openai.AsyncOpenAI:
    app: Any = create_app(Config(), TOKENIZER, broker)
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    return openai.AsyncOpenAI(
        api_key="-", base_url="http://gateway/v1", http_client=http, max_retries=0
    )


def checked(kind: type[BaseModel], value: BaseModel) -> None:
    # The client builds its objects without checking them.
    kind.model_validate(json.loads(value.model_dump_json(exclude_unset=True, warnings=False)))


def test_chats_are_what_the_client_expects() -> None:
    async def scenario() -> None:
        async with client_of(ScriptedBroker(TOKENIZER.encode_prompt(TEXT))) as client:
            fields: dict[str, Any] = {"model": "small", "messages": HELLO, "n": 2}
            fields |= {"logprobs": True, "top_logprobs": 2, "seed": 3, "user": "me"}
            whole = await client.chat.completions.create(**fields)
            checked(ChatCompletion, whole)
            assert [choice.message.content for choice in whole.choices] == [TEXT, TEXT]
            stream = await client.chat.completions.create(
                stream=True, stream_options={"include_usage": True}, **fields
            )
            texts = {0: "", 1: ""}
            async for chunk in stream:
                checked(ChatCompletionChunk, chunk)
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
            assert texts == {0: TEXT, 1: TEXT}
            assert chunk.usage == whole.usage

    asyncio.run(scenario())


def test_completions_and_models_are_what_the_client_expects() -> None:
    async def scenario() -> None:
        async with client_of(ScriptedBroker(TOKENIZER.encode_prompt(TEXT))) as client:
            fields: dict[str, Any] = {"model": "small", "prompt": ["a", "b"], "max_tokens": 99}
            whole = await client.completions.create(echo=True, **fields)
            checked(Completion, whole)
            assert [choice.text for choice in whole.choices] == ["a" + TEXT, "b" + TEXT]
            checked(Completion, await client.completions.create(logprobs=1, **fields))
            texts = ["", ""]
            async for chunk in await client.completions.create(stream=True, **fields):
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
            assert texts == [TEXT, TEXT]
            async for model in client.models.list():
                checked(Model, model)
            assert (await client.models.retrieve("small")).owned_by == "mirror-sd"

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "fields", "kind", "code"),
    [
        (None, {"model": "other"}, openai.NotFoundError, "model_not_found"),
        (None, {"temperature": 9}, openai.BadRequestError, "invalid_value"),
        (None, {"max_tokens": 10**6}, openai.BadRequestError, "context_length_exceeded"),
        (QueueFull("full"), {}, openai.RateLimitError, "queue_full"),
        (NoWorker("none"), {}, openai.InternalServerError, "no_worker"),
        (DeadlineExceeded("late"), {}, openai.InternalServerError, "deadline_exceeded"),
        (InternalError("bug"), {}, openai.InternalServerError, "internal_error"),
    ],
)
def test_errors_become_the_clients_exceptions(
    failure: Exception | None,
    fields: dict[str, Any],
    kind: type[openai.APIError],
    code: str,
    stream: bool,
) -> None:
    async def scenario() -> None:
        async with client_of(ScriptedBroker(error=failure)) as client:
            with pytest.raises(kind) as raised:
                await client.chat.completions.create(
                    **{"model": "small", "messages": HELLO, "stream": stream, **fields}
                )
            assert raised.value.code == code

    asyncio.run(scenario())


def test_an_error_in_a_stream_is_raised_by_the_client() -> None:
    async def scenario() -> None:
        broker = ScriptedBroker(TOKENIZER.encode_prompt("ab"), error=NoWorker("all are gone"))
        async with client_of(broker) as client:
            stream = await client.chat.completions.create(
                model="small", messages=HELLO, stream=True
            )
            with pytest.raises(openai.APIError, match="all are gone"):
                async for _ in stream:
                    pass

    asyncio.run(scenario())
