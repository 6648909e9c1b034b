"""llama-cpp-python: `Llama.generate` for one prompt, one `llama_decode` a step for several."""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .session import Driver, Timeline


def llamacpp_peer(streams: int, **options: Any) -> Driver:
    """The driver for so many prompts at once."""
    if streams == 1:
        return SinglePeer(**options)
    if options.pop("lookup", 0):
        raise ValueError("prompt lookup in llama-cpp-python takes one sequence at a time")
    return BatchPeer(streams=streams, **options)


class SinglePeer:
    """The high-level API, flash attention on."""

    def __init__(
        self, model: str, threads: int, stop: Sequence[int], context: int, lookup: int = 0
    ) -> None:
        llama_cpp: Any = importlib.import_module("llama_cpp")
        draft = None
        if lookup:
            speculative: Any = importlib.import_module("llama_cpp.llama_speculative")
            draft = speculative.LlamaPromptLookupDecoding(num_pred_tokens=lookup)
        self._llama = llama_cpp.Llama(
            model,
            n_ctx=context,
            draft_model=draft,
            flash_attn=True,
            verbose=False,
            n_threads=threads,
            n_threads_batch=threads,
        )
        self._stop = frozenset(stop)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Timeline]:
        return [self._answer(list(prompt), max_tokens) for prompt in prompts]

    def _answer(self, prompt: list[int], max_tokens: int) -> Timeline:
        self._llama.reset()
        start = time.perf_counter()
        times: list[float] = []
        for token in self._llama.generate(prompt, top_k=1, temp=0.0):
            times.append(time.perf_counter())
            if token in self._stop or len(times) == max_tokens:
                break
        return start, times


@dataclass(slots=True)
class _Sequence:
    """`length` tokens are in the cache; `token` is the next to go in."""

    answer: Timeline
    length: int
    token: int


class BatchPeer:
    """The low-level API: unified KV cache and flash attention, without which a step of 16
    sequences takes 1.8 times as long. A prompt is read by itself when a sequence is free."""

    def __init__(
        self, model: str, threads: int, streams: int, stop: Sequence[int], context: int
    ) -> None:
        self._lib: Any = importlib.import_module("llama_cpp")
        self._numpy: Any = importlib.import_module("numpy")
        lib = self._lib
        silence(lib)
        lib.llama_backend_init()
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = context * streams, context, streams
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified, params.flash_attn_type = True, 1
        self._model = lib.llama_model_load_from_file(
            model.encode(), lib.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp has no memory for {streams} x {context} tokens")
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(context, 0, 1)
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._streams, self._stop = streams, frozenset(stop)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Timeline]:
        self._lib.llama_memory_clear(self._memory, True)
        answers: list[Timeline] = []
        waiting = list(prompts)[::-1]
        running: dict[int, _Sequence] = {}
        while waiting or running:
            for slot in set(range(self._streams)) - set(running):
                if waiting:
                    running[slot] = self._begin(slot, waiting.pop())
                    answers.append(running[slot].answer)
            self._drop_ended(running, max_tokens)
            if running:
                self._step(running)
                self._drop_ended(running, max_tokens)
        return answers

    def _begin(self, slot: int, prompt: Sequence[int]) -> _Sequence:
        start, last = time.perf_counter(), len(prompt) - 1
        chosen = self._decode([(t, i, slot, i == last) for i, t in enumerate(prompt)])
        return _Sequence((start, [time.perf_counter()]), len(prompt), chosen[slot])

    def _step(self, running: dict[int, _Sequence]) -> None:
        chosen = self._decode([(s.token, s.length, slot, True) for slot, s in running.items()])
        now = time.perf_counter()
        for slot, sequence in running.items():
            sequence.answer[1].append(now)
            sequence.token = chosen[slot]
            sequence.length += 1

    def _drop_ended(self, running: dict[int, _Sequence], max_tokens: int) -> None:
        for slot, sequence in list(running.items()):
            if sequence.token in self._stop or len(sequence.answer[1]) >= max_tokens:
                self._lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
                del running[slot]

    def _decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> dict[int, int]:
        """One forward over (token, position, sequence, wanted); greedy tokens of the wanted."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, is_wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if self._lib.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        wanted = [(i, entry[2]) for i, entry in enumerate(entries) if entry[3]]
        return {sequence: self._greedy(i) for i, sequence in wanted}

    def _greedy(self, row: int) -> int:
        pointer = self._lib.llama_get_logits_ith(self._context, row)
        logits = self._numpy.ctypeslib.as_array(pointer, shape=(self._vocabulary,))
        return int(logits.argmax())


def silence(lib: Any) -> None:
    """Stop llama.cpp from logging (its quantiser prints thousands of lines)."""
    callback = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(callback, ctypes.c_void_p(0))
    _callbacks.append(callback)


# llama.cpp calls it as long as the process lives.
_callbacks: list[Any] = []
