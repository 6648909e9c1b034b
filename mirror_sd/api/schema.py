"""What a client may ask for: the bodies of `/v1/chat/completions` and `/v1/completions`.

Fields of both (all but `model` optional; unknown fields are accepted and ignored):

    model                 string
    n                     1..128: choices per prompt; `best_of` must equal it
    stop                  string or up to 4 strings, each of 1 to 1024 characters
    max_tokens            1..; `max_completion_tokens` is the same and wins
    temperature           0..2, default 1; below 1e-5 is greedy
    top_p                 above 0, to 1
    top_k                 extension: 0 and -1 are off
    seed                  -2^63..2^64-1; negative ones are taken modulo 2^64
    presence_penalty, frequency_penalty   -2..2
    logit_bias            {"token id": -100..100}
    stream, stream_options.include_usage
    service_tier          a wish, held to what the key allows
    speculation           extension: "auto", "off", or {"source": one of DRAFT_SOURCES,
                          "max_tokens": 1..32}, both optional
    user                  string, not used
    response_format       only {"type": "text"}
    tools, functions, suffix   refused unless empty

Chat: `messages` (role system, developer, user, assistant or tool; content a string or a list of
`{"type": "text", "text": ...}` parts, joined with line breaks), `logprobs` (boolean),
`top_logprobs` 0..20. Completions: `prompt` (string, token ids, or a list of either), `echo`,
`logprobs` 0..5; special tokens written in a prompt string are read as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mirror_sd.api.body import shorten
from mirror_sd.api.fields import Fields, is_finite_number, refuse
from mirror_sd.errors import InvalidRequest

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1024
MAX_BIASED_TOKENS = 1024
MAX_DRAFT_TOKENS = 32
DRAFT_SOURCES = ("auto", "lookup", "history", "head", "remote")
ROLES = ("system", "developer", "user", "assistant", "tool")
Prompt = str | tuple[int, ...]

_MAX_INTEGER = 2**31 - 1
_NO_TOOLS = "this server does not call tools yet"


@dataclass(frozen=True, slots=True)
class Speculation:
    """Where the drafts of a request come from; it changes no token. `max_tokens` is the most of one
    draft, 0 leaves the length to the server."""

    is_on: bool = True
    source: str = "auto"
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Decoding:
    """How the choices of a request are decoded and delivered. `logprobs` None is off, k >= 0 the
    token's own and the k best; `max_tokens` None is the endpoint's default."""

    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    speculation: Speculation = Speculation()
    stream: bool = False
    include_usage: bool = False
    service_tier: str | None = None


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatRequest:
    model: str
    messages: tuple[ChatMessage, ...]
    decoding: Decoding


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """`prompts` holds at least one; choice i of prompt p has the index `p * n + i`."""

    model: str
    prompts: tuple[Prompt, ...]
    echo: bool
    decoding: Decoding


def read_chat(body: Mapping[str, Any], vocab_size: int) -> ChatRequest:
    """The chat request in `body`; raises `InvalidRequest` naming the field at fault."""
    fields = Fields(body)
    model = _read_model(fields)
    messages = _read_messages(fields)
    for name in ("tools", "functions"):
        fields.refuse_unsupported(name, _NO_TOOLS)
    return ChatRequest(model, messages, _read_decoding(fields, vocab_size, _chat_logprobs(fields)))


def read_completion(body: Mapping[str, Any], vocab_size: int) -> CompletionRequest:
    """The completion request in `body`; raises `InvalidRequest` naming the field at fault."""
    fields = Fields(body)
    model = _read_model(fields)
    prompts = _read_prompts(fields, vocab_size)
    fields.refuse_unsupported("suffix", "only text that follows the prompt is generated")
    decoding = _read_decoding(fields, vocab_size, fields.integer("logprobs", 0, 5))
    if len(prompts) * decoding.n > MAX_CHOICES:
        asked = f"{len(prompts)} prompts with n {decoding.n}"
        raise InvalidRequest(
            f"prompt: {asked} make more than {MAX_CHOICES} choices", param="prompt"
        )
    return CompletionRequest(model, prompts, fields.boolean("echo") or False, decoding)


def _read_model(fields: Fields) -> str:
    fields.require("model", "the name of a served model (GET /v1/models lists them)")
    return fields.text("model") or ""


def _read_decoding(fields: Fields, vocab_size: int, logprobs: int | None) -> Decoding:
    n = fields.integer("n", 1, MAX_CHOICES) or 1
    best_of = fields.integer("best_of", 1, MAX_CHOICES)
    if best_of is not None and best_of != n:
        refuse("best_of", best_of, f"the same as n ({n}); choices are not ranked here")
    stream = fields.boolean("stream") or False
    _check_response_format(fields)
    fields.text("user")
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    top_k = fields.integer("top_k", -1, _MAX_INTEGER) or 0
    return Decoding(
        n=n,
        max_tokens=_read_max_tokens(fields),
        temperature=fields.number("temperature", 0, 2, 1.0),
        top_p=fields.number("top_p", 0, 1, 1.0, above_low=True),
        top_k=max(top_k, 0),
        seed=None if seed is None else seed % 2**64,
        presence_penalty=fields.number("presence_penalty", -2, 2, 0.0),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, 0.0),
        logit_bias=_read_logit_bias(fields, vocab_size),
        stop=_read_stop(fields),
        logprobs=logprobs,
        speculation=_read_speculation(fields),
        stream=stream,
        include_usage=_read_include_usage(fields, stream),
        service_tier=fields.text("service_tier"),
    )


def _read_max_tokens(fields: Fields) -> int | None:
    plain = fields.integer("max_tokens", 1, _MAX_INTEGER)
    completion = fields.integer("max_completion_tokens", 1, _MAX_INTEGER)
    return plain if completion is None else completion


def _read_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        refuse("stop", value, f"a string or a list of at most {MAX_STOPS} strings")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            param = "stop" if isinstance(value, str) else f"stop[{index}]"
            refuse(param, stop, f"a string of 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(dict.fromkeys(stops))


def _read_logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    entries = fields.get("logit_bias")
    if entries is None:
        return {}
    if not isinstance(entries, dict) or len(entries) > MAX_BIASED_TOKENS:
        allowed = f"an object of at most {MAX_BIASED_TOKENS} token ids"
        refuse("logit_bias", entries, f"{allowed} with biases from -100 to 100")
    biases = {}
    for key, bias in entries.items():
        # Ten digits hold every 32-bit id; `isdecimal` alone would also take other scripts' digits.
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < vocab_size):
            raise InvalidRequest(
                f"logit_bias: {shorten(key)} is not a token id; expected 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        if not is_finite_number(bias) or not -100 <= bias <= 100:
            refuse(f"logit_bias.{key}", bias, "a number from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


def _chat_logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs") or False
    top = fields.integer("top_logprobs", 0, 20)
    if top is not None and not wanted:
        refuse("top_logprobs", top, "`logprobs: true` beside it")
    return (top or 0) if wanted else None


def _read_speculation(fields: Fields) -> Speculation:
    value = fields.get("speculation")
    if value is None or value == "auto":
        return Speculation()
    if value == "off":
        return Speculation(is_on=False)
    options = fields.object("speculation") if isinstance(value, dict) else None
    if options is None:
        refuse("speculation", value, '"auto", "off" or an object of source and max_tokens')
    for key in value:
        if key not in ("source", "max_tokens"):
            # No other server knows this object, so a key that is not known is a slip.
            raise InvalidRequest(
                f"speculation has no {shorten(key)}; it takes source and max_tokens",
                param="speculation",
            )
    source = options.get("source")
    if source is not None and source not in DRAFT_SOURCES:
        allowed = ", ".join(f'"{name}"' for name in DRAFT_SOURCES)
        refuse(options.param("source"), source, f"one of {allowed}")
    limit = options.integer("max_tokens", 1, MAX_DRAFT_TOKENS)
    return Speculation(source=source or "auto", max_tokens=limit or 0)


def _read_include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.object("stream_options")
    if options is None:
        return False
    if not stream:
        raise InvalidRequest(
            "stream_options is only allowed with `stream: true`", param="stream_options"
        )
    return options.boolean("include_usage") or False


def _check_response_format(fields: Fields) -> None:
    form = fields.object("response_format")
    if form is not None and form.get("type") != "text":
        refuse("response_format.type", form.get("type"), '"text", the only format supported')


def _read_messages(fields: Fields) -> tuple[ChatMessage, ...]:
    messages = fields.require("messages", "a list of messages")
    if not isinstance(messages, list) or not messages:
        refuse("messages", messages, "a list of at least one message")
    return tuple(_read_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _read_message(message: Any, path: str) -> ChatMessage:
    if not isinstance(message, dict):
        refuse(path, message, "an object with role and content")
    fields = Fields(message, path)
    role = fields.require("role", "one of " + ", ".join(ROLES))
    if role not in ROLES:
        refuse(fields.param("role"), role, "one of " + ", ".join(ROLES))
    for name in ("tool_calls", "function_call"):
        fields.refuse_unsupported(name, _NO_TOOLS)
    return ChatMessage(role, _read_content(fields, role))


def _read_content(fields: Fields, role: str) -> str:
    content = fields.get("content")
    if isinstance(content, str):
        return content
    param = fields.param("content")
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        refuse(param, content, "a string or a list of text parts")
    return "\n".join(_read_part(part, f"{param}[{i}]") for i, part in enumerate(content))


def _read_part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        refuse(path, part, 'an object {"type": "text", "text": ...}')
    fields = Fields(part, path)
    if fields.get("type") != "text":
        refuse(fields.param("type"), fields.get("type"), '"text", the only kind of part supported')
    fields.require("text", "a string")
    return fields.text("text") or ""


def _read_prompts(fields: Fields, vocab_size: int) -> tuple[Prompt, ...]:
    allowed = "a string, a list of token ids, or a list of either"
    prompt = fields.require("prompt", allowed)
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        refuse("prompt", prompt, f"{allowed}, not empty")
    if isinstance(prompt[0], int) and not isinstance(prompt[0], bool):
        return (_read_token_ids(prompt, "prompt", vocab_size),)
    if len(prompt) > MAX_CHOICES:
        refuse("prompt", prompt, f"at most {MAX_CHOICES} prompts")
    return tuple(
        item if isinstance(item, str) else _read_token_ids(item, f"prompt[{i}]", vocab_size)
        for i, item in enumerate(prompt)
    )


def _read_token_ids(ids: Any, path: str, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids:
        refuse(path, ids, "a string or a list of token ids, not empty")
    for index, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            refuse(f"{path}[{index}]", token, f"a token id from 0 to {vocab_size - 1}")
    return tuple(ids)
