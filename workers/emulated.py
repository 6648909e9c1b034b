"""An engine that computes nothing: it speaks the worker's protocol at the pace of a profile.

For machines that lack a device class, and for measuring everything around the engines. Whatever it
says of itself says that it is emulated.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from mirror_sd import telemetry
from mirror_sd.backends.protocol import Capabilities
from mirror_sd.config import Config
from mirror_sd.engine_stats import EngineStats
from mirror_sd.errors import ContextLengthExceeded, InvalidRequest, ModelError
from mirror_sd.messages import (
    Chunk,
    DeviceHealth,
    Finished,
    SequenceUsage,
    Submit,
    TokenLogprob,
)
from mirror_sd.run_dir import RunDir
from workers import emulated_text, profile
from workers.emulated_device import ControlFile, EmulatedDevice
from workers.emulated_text import EmulatedText
from workers.link import Outbound
from workers.profile import Profile

_log = logging.getLogger(__name__)

NAME = "emulated"
# An answer ends by itself here, as those of models do, where the client sets no limit.
ANSWER_TOKENS = 512
_SLOW_START_S = 10.0
_HANG_POLL_S = 0.05


@dataclass(slots=True, eq=False)
class _Sequence:
    """`unread` prompt tokens are still to be prefilled; `position` tokens of the answer exist."""

    submit: Submit
    start: int
    position: int
    unread: int

    @property
    def length(self) -> int:
        return len(self.submit.prompt) + self.position


class EmulatedEngine:
    """The `Engine` of `workers.report`; `wait` sleeps for some seconds, `crash` ends the process.

    Several instances in several processes of a class share its control file.
    """

    def __init__(
        self,
        profile: Profile,
        text: EmulatedText,
        device: EmulatedDevice,
        capabilities: Capabilities,
        *,
        model_name: str,
        device_class: str,
        slots: int,
        prefill_chunk: int,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
        crash: Callable[[], object] = lambda: os.kill(os.getpid(), signal.SIGKILL),
    ) -> None:
        self.capabilities = capabilities
        self.model_name = model_name
        self.slots = min(slots, profile.max_batch)
        self.max_context = capabilities.max_context
        self._profile = profile
        self._text = text
        self._device = device
        self._prefill_chunk = prefill_chunk
        self._block_size = block_size
        self._blocks = -(-self.max_context // block_size) * self.slots
        self._clock = clock
        self._wait = wait
        self._crash = crash
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[str, _Sequence] = {}
        self._due = clock()
        self._steps = 0
        self._tokens = 0
        self._slowdown = 1.0
        self._step_seconds = telemetry.STEP_SECONDS.labels(device_class)
        self._batch = telemetry.BATCH_SEQUENCES.labels(device_class)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, submit: Submit) -> None:
        """Queue a sequence. Raises `InvalidRequest` if it can never run here."""
        if submit.model != self.model_name:
            raise InvalidRequest(
                f"this worker serves {self.model_name!r}, not {submit.model!r}", param="model"
            )
        if not submit.prompt or submit.params.max_tokens < 1:
            raise InvalidRequest("a prompt and max_tokens of 1 or more are needed")
        if len(submit.prompt) >= self.max_context:
            raise ContextLengthExceeded(
                f"the prompt has {len(submit.prompt)} tokens; the context of {self.max_context}"
                " must leave room for an answer"
            )
        delivered = len(submit.delivered)
        self._waiting.append(
            _Sequence(
                submit,
                self._text.start(submit.prompt),
                position=delivered,
                unread=len(submit.prompt) + delivered,
            )
        )

    def abort(self, request_id: str) -> None:
        """Drop a sequence; an unknown id is ignored."""
        if self._running.pop(request_id, None) is None:
            self._waiting = deque(s for s in self._waiting if s.submit.request_id != request_id)

    def hint(self, request_id: str, index: int, tokens: tuple[int, ...]) -> None:
        """Nothing is drafted here."""

    def step(self) -> list[Outbound]:
        """Admit, let the time of a step pass, return a token of each sequence that is read."""
        self._slowdown = self._obey()
        self._device.begin_step()
        while self._waiting and len(self._running) < self.slots:
            sequence = self._waiting.popleft()
            self._running[sequence.submit.request_id] = sequence
        read = self._prefill()
        self._pass(self._profile.step_s(read) * self._slowdown)
        outputs: list[Outbound] = []
        for sequence in list(self._running.values()):
            if sequence.unread == 0:
                outputs.extend(self._advance(sequence))
        self._steps += 1
        self._device.end_step()
        return outputs

    def stats(self) -> EngineStats:
        used = sum(-(-s.length // self._block_size) for s in self._running.values())
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_blocks_used=used,
            kv_blocks_free=max(self._blocks - used, 0),
            steps=self._steps,
            tokens=self._tokens,
            pace=self._profile.pace(self._slowdown),
        )

    def health(self) -> DeviceHealth:
        """The device as the model and the control file have it; ends the process on "crash"."""
        if self._device.control.fault == "crash":
            self._crash()
        sequences = list(self._running.values())
        used = sum(-(-s.length // self._block_size) for s in sequences)
        return self._device.health(memory_pressure=min(used / self._blocks, 1.0))

    def idle(self) -> None:
        """Nothing is to be looked after."""

    def check_integrity(self) -> None:
        """There is nothing that could leak."""

    def _obey(self) -> float:
        """Suffer the fault that is set; returns the factor on the latency."""
        control = self._device.control
        while control.fault == "hang":
            self._wait(_HANG_POLL_S)
            control = self._device.control
        if control.fault == "crash":
            self._crash()
        return control.latency_factor

    def _prefill(self) -> int:
        """Read of the prompts what one step may; returns how many tokens that were."""
        limit = self._prefill_chunk if self._profile.latency_ms > 0 else sys.maxsize
        read = 0
        for sequence in self._running.values():
            taken = min(sequence.unread, limit - read)
            sequence.unread -= taken
            read += taken
        return read

    def _pass(self, duration_s: float) -> None:
        """Wait until the step is over. Steps follow each other without a gap, so that the time
        that the loop takes between them does not slow the device."""
        now = self._clock()
        begin = self._due if 0 <= now - self._due < duration_s / 2 else now
        self._due = begin + duration_s
        if self._due > now:
            self._wait(self._due - now)
        self._step_seconds.observe(duration_s)
        self._batch.observe(len(self._running))

    def _advance(self, sequence: _Sequence) -> list[Outbound]:
        submit = sequence.submit
        if self._has_room(sequence):
            outputs: list[Outbound] = [self._chunk(sequence)]
            sequence.position += 1
            self._tokens += 1
        else:  # resumed after its last token
            outputs = []
        if not self._has_room(sequence):
            del self._running[submit.request_id]
            is_whole = sequence.position == ANSWER_TOKENS < submit.params.max_tokens
            outputs.append(
                Finished(
                    request_id=submit.request_id,
                    reason="stop" if is_whole else "length",
                    usage=SequenceUsage(
                        prompt_tokens=len(submit.prompt),
                        completion_tokens=sequence.position,
                        verify_rounds=sequence.position - len(submit.delivered),
                    ),
                )
            )
        return outputs

    def _has_room(self, sequence: _Sequence) -> bool:
        limit = min(sequence.submit.params.max_tokens, ANSWER_TOKENS)
        return sequence.position < limit and sequence.length < self.max_context

    def _chunk(self, sequence: _Sequence) -> Chunk:
        submit, params = sequence.submit, sequence.submit.params
        token = self._text.token(sequence.start, sequence.position)
        is_first = sequence.position == 0
        scored = None if params.logprobs is None else (TokenLogprob(token, 0.0),)
        prompt = None
        if params.prompt_logprobs and is_first:
            prompt = (None, *(TokenLogprob(id, 0.0) for id in submit.prompt[1:]))
        return Chunk(
            request_id=submit.request_id,
            index=sequence.position,
            tokens=(token,),
            logprobs=scored,
            prompt_logprobs=prompt,
        )


class _Facts(msgspec.Struct, frozen=True):
    name: str
    max_context: int
    vocab_size: int


def build(config: Config, run: RunDir, device_class: str) -> EmulatedEngine:
    """The emulated engine of a class; needs the tokenizer's files in the run directory, no model.

    Raises `ConfigError` or `ModelError`.
    """
    paces = profile.load(device_class, config.pool(device_class).emulation)
    try:
        facts = msgspec.json.decode((run.tokenizer / "model.json").read_bytes(), type=_Facts)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"cannot read the facts of the model: {error}") from error
    words = emulated_text.word_ids(run.tokenizer / "tokenizer.json", facts.vocab_size)
    own_limit = config.model.max_context or facts.max_context
    engine = EmulatedEngine(
        paces,
        EmulatedText(words),
        EmulatedDevice(ControlFile(run.emulation(device_class)), time.monotonic),
        Capabilities(
            name=NAME,
            device=f"emulated {device_class}",
            precision="none",
            vocab_size=facts.vocab_size,
            max_context=min(own_limit, facts.max_context),
            bit_stable=True,
            detail="computes nothing",
            is_emulated=True,
        ),
        model_name=config.model.served_name or facts.name,
        device_class=device_class,
        slots=config.scheduler.max_batch_size.of(device_class),
        prefill_chunk=config.engine.prefill_chunk,
        block_size=config.engine.block_size,
    )
    _suffer_start(ControlFile(run.emulation(device_class)), time.sleep)
    _log.warning(
        "the class %s is emulated: no answer of this worker is a model's; %g ms a step, batches of"
        " up to %d",
        device_class,
        paces.latency_ms,
        engine.slots,
    )
    return engine


def _suffer_start(file: ControlFile, wait: Callable[[float], object]) -> None:
    fault = file.read().fault
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "slow_start":
        wait(_SLOW_START_S)
