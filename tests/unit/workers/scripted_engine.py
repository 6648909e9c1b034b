"""An engine that makes one token a step for each sequence, from nothing but its position."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mirror_sd.backends.protocol import Capabilities
from mirror_sd.engine_stats import EngineStats
from mirror_sd.errors import ContextLengthExceeded
from mirror_sd.messages import Chunk, DeviceHealth, Failed, Finished, SequenceUsage, Submit

POISON = 13


class ScriptedEngine:
    model_name = "scripted"
    slots = 4
    max_context = 100
    capabilities = Capabilities("scripted", "cpu", "fp32", 1000, 100, True)

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s
        self.running: dict[str, tuple[Submit, int]] = {}
        self.steps = 0
        self.hints: list[tuple[str, int, tuple[int, ...]]] = []
        self.integrity_checks = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add(self, submit: Submit) -> None:
        if len(submit.prompt) > self.max_context:
            raise ContextLengthExceeded("too long for this worker")
        self.running[submit.request_id] = (submit, len(submit.delivered))

    def abort(self, request_id: str) -> None:
        self.running.pop(request_id, None)

    def hint(self, request_id: str, index: int, tokens: tuple[int, ...]) -> None:
        self.hints.append((request_id, index, tokens))

    def step(self) -> Sequence[Chunk | Finished | Failed]:
        time.sleep(self.step_s)
        self.steps += 1
        outputs: list[Chunk | Finished | Failed] = []
        for request_id, (submit, position) in list(self.running.items()):
            if POISON in submit.prompt:
                raise RuntimeError("the engine stumbled")
            outputs.append(Chunk(request_id=request_id, index=position, tokens=(position,)))
            self.running[request_id] = (submit, position + 1)
            if position + 1 == submit.params.max_tokens:
                outputs.append(
                    Finished(request_id=request_id, reason="length", usage=SequenceUsage())
                )
                del self.running[request_id]
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(len(self.running), 0, len(self.running), 10, self.steps)

    def health(self) -> DeviceHealth:
        return DeviceHealth(temperature_c=41.5)

    def idle(self) -> None:
        """Nothing is to be looked after."""

    def check_integrity(self) -> None:
        self.integrity_checks += 1
