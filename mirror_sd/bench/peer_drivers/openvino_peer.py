"""OpenVINO GenAI: `LLMPipeline` for one prompt, `ContinuousBatchingPipeline` for several."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

from .session import Driver, Timeline

CACHE_GB = 1


def openvino_peer(streams: int, **options: Any) -> Driver:
    """The driver for so many prompts at once."""
    if streams == 1:
        return SinglePeer(**options)
    return BatchPeer(streams=streams, **options)


class _Pipeline:
    """What both have in common. Prefixes are not kept: the same prompts come again each turn."""

    def __init__(self, threads: int, stop: Sequence[int], lookup: int) -> None:
        self.numpy: Any = importlib.import_module("numpy")
        self.openvino: Any = importlib.import_module("openvino")
        self.genai: Any = importlib.import_module("openvino_genai")
        self.properties = {"INFERENCE_NUM_THREADS": threads}
        if lookup:
            self.properties["prompt_lookup"] = True
        self.scheduler = self.genai.SchedulerConfig()
        self.scheduler.cache_size = CACHE_GB
        self.scheduler.enable_prefix_caching = False
        self._stop = set(stop)
        self._lookup = {"num_assistant_tokens": lookup, "max_ngram_size": 3} if lookup else {}

    def configuration(self, max_tokens: int) -> Any:
        return self.genai.GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=min(self._stop),
            stop_token_ids=self._stop,
            **self._lookup,
        )

    def tensor(self, prompt: Sequence[int]) -> Any:
        return self.openvino.Tensor(self.numpy.array([prompt], dtype=self.numpy.int64))


class SinglePeer:
    def __init__(self, model: str, threads: int, stop: Sequence[int], lookup: int = 0) -> None:
        self._shared = shared = _Pipeline(threads, stop, lookup)
        self._pipeline = shared.genai.LLMPipeline(
            model, "CPU", scheduler_config=shared.scheduler, **shared.properties
        )

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Timeline]:
        configuration = self._shared.configuration(max_tokens)
        return [self._answer(prompt, configuration) for prompt in prompts]

    def _answer(self, prompt: Sequence[int], configuration: Any) -> Timeline:
        times: list[float] = []
        go_on = self._shared.genai.StreamingStatus.RUNNING

        class Clock(self._shared.genai.StreamerBase):  # type: ignore[misc, name-defined]
            def write(self, token: Any) -> Any:
                count = len(token) if isinstance(token, list) else 1
                times.extend([time.perf_counter()] * count)
                return go_on

            def end(self) -> None:
                pass

        tensor = self._shared.tensor(prompt)
        start = time.perf_counter()
        self._pipeline.generate(tensor, configuration, Clock())
        return start, times


class BatchPeer:
    """A next prompt is added in the step after one has ended."""

    def __init__(
        self, model: str, threads: int, streams: int, stop: Sequence[int], lookup: int = 0
    ) -> None:
        self._shared = shared = _Pipeline(threads, stop, lookup)
        self._pipeline = shared.genai.ContinuousBatchingPipeline(
            model, shared.scheduler, "CPU", shared.properties
        )
        self._streams = streams
        self._requests = 0

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Timeline]:
        configuration = self._shared.configuration(max_tokens)
        answers: list[Timeline] = []
        waiting = list(prompts)[::-1]
        running: list[tuple[Any, Timeline]] = []
        while waiting or running:
            while waiting and len(running) < self._streams:
                tensor = self._shared.tensor(waiting.pop())
                answers.append((time.perf_counter(), []))
                handle = self._pipeline.add_request(self._requests, tensor, configuration)
                self._requests += 1
                running.append((handle, answers[-1]))
            self._pipeline.step()
            running = self._read(running)
        return answers

    def _read(self, running: list[tuple[Any, Timeline]]) -> list[tuple[Any, Timeline]]:
        """Note what the step gave; those that go on."""
        now = time.perf_counter()
        going = self._shared.genai.GenerationStatus.RUNNING
        kept = []
        for handle, answer in running:
            while handle.can_read():
                for output in handle.read().values():
                    answer[1].extend([now] * len(output.generated_ids))
            if handle.get_status() == going:
                kept.append((handle, answer))
        return kept
