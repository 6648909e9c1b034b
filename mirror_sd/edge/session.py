"""A model, its drafts and their verification in this process, for one conversation."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mirror_sd import config, draft_store, model_store, offline
from mirror_sd.api.detokeniser import detokeniser
from mirror_sd.backends import draft_registry
from mirror_sd.backends.onnx import providers
from mirror_sd.backends.protocol import Backend, DraftHead
from mirror_sd.config import Config
from mirror_sd.engine import Engine
from mirror_sd.engine_backend import create_backend
from mirror_sd.errors import ContextLengthExceeded, SetupError
from mirror_sd.messages import SamplingParams, Submit
from mirror_sd.offline import Summary
from mirror_sd.speculative.sampler import open_chooser
from mirror_sd.speculative.sampling import TokenChooser
from mirror_sd.speculative.typical import TypicalChooser
from mirror_sd.uir.draft_file import DraftProgram

Message = tuple[str, str]
_CLASS = "cpu"
# The native kernels multiply no halves.
_TARGET_PRECISIONS = {"fp16": "bf16"}
# Most of the context, one part in so many, that earlier messages leave to an answer.
_ANSWER_PART = 4


@dataclass(frozen=True, slots=True)
class Options:
    """draft_engine: a provider of ONNX Runtime, or None for a draft head beside the target.
    max_length: longest answer in tokens. precision: auto is what the target's engine has, int8 for
    a draft on ONNX Runtime. is_typical: typical acceptance instead of equality."""

    draft_engine: str | None = None
    max_length: int = 256
    precision: str = "auto"
    is_typical: bool = False
    temperature: float = 0.0
    seed: int | None = None
    model: str | None = None
    threads: int | None = None

    def config(self) -> Config:
        """Raises `ConfigError`."""
        asked = None if self.precision == "auto" else self.precision
        settings = {
            f"pools.{_CLASS}.precision": asked and _TARGET_PRECISIONS.get(asked, asked),
            f"pools.{_CLASS}.threads": self.threads,
            "scheduler.max_batch_size.CPU": 1,
            "model.path": self.model,
        }
        return config.load(
            None, [f"{key}={json.dumps(value)}" for key, value in settings.items() if value]
        )


class EdgeSession:
    """One answer at a time. The constructor loads the model: seconds.

    It raises `ConfigError` where the draft's provider is absent, before anything is loaded, and
    `ModelError`.
    """

    def __init__(self, options: Options) -> None:
        if options.draft_engine is not None:
            providers.find(options.draft_engine)
        begin = time.perf_counter()
        self._options = options
        settings = options.config()
        self._files = model_store.resolve(settings.model.path)
        self._tokenizer = offline.load_tokenizer(settings)
        if not self._tokenizer.has_chat_template:
            raise SetupError(
                f"{self._files.name} has no chat template, so there is no talking to it"
            )
        backend = create_backend(settings, _CLASS)
        self._target = backend.capabilities
        self._head = draft_store.open_head(
            settings, self._files, _CLASS, lambda program: self._lower(program, backend)
        )
        self._typical: TypicalChooser | None = None
        self.engine = Engine(
            backend,
            settings.engine,
            settings.speculation,
            model_name=self._files.name,
            device_class=_CLASS,
            slots=1,
            head=self._head,
            choosers=self._chooser,
        )
        self.engine.warm_up()
        self._load_s = time.perf_counter() - begin
        self._answers = 0
        self._is_stopped = False
        self.summary = Summary(load_s=self._load_s, seed=0)

    def _lower(self, program: DraftProgram, backend: Backend) -> DraftHead:
        options = self._options
        threads = options.threads or len(os.sched_getaffinity(0))
        if options.draft_engine is None:
            return draft_registry.create(backend, program, threads=threads)
        return draft_registry.create_on_onnxruntime(
            backend.capabilities,
            self._files,
            program,
            provider=options.draft_engine,
            precision=options.precision,
            threads=threads,
        )

    def _chooser(self, params: SamplingParams, delivered: Iterable[int]) -> TokenChooser:
        exact = open_chooser(params, delivered)
        if not self._options.is_typical:
            return exact
        self._typical = TypicalChooser(exact, params)
        return self._typical

    def notices(self) -> Iterator[str]:
        """What the user must know before the first answer."""
        options = self._options
        if options.is_typical:
            yield (
                "mirror-sd: the safety check is off: drafts that the model finds likely are kept"
                " without being its choice, so answers may differ from the model's own"
            )
        if options.draft_engine is not None and self._head is None:
            yield (
                f"mirror-sd: there is no draft head for {self._files.name} to run on"
                f" {options.draft_engine}; drafts come from the text itself"
            )
        if options.precision not in ("auto", self._target.precision):
            yield (
                f"mirror-sd: the target computes in {self._target.precision},"
                f" as its engine, {self._target.name}, has no {options.precision}"
            )

    def describe(self) -> str:
        """The parts, for a person."""
        where = self._options.draft_engine
        head = self._target.name if where is None else f"onnxruntime on {where}"
        if self._head is None:
            head = "none"
        return (
            f"{self._files.name} on {self._target.name} in {self._target.precision},"
            f" draft head: {head}"
        )

    def describe_answer(self) -> str:
        """Figures of the last answer."""
        text = self.summary.describe()
        if self._typical is not None:
            text += f"; {self._typical.departures} tokens are not the model's own choice"
        return text

    def stop(self) -> None:
        """End the answer that is being given, after the step that runs. From a signal handler."""
        self._is_stopped = True

    @property
    def is_stopped(self) -> bool:
        """Whether the last answer was ended by `stop`."""
        return self._is_stopped

    def fitting(self, messages: Sequence[Message]) -> list[Message]:
        """The latest of the messages that leave room for an answer; oldest pairs go first.

        Raises `ContextLengthExceeded` where the last alone leaves none, `InvalidRequest` where it
        is no text.
        """
        offline.check_text(messages[-1][1])
        kept, context = list(messages), self.engine.max_context
        room = min(self._options.max_length, context // _ANSWER_PART)
        while len(kept) > 1:
            if len(self._tokenizer.encode_chat(kept)) + room <= context:
                return kept
            del kept[:2]
        length = len(self._tokenizer.encode_chat(kept))
        if length >= context:
            raise ContextLengthExceeded(
                f"a text of {length} tokens; the context of {context} must leave room for an answer"
            )
        return kept

    def answer(self, messages: Sequence[Message], show: Callable[[str], None]) -> str:
        """Stream the answer to the last of the messages to `show`, and return it whole.

        Raises the `MirrorError` of what failed, `ContextLengthExceeded`.
        """
        prompt = self._tokenizer.encode_chat(self.fitting(messages))
        seed = secrets.randbits(31) if self._options.seed is None else self._options.seed
        self.summary = Summary(load_s=self._load_s, seed=seed)
        self._is_stopped = False
        self._answers += 1
        submit = Submit(
            request_id=f"edge-{self._answers}",
            model=self.engine.model_name,
            prompt=tuple(prompt),
            params=SamplingParams(
                max_tokens=min(self._options.max_length, self.engine.max_context - len(prompt)),
                seed=seed % 2**64,
                temperature=self._options.temperature,
                stop_token_ids=self._tokenizer.facts.eos_token_ids,
            ),
            device_class=_CLASS,
        )
        text = detokeniser(self._tokenizer.vocabulary, is_text_start=True)
        pieces = []
        answer = offline.tokens(self.engine, submit, self.summary, lambda: self._is_stopped)
        for token in answer:
            pieces.append(text.push(token))
            show(pieces[-1])
        pieces.append(text.finish())
        show(pieces[-1])
        return "".join(pieces)
