"""`mirror-sd generate`: one answer from an engine in this process, without any server."""

from __future__ import annotations

import io
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from mirror_sd import engine as engines
from mirror_sd import model_store
from mirror_sd.api.detokeniser import detokeniser
from mirror_sd.api.tokenizer import Tokenizer
from mirror_sd.config import Config
from mirror_sd.engine import Engine
from mirror_sd.errors import (
    BY_CODE,
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    SetupError,
)
from mirror_sd.messages import Chunk, Failed, Finished, SamplingParams, SequenceUsage, Submit
from mirror_sd.uir import tokenizer_files

DEFAULT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Request:
    """What to answer. `max_tokens` None: `DEFAULT_TOKENS`, or what the context leaves.

    `is_raw`: the text is continued as it is, without a chat template.
    """

    text: str
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    speculation: bool
    is_raw: bool


@dataclass(slots=True)
class Summary:
    """Times in seconds; `first_token_s` counts from the submit, the load left out."""

    load_s: float
    seed: int
    first_token_s: float = 0.0
    total_s: float = 0.0
    usage: SequenceUsage = field(default_factory=SequenceUsage)

    def describe(self) -> str:
        """One line of figures for a person."""
        usage = self.usage
        decode_s = self.total_s - self.first_token_s
        speed = (usage.completion_tokens - 1) / decode_s if decode_s > 0 else 0.0
        text = (
            f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} tokens, "
            f"{speed:.1f} tok/s, first token after {1e3 * self.first_token_s:.0f} ms, "
            f"load {self.load_s:.1f} s, seed {self.seed}"
        )
        if usage.drafted_tokens:
            share = usage.accepted_tokens / usage.drafted_tokens
            text += f"; accepted {usage.accepted_tokens} of {usage.drafted_tokens} drafted"
            text += f" ({share:.0%}) in {usage.verify_rounds} rounds"
        return text


def generate(config: Config, request: Request, show: Callable[[str], None]) -> Summary:
    """Stream the answer's text to `show`. Raises `ModelError`, `InvalidRequest`."""
    device_class = next(iter(config.pools))
    begin = time.perf_counter()
    tokenizer = load_tokenizer(config)
    prompt = _prompt(tokenizer, request)
    engine = engines.build(config, device_class)
    seed = secrets.randbits(31) if request.seed is None else request.seed
    summary = Summary(load_s=time.perf_counter() - begin, seed=seed)
    submit = Submit(
        request_id="offline",
        model=engine.model_name,
        prompt=tuple(prompt),
        params=SamplingParams(
            max_tokens=_max_tokens(request, len(prompt), engine.max_context),
            seed=seed % 2**64,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stop_token_ids=tokenizer.facts.eos_token_ids,
            speculation=request.speculation,
        ),
        device_class=device_class,
    )
    text = detokeniser(tokenizer.vocabulary, is_text_start=not request.is_raw)
    for token in tokens(engine, submit, summary):
        show(text.push(token))
    show(text.finish() + "\n")
    return summary


def _max_tokens(request: Request, prompt: int, context: int) -> int:
    room = max(context - prompt, 1)
    if request.max_tokens is None:
        return min(DEFAULT_TOKENS, room)
    if request.max_tokens > room:
        raise ContextLengthExceeded(
            f"--max-tokens is {request.max_tokens}; after a prompt of {prompt} tokens the context"
            f" of {context} leaves {room}"
        )
    return request.max_tokens


def _prompt(tokenizer: Tokenizer, request: Request) -> list[int]:
    check_text(request.text)
    if request.is_raw:
        return tokenizer.encode_prompt(request.text)
    if not tokenizer.has_chat_template:
        raise SetupError("this model has no chat template; continue a text instead, by --raw")
    return tokenizer.encode_chat([("user", request.text)])


def tokens(
    engine: Engine,
    submit: Submit,
    summary: Summary,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[int]:
    """The answer of an engine that does nothing else, with its figures in the summary; it ends
    early before a step that finds `is_stopped`. Raises the `MirrorError` of what failed."""
    begin = time.perf_counter()
    count = 0
    engine.add(submit)
    while engine.has_work:
        if is_stopped():
            engine.abort(submit.request_id)
            summary.usage = SequenceUsage(prompt_tokens=len(submit.prompt), completion_tokens=count)
        for output in engine.step():
            match output:
                case Chunk(tokens=new):
                    summary.first_token_s = summary.first_token_s or time.perf_counter() - begin
                    count += len(new)
                    yield from new
                case Finished(usage=usage):
                    summary.usage = usage
                case Failed(code=code, message=message):
                    raise BY_CODE.get(code, InternalError)(message)
    summary.total_s = time.perf_counter() - begin


def load_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of the configured model. Raises `ModelError`."""
    with tempfile.TemporaryDirectory(prefix="mirror-sd-") as directory:
        tokenizer_files.export(model_store.resolve(config.model.path), Path(directory))
        return Tokenizer.from_directory(Path(directory))


def open_input() -> TextIO:
    """Standard input that lets through what is not UTF-8, for `check_text` to refuse: by default
    it depends on the locale whether reading fails."""
    # Once: after the first read it cannot be set again.
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors != "surrogateescape":
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin


def check_text(text: str) -> None:
    """Raises `InvalidRequest` for bytes of a terminal, a pipe or an argument that are no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text is not UTF-8: there is a stray byte after {error.start} characters"
        ) from error


def to_terminal(text: str) -> None:
    """Write to standard output at once, however it is buffered."""
    sys.stdout.write(text)
    sys.stdout.flush()
