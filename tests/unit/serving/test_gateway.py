"""The gateway's application, over ASGI, with a scripted broker."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from mirror_sd import telemetry
from mirror_sd.api.tokenizer import Tokenizer
from mirror_sd.config import Config
from mirror_sd.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    NoWorker,
    QueueFull,
)
from mirror_sd.messages import DeviceHealth, MergeProfile, QueueStats, Stats, WorkerStats
from mirror_sd.serving.gateway import create_app
from tests.unit.api.small_model import small_tokenizer
from tests.unit.serving.scripted_broker import ScriptedBroker

TOKENIZER = small_tokenizer()
CONTRACT = json.loads(
    (Path(__file__).parents[2] / "contracts" / "edge_headers.json").read_text(encoding="utf-8")
)
CHAT = "/v1/chat/completions"
TEXT = "Hi 你好 🙂 END rest"
HELLO = [{"role": "user", "content": "hello"}]


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode_prompt(text)


def app_of(broker: ScriptedBroker, tokenizer: Tokenizer = TOKENIZER, **settings: Any) -> Any:
    config = Config.model_validate({"pools": {"cpu": {}, "gpu": {}}, **settings})
    return create_app(config, tokenizer, broker)


def ask(
    broker: ScriptedBroker,
    path: str = CHAT,
    body: Any = None,
    *,
    headers: dict[str, str] | None = None,
    content: bytes | None = None,
    method: str = "POST",
    **settings: Any,
) -> httpx.Response:
    async def exchange() -> httpx.Response:
        transport = httpx.ASGITransport(app_of(broker, **settings))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.request(
                method,
                path,
                json=body if content is None else None,
                content=content,
                headers=headers,
            )

    response = asyncio.run(exchange())
    assert response.headers["x-request-id"]
    return response


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "small", "messages": HELLO, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "small", "prompt": "hello", **fields}


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream that ended with [DONE] and the edge's comment."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-3] == "data: [DONE]" and blocks[-1] == ""
    assert re.fullmatch(r": mirror-usage \d+ \d+", blocks[-2])
    assert all(re.fullmatch(r"data: \{.*\}", block) for block in blocks[:-3])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-3]]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


def requests_counted(*labels: str) -> float:
    value: float = telemetry.REQUESTS.labels(*labels)._value.get()
    return value


# Answers.


def test_the_edge_is_told_the_true_counts() -> None:
    prompt = len(TOKENIZER.encode_chat([("user", "hello")]))
    made = len(ids_of(TEXT))
    whole = ask(ScriptedBroker(ids_of(TEXT)), CHAT, chat())
    assert whole.headers["x-mirror-prompt-tokens"] == str(prompt)
    assert whole.headers["x-mirror-completion-tokens"] == str(made)
    stream = ask(ScriptedBroker(ids_of(TEXT)), CHAT, chat(stream=True))
    assert stream.text.endswith(f"data: [DONE]\n\n: mirror-usage {prompt} {made}\n\n")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("level", "tier", "asked", "allowed"),
    [
        ("1", "standard", 300, 300),
        ("2", "standard", 300, 256),
        ("3", "standard", 300, 256),
        ("2", "standard", 200, 200),
        ("2", "standard", None, 256),
        ("2", "vip", 300, 300),
        ("9", "standard", 300, 300),
        ("two", "standard", 300, 300),
    ],
)
def test_degradation_caps_the_answers_of_standard_and_says_so(
    level: str, tier: str, asked: int | None, allowed: int, stream: bool
) -> None:
    broker = ScriptedBroker(ids_of("ok"))
    headers = {"X-Mirror-Degrade": level, "X-Mirror-Tier": tier}
    tokenizer = small_tokenizer(max_context=2000)
    response = ask(
        broker, CHAT, chat(max_tokens=asked, stream=stream), headers=headers, tokenizer=tokenizer
    )
    [submit] = broker.submits
    assert submit.params.max_tokens == allowed
    assert submit.degrade_level == (int(level) if level in ("1", "2", "3") else 0)
    is_capped = allowed != asked
    assert response.headers.get("x-mirror-degraded") == ("max_tokens" if is_capped else None)


def profile_of(tenant: str = "acme", **fields: Any) -> MergeProfile | None:
    broker = ScriptedBroker(ids_of("ok"))
    ask(broker, CHAT, chat(**fields), headers={"X-Mirror-Tenant": tenant})
    return broker.submits[0].merge


def test_a_submit_says_what_may_be_merged() -> None:
    greedy = profile_of(temperature=0)
    assert greedy is not None and greedy.exact and greedy.partition and greedy.signature
    assert profile_of(temperature=0, seed=9) == greedy
    other = profile_of("rival", temperature=0)
    assert other is not None
    assert {other.exact, other.partition, other.scope}.isdisjoint(
        {greedy.exact, greedy.partition, greedy.scope}
    )
    seeded, again = profile_of(seed=5), profile_of(seed=5)
    assert seeded == again and seeded is not None and seeded.exact
    assert seeded != profile_of(seed=6)


def test_answers_that_chance_makes_are_compared_but_never_the_same() -> None:
    drawn = profile_of()
    assert drawn is not None and drawn.signature and not (drawn.exact or drawn.partition)
    assert profile_of(max_tokens=2) is None


def test_short_answers_are_merged_only_when_they_are_the_same() -> None:
    short = profile_of(temperature=0, max_tokens=2)
    assert short is not None and short.exact and not short.signature


def test_what_changes_the_tokens_keeps_requests_apart() -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"max_tokens": 9},
        {"logit_bias": {"3": 1}},
        {"presence_penalty": 1},
        {"logprobs": True},
        {"messages": [{"role": "user", "content": "hello!"}]},
    ]
    profiles = [profile_of(temperature=0, **fields) for fields in variants]
    assert len({profile.exact for profile in profiles if profile}) == len(variants)
    one, other = (
        profile_of(temperature=0, logit_bias=b) for b in ({"3": 1, "4": 2}, {"4": 2, "3": 1})
    )
    assert one == other
    stopped = profile_of(temperature=0, stop="x")
    assert profiles[0] is not None and stopped is not None
    assert stopped.exact == profiles[0].exact  # stops cut text, at the gateway


def test_merging_can_be_turned_off() -> None:
    broker = ScriptedBroker(ids_of("ok"))
    ask(broker, CHAT, chat(temperature=0), merge={"enabled": False})
    assert broker.submits[0].merge is None


def test_a_chat_is_answered_whole() -> None:
    broker = ScriptedBroker(ids_of(TEXT))
    before = requests_counted("gpu", "vip", "200")
    headers = {"X-Mirror-Device": "gpu", "X-Mirror-Tier": "vip", "X-Mirror-Tenant": "acme"}
    response = ask(broker, CHAT, chat(seed=5, temperature=0.5, top_k=-1), headers=headers)
    body = response.json()
    assert body["object"] == "chat.completion" and body["model"] == "small"
    assert body["id"].startswith("chatcmpl-") and body["system_fingerprint"].startswith("fp_")
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert (choice["finish_reason"], choice["seed"], choice["logprobs"]) == ("stop", 5, None)
    prompt = TOKENIZER.encode_chat([("user", "hello")])
    assert body["usage"]["prompt_tokens"] == len(prompt)
    assert body["usage"]["completion_tokens"] == len(ids_of(TEXT))
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert body["usage"]["speculation"]["accepted_tokens"] == 3
    [submit] = broker.submits
    assert list(submit.prompt) == prompt
    assert (submit.device_class, submit.tier, submit.tenant) == ("gpu", "vip", "acme")
    assert submit.params.stop_token_ids == TOKENIZER.facts.eos_token_ids
    assert submit.params.max_tokens == TOKENIZER.facts.max_context - len(prompt)
    assert (submit.params.seed, submit.params.temperature, submit.params.top_k) == (5, 0.5, 0)
    assert requests_counted("gpu", "vip", "200") == before + 1
    assert broker.cancelled == []


@pytest.mark.parametrize("per_chunk", [1, 3, 100])
def test_a_chat_is_streamed_in_openais_order(per_chunk: int) -> None:
    broker = ScriptedBroker(ids_of(TEXT), per_chunk=per_chunk)
    body = chat(stream=True, stream_options={"include_usage": True})
    events = events_of(ask(broker, CHAT, body))
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    *chunks, last = events
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(ids_of(TEXT))
    assert all(chunk["usage"] is None for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"]["role"] == "assistant" and "seed" in choices[0]
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert "".join(choice["delta"].get("content", "") for choice in choices) == TEXT
    assert not any("\ufffd" in choice["delta"].get("content", "") for choice in choices)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert choices[-1]["delta"] == {}


def test_usage_is_streamed_only_if_asked_for() -> None:
    events = events_of(ask(ScriptedBroker(ids_of("a")), CHAT, chat(stream=True)))
    assert all("usage" not in event for event in events)


def test_each_choice_has_its_own_seed_and_its_own_opening() -> None:
    broker = ScriptedBroker(ids_of("ab"))
    events = events_of(ask(broker, CHAT, chat(n=3, seed=-1, stream=True)))
    openings = [e["choices"][0] for e in events if "role" in e["choices"][0]["delta"]]
    seeds = {opening["index"]: opening["seed"] for opening in openings}
    assert seeds == {0: 2**64 - 1, 1: 0, 2: 1}
    assert [submit.params.seed for submit in broker.submits] == [2**64 - 1, 0, 1]
    finished = [e["choices"][0]["index"] for e in events if e["choices"][0]["finish_reason"]]
    assert sorted(finished) == [0, 1, 2]
    assert len({submit.request_id for submit in broker.submits}) == 3


def test_a_seed_is_drawn_where_none_is_given_and_is_told() -> None:
    broker = ScriptedBroker(ids_of("a"))
    body = ask(broker, CHAT, chat(n=2)).json()
    first, second = (choice["seed"] for choice in body["choices"])
    assert second == first + 1 == broker.submits[1].params.seed
    assert first < 2**53
    assert ask(broker, CHAT, chat()).json()["choices"][0]["seed"] != first


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_cancels_the_rest(stream: bool) -> None:
    broker = ScriptedBroker(ids_of(TEXT), reason="length")
    response = ask(broker, CHAT, chat(stop=["END", "nope"], stream=stream, logprobs=True))
    if stream:
        choices = [event["choices"][0] for event in events_of(response)]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        logprobs = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
        reason = choices[-1]["finish_reason"]
    else:
        [choice] = response.json()["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        logprobs = choice["logprobs"]["content"]
        assert response.json()["usage"]["completion_tokens"] == len(logprobs)
    assert (text, reason) == ("Hi 你好 🙂 ", "stop")
    assert b"".join(bytes(entry["bytes"]) for entry in logprobs).decode() == "Hi 你好 🙂 END"
    assert broker.cancelled == [broker.submits[0].request_id]


def test_a_stopped_choice_is_cancelled_while_another_goes_on() -> None:
    class SecondWaits(ScriptedBroker):
        async def _frames(self, submit: Any) -> Any:
            if submit.request_id.endswith("-1"):
                await self.has_cancelled.wait()
            async for frame in super()._frames(submit):
                yield frame
                await asyncio.sleep(0.001)

    broker = SecondWaits(ids_of("a END and then a lot more of it"), reason="length")
    choices = ask(broker, CHAT, chat(n=2, stop="END")).json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["a ", "a "]
    assert len(broker.cancelled) == 2


def test_completions_take_many_prompts_and_echo() -> None:
    broker = ScriptedBroker(ids_of(" done"))
    prompts = ["Grüße", ids_of("ab")]
    body = ask(broker, "/v1/completions", completion(prompt=prompts, n=2, echo=True, logprobs=0))
    choices = body.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [c["text"] for c in choices] == ["Grüße done"] * 2 + ["ab done"] * 2
    assert body.json()["usage"]["prompt_tokens"] == len(ids_of("Grüße")) + len(ids_of("ab"))
    for choice in choices:
        logprobs = choice["logprobs"]
        assert len({len(column) for column in logprobs.values()}) == 1
        assert logprobs["token_logprobs"][0] is None
        # Each token's text stands where its offset says.
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            if not token.startswith("bytes:"):
                assert choice["text"][offset:].startswith(token)
    seeds = [submit.params.seed for submit in broker.submits]
    assert seeds[:2] == seeds[2:] and seeds[1] == seeds[0] + 1


def test_completions_stream_and_default_to_sixteen_tokens() -> None:
    broker = ScriptedBroker(ids_of("x") * 40, reason="length")
    events = events_of(ask(broker, "/v1/completions", completion(stream=True, echo=True)))
    assert {event["object"] for event in events} == {"text_completion"}
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == "hello" + "x" * 16
    assert choices[-1]["finish_reason"] == "length" and choices[-1]["text"] == ""


@pytest.mark.parametrize(
    ("wish", "tier", "given"),
    [
        (None, "standard", "default"),
        ("priority", "standard", "default"),
        ("auto", "vip", "priority"),
        ("flex", "vip", "default"),
        ("anything", "vip", "priority"),
    ],
)
def test_a_service_tier_is_held_to_what_the_key_allows(
    wish: str | None, tier: str, given: str
) -> None:
    broker = ScriptedBroker(ids_of("a"))
    response = ask(broker, CHAT, chat(service_tier=wish), headers={"X-Mirror-Tier": tier})
    assert response.json()["service_tier"] == given
    assert broker.submits[0].tier == ("vip" if given == "priority" else "standard")


def test_unknown_classes_tiers_and_tenants_become_the_defaults() -> None:
    broker = ScriptedBroker(ids_of("a"))
    headers = {"X-Mirror-Device": "npu", "X-Mirror-Tier": "king", "X-Mirror-Tenant": "a b" * 50}
    ask(broker, CHAT, chat(), headers=headers)
    submit = broker.submits[0]
    assert (submit.device_class, submit.tier, submit.tenant) == ("cpu", "standard", "default")


def test_speculation_and_logit_bias_reach_the_worker() -> None:
    broker = ScriptedBroker(ids_of("a"))
    ask(
        broker, CHAT, chat(speculation="off", logit_bias={"7": -100}, top_logprobs=3, logprobs=True)
    )
    params = broker.submits[0].params
    assert (params.speculation, params.logit_bias, params.logprobs) == (False, {7: -100.0}, 3)


def test_source_and_length_of_drafts_reach_the_worker_and_part_no_identical_requests() -> None:
    broker = ScriptedBroker(ids_of("a"))
    wishes = ("auto", "off", {"source": "history", "max_tokens": 5}, {"source": "head"})
    for wish in wishes:
        ask(broker, CHAT, chat(temperature=0, speculation=wish))
    asked = [
        (params.speculation, params.draft_source, params.draft_tokens)
        for params in (submit.params for submit in broker.submits)
    ]
    assert asked == [
        (True, "auto", 0),
        (False, "auto", 0),
        (True, "history", 5),
        (True, "head", 0),
    ]
    profiles = [submit.merge for submit in broker.submits]
    assert profiles[0] is not None and profiles[0].exact and profiles[0].partition
    assert profiles == profiles[:1] * 4, "no draft changes a token, so they are one request"


# Refusals.


def test_another_model_is_not_found() -> None:
    error = error_of(ask(ScriptedBroker(), CHAT, chat(model="gpt-4")), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error_of(ask(ScriptedBroker(), "/v1/models/x/y", method="GET"), 404)["code"] == (
        "model_not_found"
    )


def test_a_served_name_replaces_the_models_own() -> None:
    broker = ScriptedBroker(ids_of("a"))
    settings = {"model": {"served_name": "org/mine"}}
    assert ask(broker, CHAT, chat(model="org/mine"), **settings).json()["model"] == "org/mine"
    error_of(ask(broker, CHAT, chat(), **settings), 404)
    listed = ask(broker, "/v1/models", method="GET", **settings).json()
    assert [model["id"] for model in listed["data"]] == ["org/mine"]
    one = ask(broker, "/v1/models/org/mine", method="GET", **settings).json()
    assert (one["object"], one["max_model_len"]) == ("model", 256)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat(messages=[{"role": "user", "content": "你" * 400}]), "messages"),
        (CHAT, chat(max_tokens=256), "messages"),
        ("/v1/completions", completion(prompt="你" * 400), "prompt"),
        ("/v1/completions", completion(prompt=[5] * 256), "prompt"),
        ("/v1/completions", completion(prompt=["a", [5] * 250], max_tokens=7), "prompt"),
    ],
)
def test_what_does_not_fit_the_context_is_refused(
    path: str, body: dict[str, Any], param: str
) -> None:
    broker = ScriptedBroker(ids_of("a"))
    error = error_of(ask(broker, path, body), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "256" in error["message"] and broker.submits == []


def test_the_context_can_be_filled_to_the_last_token() -> None:
    broker = ScriptedBroker(ids_of("a"))
    body = completion(prompt=[5] * 250, max_tokens=6)
    assert ask(broker, "/v1/completions", body).status_code == 200
    limited = ask(broker, "/v1/completions", body, model={"max_context": 255})
    assert error_of(limited, 400)["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"\xff" * 100_000, 400),
        (b'{"model": "small"', 400),
        (b'{"a":' * 50_000, 400),
        (b'{"model": "small", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (b'{"model": "\\ud800"}', 400),
        (b" " * 2000, 413),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_garbage_is_a_clients_error(path: str, content: bytes, status: int) -> None:
    server = {"max_body_bytes": 1024 if status == 413 else 4 * 1024 * 1024}
    before = requests_counted("cpu", "standard", str(status))
    error_of(ask(ScriptedBroker(), path, content=content, server=server), status)
    assert requests_counted("cpu", "standard", str(status)) == before + 1


def test_a_body_without_a_length_is_still_bounded() -> None:
    async def exchange() -> httpx.Response:
        async def pieces() -> Any:
            for _ in range(20):
                yield b" " * 100

        transport = httpx.ASGITransport(app_of(ScriptedBroker(), server={"max_body_bytes": 1024}))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.post(CHAT, content=pieces())

    error_of(asyncio.run(exchange()), 413)


def test_an_empty_prompt_is_refused() -> None:
    error = error_of(ask(ScriptedBroker(), "/v1/completions", completion(prompt="")), 400)
    assert error["param"] == "prompt"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", CHAT, 405), ("DELETE", "/health", 405), ("POST", "/", 404)],
)
def test_paths_and_methods_that_do_not_exist(method: str, path: str, status: int) -> None:
    response = ask(ScriptedBroker(), path, method=method)
    error_of(response, status)
    assert ("allow" in response.headers) == (status == 405)


# Failures behind the gateway.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "headers"),
    [
        (QueueFull("full", retry_after_s=2.3), 429, {"retry-after": "3", "retry-after-ms": "2300"}),
        (NoWorker("none"), 503, {"retry-after": "1"}),
        (DeadlineExceeded("late"), 504, {"x-should-retry": "false"}),
        (ContextLengthExceeded("long", param="messages"), 400, {}),
    ],
)
def test_a_failure_before_the_first_token_has_its_own_status(
    failure: Exception, status: int, headers: dict[str, str], stream: bool
) -> None:
    response = ask(ScriptedBroker(error=failure), CHAT, chat(stream=stream, n=2))
    assert error_of(response, status)["message"] == str(failure)
    assert {name: response.headers.get(name) for name in headers} == headers


@pytest.mark.parametrize("failure", [InternalError("secret"), RuntimeError("secret")])
def test_a_fault_of_ours_is_logged_and_told_by_its_request_id(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    response = ask(ScriptedBroker(error=failure), CHAT, chat(), headers={"X-Request-Id": "me-1"})
    error = error_of(response, 500)
    assert "me-1" in error["message"] and "secret" not in response.text
    [record] = [record for record in caplog.records if record.exc_info]
    assert "me-1" in record.getMessage() and "secret" in record.getMessage()


def test_a_failure_in_a_stream_is_one_event_and_the_end() -> None:
    broker = ScriptedBroker(ids_of("ab"), error=NoWorker("all workers are gone"))
    before = telemetry.STREAM_ERRORS.labels("cpu", "standard")._value.get()
    response = ask(broker, CHAT, chat(stream=True))
    assert response.status_code == 200
    blocks = response.text.split("\n\n")
    assert json.loads(blocks[-2].removeprefix("data: "))["error"]["code"] == "no_worker"
    assert "[DONE]" not in response.text
    assert telemetry.STREAM_ERRORS.labels("cpu", "standard")._value.get() == before + 1


def test_one_failed_choice_cancels_the_others() -> None:
    class OneFails(ScriptedBroker):
        async def _frames(self, submit: Any) -> Any:
            if submit.request_id.endswith("-1"):
                raise QueueFull("full")
            await asyncio.Event().wait()
            yield

    broker = OneFails()
    error_of(ask(broker, CHAT, chat(n=3)), 429)
    assert broker.running == set() and len(broker.cancelled) == 3


# Clients that leave.


class Connection:
    """An ASGI connection whose client can leave at any moment."""

    def __init__(self, body: bytes) -> None:
        self.status: int | None = None
        self.sent = b""
        self.gone = asyncio.Event()
        self._body: bytes | None = body

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.sent += message.get("body", b"")


async def leave(
    broker: ScriptedBroker, body: dict[str, Any], when: Callable[..., Awaitable[Any]]
) -> Connection:
    content = json.dumps(body).encode()
    connection = Connection(content)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "scheme": "http",
        "headers": [(b"content-length", str(len(content)).encode())],
    }
    task = asyncio.create_task(app_of(broker)(scope, connection.receive, connection.send))
    await when()
    connection.gone.set()
    await asyncio.wait_for(task, 2)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hang_after", [0, 2])
def test_a_client_that_leaves_cancels_all_its_choices(stream: bool, hang_after: int) -> None:
    async def scenario() -> None:
        broker = ScriptedBroker(ids_of(TEXT), hang_after=hang_after)
        before = telemetry.DISCONNECTS._value.get()
        counted = requests_counted("cpu", "standard", "499")
        connection = await leave(broker, chat(stream=stream, n=2), broker.begun.wait)
        assert len(broker.submits) == 2
        assert broker.running == set() and len(broker.cancelled) == 2
        assert telemetry.DISCONNECTS._value.get() == before + 1
        assert requests_counted("cpu", "standard", "499") == counted + 1
        assert b"[DONE]" not in connection.sent

    asyncio.run(scenario())


def test_a_client_that_leaves_while_its_prompt_is_read_costs_nothing() -> None:
    async def scenario() -> None:
        broker = ScriptedBroker(hang_after=0)

        async def at_once() -> None: ...

        await leave(broker, chat(), at_once)
        assert broker.running == set()

    asyncio.run(scenario())


# The edge's contract.


@pytest.mark.parametrize("given", CONTRACT["request_ids"]["kept"])
def test_a_request_id_is_kept(given: str) -> None:
    response = ask(ScriptedBroker(), "/nope", method="GET", headers={"X-Request-Id": given})
    assert response.headers["x-request-id"] == given


@pytest.mark.parametrize(
    "given", [id for id in CONTRACT["request_ids"]["replaced"] if "\n" not in id]
)
def test_a_request_id_that_breaks_the_rules_is_replaced(given: str) -> None:
    headers = {"X-Request-Id": given.encode()}
    response = ask(ScriptedBroker(), "/nope", method="GET", headers=headers)  # type: ignore[arg-type]
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


def test_the_counts_are_told_as_the_contract_has_them() -> None:
    counts = CONTRACT["counts"]
    whole = ask(ScriptedBroker(ids_of("ab")), CHAT, chat())
    assert [name for name in counts["headers"] if name in whole.headers] == counts["headers"]
    stream = ask(ScriptedBroker(ids_of("ab")), CHAT, chat(stream=True))
    prompt, made = (whole.headers[name] for name in counts["headers"])
    end = counts["stream_end"]
    assert f" {end['prompt']} {end['completion']}" in end["text"]
    expected = end["text"].replace(f" {end['prompt']} {end['completion']}", f" {prompt} {made}")
    assert stream.text.endswith(expected)


def test_the_devices_and_tiers_of_the_contract_are_understood() -> None:
    for device in CONTRACT["classes"]:
        for tier in CONTRACT["tiers"]:
            broker = ScriptedBroker(ids_of("a"))
            headers = {"X-Mirror-Device": device, "X-Mirror-Tier": tier}
            ask(
                broker,
                CHAT,
                chat(),
                headers=headers,
                pools={name: {} for name in CONTRACT["classes"]},
            )
            assert (broker.submits[0].device_class, broker.submits[0].tier) == (device, tier)


# Status.


def worker(**fields: Any) -> WorkerStats:
    known: dict[str, Any] = {
        "worker_id": "w",
        "device_class": "cpu",
        "pid": 1,
        "model": "m",
        "engine": "torch",
        "precision": "fp32",
        "slots": 4,
        "in_flight": 0,
        "running": 0,
        "waiting": 0,
        "kv_blocks_used": 0,
        "kv_blocks_free": 9,
        "steps": 1,
        "silent_s": 0.1,
        "stalled_s": 0.0,
        "draining": False,
    }
    return WorkerStats(**{**known, **fields})


def stats(*workers: WorkerStats, **fields: Any) -> Stats:
    known: dict[str, Any] = {
        "token": 1,
        "instance": "i",
        "pid": 2,
        "running": 0,
        "waiting": 0,
        "oldest_wait_s": 0.0,
        "gateways": (3,),
    }
    return Stats(workers=workers, **{**known, **fields})


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (stats(worker()), None),
        (stats(worker(), worker(silent_s=60.0)), None),
        (stats(worker(draining=True), worker()), None),
        (stats(worker(), waiting=5, running=1, oldest_wait_s=99.0), None),
        (stats(), "no worker"),
        (stats(worker(silent_s=60.0)), "no worker"),
        (stats(worker(stalled_s=31.0)), "no progress"),
        (stats(worker(draining=True)), "draining"),
        (stats(worker(), waiting=5, oldest_wait_s=99.0), "none runs"),
        (NoWorker("the broker does not answer"), "does not answer"),
    ],
)
def test_health_is_ok_only_while_work_moves(answer: Any, reason: str | None) -> None:
    response = ask(ScriptedBroker(stats=answer), "/health", method="GET")
    assert response.status_code == (200 if reason is None else 503)
    if reason is not None:
        assert reason in response.json()["reason"]


def test_the_state_shows_the_brokers_view() -> None:
    queue = QueueStats(device_class="gpu", tier="vip", depth=3, oldest_wait_s=0.5)
    warm = worker(worker_id="g", emulated=True, health=DeviceHealth(temperature_c=86.0))
    shown = stats(worker(), warm, waiting=3, queues=(queue,))
    state = ask(ScriptedBroker(stats=shown), "/admin/state", method="GET").json()
    assert state["waiting"] == 3 and state["workers"][0]["worker_id"] == "w"
    assert state["gateway_pid"] > 0 and "token" not in state
    # At their defaults too, which the wire leaves out.
    cold, warm_shown = state["workers"]
    assert (cold["emulated"], cold["health"], cold["tokens"]) == (False, None, 0)
    assert warm_shown["emulated"] is True
    assert warm_shown["health"] == {
        "temperature_c": 86.0,
        "utilisation": None,
        "memory_pressure": None,
    }
    assert state["queues"] == [
        {"device_class": "gpu", "tier": "vip", "depth": 3, "oldest_wait_s": 0.5}
    ]
    error_of(ask(ScriptedBroker(stats=NoWorker("gone")), "/admin/state", method="GET"), 503)
