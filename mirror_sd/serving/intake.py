"""From a request body to the sequences that answer it: pure work, run off the event loop."""

from __future__ import annotations

import hashlib
import itertools
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from mirror_sd import __version__
from mirror_sd.api import body as bodies
from mirror_sd.api import schema
from mirror_sd.api.choice import Choice, Echo
from mirror_sd.api.detokeniser import TableDetokeniser, detokeniser
from mirror_sd.api.responses import ChatForm, CompletionForm, Envelope, Form
from mirror_sd.api.schema import CompletionRequest, Decoding, Prompt
from mirror_sd.api.stop_strings import StopStrings
from mirror_sd.api.tokenizer import Tokenizer
from mirror_sd.config import MergeConfig
from mirror_sd.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from mirror_sd.messages import SamplingParams, Submit
from mirror_sd.serving.merge_profiler import MergeProfiler

# OpenAI's default for /v1/completions; a chat fills the context instead.
_DEFAULT_COMPLETION_TOKENS = 16
_STANDARD_TIERS = ("default", "standard", "flex")
# From this step of the ladder of degradation on, standard answers are no longer than this.
CAPPING_LEVEL = 2
CAPPED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Caller:
    """What the edge says about a request. `tier` is "vip" or "standard", `degrade_level` the step
    of the ladder of degradation, 0 to 3, `draft_factor` how much drafting on other devices there
    may be, 0 to 1, `spare` the classes that are held back."""

    request_id: str
    device_class: str
    tier: str
    tenant: str
    degrade_level: int = 0
    draft_factor: float = 1.0
    spare: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedSequence:
    """One choice: what the broker is asked for and what turns its tokens into text."""

    submit: Submit
    choice: Choice
    prompt_index: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A request, ready to run. The sequences are in the order of their choice index. `is_capped`:
    degradation has made `max_tokens` smaller."""

    caller: Caller
    tier: str
    envelope: Envelope
    form: Form
    decoding: Decoding
    sequences: tuple[PlannedSequence, ...]
    is_capped: bool


@dataclass(frozen=True, slots=True)
class _EncodedPrompt:
    """`messages` is the text, of (role, content), None where the client sent ids."""

    ids: tuple[int, ...]
    max_tokens: int
    messages: list[tuple[str, str]] | None
    echo: Echo | None = None


class Intake:
    """Validates and tokenises for one served model. Thread-safe.

    `max_context` is in tokens, prompt and completion together; `timeout_s` is the longest life of
    a request.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: str,
        max_context: int,
        timeout_s: float,
        merge: MergeConfig,
    ) -> None:
        self.model = model
        self.max_context = max_context
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s
        self._profiler = MergeProfiler(model, merge)
        # Of this process alone, and cheaper than asking the kernel for each.
        self._prefix = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._random = random.Random(secrets.randbits(128))
        facts = msgspec.json.encode([__version__, model, tokenizer.facts])
        self._fingerprint = "fp_" + hashlib.blake2b(facts, digest_size=5).hexdigest()

    @property
    def is_prepared(self) -> bool:
        """Whether a plan takes no longer than its body's length makes it."""
        return self._profiler.is_prepared

    def prepare(self) -> None:
        """Make the first request as quick as the others; takes a second, call it in a thread."""
        self._profiler.prepare()

    def chat(self, body: bytes, caller: Caller) -> Plan:
        """The plan of a `/v1/chat/completions` body; raises a `RequestError`."""
        request = schema.read_chat(bodies.read_object(body), self._tokenizer.facts.vocab_size)
        self.check_model(request.model)
        messages = [(message.role, message.content) for message in request.messages]
        ids = tuple(self._tokenizer.encode_chat(messages, self.max_context, caller.tenant))
        limit = self._tokens_allowed(ids, request.decoding.max_tokens, None, "messages")
        form = ChatForm(
            self._tokenizer.vocabulary, with_logprobs=request.decoding.logprobs is not None
        )
        prompts = [_EncodedPrompt(ids, limit, messages)]
        return self._plan(caller, form, request.decoding, prompts, is_text_start=True)

    def completion(self, body: bytes, caller: Caller) -> Plan:
        """The plan of a `/v1/completions` body; raises a `RequestError`."""
        request = schema.read_completion(bodies.read_object(body), self._tokenizer.facts.vocab_size)
        self.check_model(request.model)
        prompts = [self._encode(prompt, request, caller) for prompt in request.prompts]
        form = CompletionForm(
            self._tokenizer.vocabulary, with_logprobs=request.decoding.logprobs is not None
        )
        return self._plan(caller, form, request.decoding, prompts, is_text_start=False)

    def check_model(self, name: str) -> None:
        """Raise `ModelNotFound` unless `name` is the served model."""
        if name != self.model:
            raise ModelNotFound(
                f"model: {bodies.shorten(name)} is not served here; the served model is "
                f"{bodies.shorten(self.model)}",
                param="model",
            )

    def _encode(self, prompt: Prompt, request: CompletionRequest, caller: Caller) -> _EncodedPrompt:
        if isinstance(prompt, str):
            ids = tuple(self._tokenizer.encode_prompt(prompt, self.max_context, caller.tenant))
        else:
            ids = prompt
        if not ids:
            raise InvalidRequest("prompt: expected some text, got none", param="prompt")
        limit = self._tokens_allowed(
            ids, request.decoding.max_tokens, _DEFAULT_COMPLETION_TOKENS, "prompt"
        )
        text = [("user", prompt)] if isinstance(prompt, str) else None
        echo = self._echo(prompt, ids) if request.echo else None
        return _EncodedPrompt(ids, limit, text, echo)

    def _echo(self, prompt: Prompt, ids: tuple[int, ...]) -> Echo:
        pieces = TableDetokeniser(
            self._tokenizer.vocabulary, is_text_start=True, with_specials=True
        )
        texts = [pieces.push(token) for token in ids]
        offsets = [0, *accumulate(map(len, texts))]
        text = "".join(texts) + pieces.finish()
        if isinstance(prompt, str):
            # A begin token that the client did not write is not part of the echo.
            unwritten = max(0, len(text) - len(prompt))
            offsets = [max(0, offset - unwritten) for offset in offsets]
            text = prompt
        return Echo(text, ids, tuple(offsets[:-1]))

    def _tokens_allowed(
        self, ids: Sequence[int], asked: int | None, default: int | None, param: str
    ) -> int:
        room = self.max_context - len(ids)
        if room < 1 or (asked is not None and asked > room):
            wanted = f"{'at least ' if room < 0 else ''}{len(ids)} in the {param}"
            if asked is not None:
                wanted += f" and {asked} to generate"
            raise ContextLengthExceeded(
                f"{param}: the context holds {self.max_context} tokens, prompt and completion "
                f"together; this request has {wanted}",
                param=param,
            )
        if asked is not None:
            return asked
        return room if default is None else min(default, room)

    def _plan(
        self,
        caller: Caller,
        form: Form,
        decoding: Decoding,
        prompts: Sequence[_EncodedPrompt],
        *,
        is_text_start: bool,
    ) -> Plan:
        tier = "standard" if decoding.service_tier in _STANDARD_TIERS else caller.tier
        cap = CAPPED_TOKENS if caller.degrade_level >= CAPPING_LEVEL and tier != "vip" else None
        name = f"{self._prefix}{next(self._numbers):08x}"
        now = time.time()
        template = Submit(
            request_id=name,
            model=self.model,
            prompt=(),
            params=self._sampling(decoding),
            device_class=caller.device_class,
            tier=tier,
            tenant=caller.tenant,
            received_at=now,
            timeout_s=self._timeout_s,
            degrade_level=caller.degrade_level,
            draft_factor=caller.draft_factor,
            spare=caller.spare,
        )
        sequences = [
            PlannedSequence(
                self._submit(template, prompt, index, decoding, cap),
                Choice(
                    index,
                    detokeniser(self._tokenizer.vocabulary, is_text_start=is_text_start),
                    StopStrings(decoding.stop),
                    prompt.echo,
                ),
                index // decoding.n,
            )
            for index, prompt in enumerate(p for p in prompts for _ in range(decoding.n))
        ]
        prefix = "chatcmpl" if form.kind == "chat.completion" else "cmpl"
        envelope = Envelope(
            id=f"{prefix}-{name}",
            kind=form.kind,
            created=int(now),
            model=self.model,
            system_fingerprint=self._fingerprint,
            service_tier="priority" if tier == "vip" else "default",
        )
        is_capped = cap is not None and any(prompt.max_tokens > cap for prompt in prompts)
        return Plan(caller, tier, envelope, form, decoding, tuple(sequences), is_capped)

    def _submit(
        self,
        template: Submit,
        prompt: _EncodedPrompt,
        index: int,
        decoding: Decoding,
        cap: int | None,
    ) -> Submit:
        """The submit of choice `index`, which is answer `index % n` to its prompt."""
        number = index % decoding.n
        params = msgspec.structs.replace(
            template.params,
            max_tokens=prompt.max_tokens if cap is None else min(prompt.max_tokens, cap),
            seed=(template.params.seed + number) % 2**64,
            prompt_logprobs=prompt.echo is not None and template.params.logprobs is not None,
        )
        return msgspec.structs.replace(
            template,
            request_id=f"{template.request_id}-{index}",
            prompt=prompt.ids,
            params=params,
            merge=self._profiler.profile(
                template.tenant,
                prompt.ids,
                params,
                # Further answers to a prompt are not worth a comparison of their own.
                messages=prompt.messages if number == 0 else None,
                is_seed_chosen=decoding.seed is not None,
            ),
        )

    def _sampling(self, decoding: Decoding) -> SamplingParams:
        # 53 bits: a drawn seed comes back in JSON, where some clients lose digits of larger ones.
        seed = self._random.getrandbits(53) if decoding.seed is None else decoding.seed
        return SamplingParams(
            max_tokens=1,
            seed=seed,
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            top_k=decoding.top_k,
            presence_penalty=decoding.presence_penalty,
            frequency_penalty=decoding.frequency_penalty,
            logit_bias=dict(decoding.logit_bias),
            stop_token_ids=self._tokenizer.facts.eos_token_ids,
            logprobs=decoding.logprobs,
            speculation=decoding.speculation.is_on,
            draft_source=decoding.speculation.source,
            draft_tokens=decoding.speculation.max_tokens,
        )
