"""transformers: `generate()`, in bfloat16 unless told otherwise, plain or with its lookup."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

from .session import Timeline


class TransformersPeer:
    """Several prompts are padded on the left into one batch; the next starts when all are done.

    `tokens` are those of the last answers, the stop token included.
    """

    def __init__(
        self,
        model: str,
        threads: int,
        streams: int,
        stop: Sequence[int],
        lookup: int = 0,
        dtype: str = "bfloat16",
    ) -> None:
        if lookup and streams > 1:
            raise ValueError("prompt lookup in transformers takes one sequence at a time")
        self._torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        self._torch.set_num_threads(threads)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(self._torch, dtype)
        )
        self._model = loaded.eval()
        self.tokens: list[list[int]] = []
        self._streams = streams
        self._stop = list(stop)
        self._options = {"prompt_lookup_num_tokens": lookup} if lookup else {}

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Timeline]:
        answers: list[Timeline] = []
        self.tokens = []
        for first in range(0, len(prompts), self._streams):
            answers += self._batch(prompts[first : first + self._streams], max_tokens)
        return answers

    def _batch(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Timeline]:
        torch, pad = self._torch, self._stop[0]
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        clock = _Clock(len(prompts))
        start = time.perf_counter()
        out = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=self._stop,
            pad_token_id=pad,
            streamer=clock,
            **self._options,
        )
        rows = [row[: self._length(row)] for row in out[:, width:].tolist()]
        self.tokens += rows
        return [(start, clock.times[: len(row)]) for row in rows]

    def _length(self, row: list[int]) -> int:
        ends = [index + 1 for index, token in enumerate(row) if token in self._stop]
        return ends[0] if ends else len(row)


class _Clock:
    """A streamer of transformers: `times` are those of a row's tokens, the prompt left out."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._has_prompt = False
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.times += [time.perf_counter()] * (value.numel() // self._rows)

    def end(self) -> None:
        pass
