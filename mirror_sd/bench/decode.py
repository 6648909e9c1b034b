"""Decoding speed without HTTP: our engine, plain and speculative, and transformers beside it."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mirror_sd.engine import Engine
from mirror_sd.messages import Chunk, Failed, Finished, SamplingParams, SequenceUsage, Submit

Prompt = tuple[int, ...]


@dataclass(slots=True)
class Run:
    """Token times (seconds, `time.perf_counter`) per prompt, in the order of the prompts."""

    tokens: list[list[int]]
    first_s: list[float]
    decode_s: float
    decoded: int
    usages: list[SequenceUsage]

    def row(self) -> dict[str, Any]:
        """The figures of `bench decode`; decoding speed counts from the first token on."""
        rounds = sum(usage.verify_rounds for usage in self.usages)
        emitted = sum(len(tokens) for tokens in self.tokens)
        speed = self.decoded / self.decode_s if self.decode_s else 0.0
        return {
            "tok_s": round(speed, 1),
            "ms_per_token": round(1e3 / speed, 2) if speed else None,
            "accepted_per_verify": round(emitted / rounds, 3) if rounds else None,
            "ttft_ms": round(1e3 * statistics.mean(self.first_s), 1),
            "tokens": emitted,
        }


def run_engine(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    speculation: bool,
    stop: tuple[int, ...],
    concurrency: int = 1,
    tag: str = "bench",
) -> Run:
    """Greedy answers to `prompts`, `concurrency` at a time; the next wave starts when one ends."""
    run = Run([[] for _ in prompts], [0.0] * len(prompts), 0.0, 0, [])
    for start in range(0, len(prompts), concurrency):
        wave = range(start, min(start + concurrency, len(prompts)))
        begin = time.perf_counter()
        for index in wave:
            params = SamplingParams(
                max_tokens=max_tokens,
                seed=0,
                temperature=0.0,
                stop_token_ids=stop,
                speculation=speculation,
            )
            engine.add(
                Submit(
                    request_id=f"{tag}-{index}",
                    model=engine.model_name,
                    prompt=prompts[index],
                    params=params,
                )
            )
        _drive(engine, run, begin, len(wave))
    return run


def _drive(engine: Engine, run: Run, begin: float, count: int) -> None:
    all_begun: float | None = None
    begun = 0
    now = begin
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            index = int(output.request_id.rpartition("-")[2])
            if isinstance(output, Chunk):
                if not run.tokens[index]:
                    run.first_s[index] = now - begin
                    begun += 1
                if all_begun is not None:
                    run.decoded += len(output.tokens)
                run.tokens[index].extend(output.tokens)
            elif isinstance(output, Finished):
                run.usages.append(output.usage)
            elif isinstance(output, Failed):
                raise RuntimeError(f"{output.request_id}: {output.message}")
        if all_begun is None and begun == count:
            all_begun = now
    if all_begun is not None:
        run.decode_s += now - all_begun


class TransformersPeer:
    """`transformers.generate`, greedy, one prompt at a time, on the same weights."""

    def __init__(self, model: Any, stop: tuple[int, ...]) -> None:
        self._model = model
        self._stop = stop

    @classmethod
    def load(cls, files: Any, precision: str, threads: int, stop: tuple[int, ...]) -> Any:
        """`files` is a `model_store.ModelFiles`; precision "bf16" or "fp32"."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        where = (
            {"pretrained_model_name_or_path": files.path.parent, "gguf_file": files.path.name}
            if files.format == "gguf"
            else {"pretrained_model_name_or_path": files.path}
        )
        loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        # A GGUF may come with packed weights, which are slower here: give it plain ones.
        if hasattr(loaded.config, "quantization_config"):
            del loaded.config.quantization_config
        plain = type(loaded)(loaded.config)
        plain.load_state_dict(loaded.state_dict())
        plain.tie_weights()
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
        return cls(plain.to(dtype).eval(), stop)

    def run(self, prompts: Sequence[Prompt], *, max_tokens: int) -> Run:
        import torch
        from transformers.generation.streamers import BaseStreamer

        times: list[float] = []

        class Clock(BaseStreamer):  # type: ignore[misc]
            def put(self, value: Any) -> None:
                times.append(time.perf_counter())

            def end(self) -> None:
                pass

        run = Run([], [], 0.0, 0, [])
        for prompt in prompts:
            times.clear()
            begin = time.perf_counter()
            ids = torch.tensor([prompt])
            out = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=list(self._stop),
                pad_token_id=self._stop[0],
                streamer=Clock(),
            )
            tokens = out[0, len(prompt) :].tolist()
            run.tokens.append([t for t in tokens if t not in self._stop])
            run.first_s.append(times[1] - begin)  # the first put is the prompt
            run.decode_s += times[-1] - times[1]
            run.decoded += len(times) - 2
        return run


def peak_rss_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
