"""Does speculation, or company in the batch, ever change a greedy token? Count and show margins."""

from __future__ import annotations

from typing import Any

from mirror_sd.bench.decode import Prompt, greedy, run_engine
from mirror_sd.engine import Engine
from mirror_sd.messages import Chunk, SamplingParams, Submit


def compare(
    engine: Engine, prompts: list[Prompt], *, max_tokens: int, stop: tuple[int, ...]
) -> dict[str, Any]:
    """Plain decoding alone against speculative decoding alone and 16 at once.

    A flip is the first differing token of an answer; its margin is the plain run's log-probability
    gap between the two best tokens there.
    """
    params = greedy(max_tokens, stop, speculation=False)
    plain = run_engine(engine, prompts, params, tag="plain").tokens
    report: dict[str, Any] = {"prompts": len(prompts), "tokens": sum(map(len, plain)), "flips": []}
    for name, concurrency, speculation in (
        ("speculative", 1, True),
        ("plain, 16 at once", 16, False),
        ("speculative, 16 at once", 16, True),
    ):
        found = run_engine(
            engine,
            prompts,
            greedy(max_tokens, stop, speculation=speculation),
            concurrency=concurrency,
            tag=f"{name}",
        ).tokens
        for index, (ours, theirs) in enumerate(zip(plain, found, strict=True)):
            if ours != theirs:
                at = _first_difference(ours, theirs)
                margin = _margin(engine, prompts[index], ours[:at])
                report["flips"].append(
                    {"run": name, "prompt": index, "token": at, "margin": margin}
                )
    return report


def _first_difference(ours: list[int], theirs: list[int]) -> int:
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def _margin(engine: Engine, prompt: Prompt, prefix: list[int]) -> float | None:
    params = SamplingParams(
        max_tokens=len(prefix) + 1, seed=0, temperature=0.0, logprobs=2, speculation=False
    )
    engine.add(
        Submit(
            request_id="margin-0",
            model=engine.model_name,
            prompt=prompt,
            delivered=tuple(prefix),
            params=params,
        )
    )
    margin = None
    while engine.has_work:
        for output in engine.step():
            if isinstance(output, Chunk) and output.logprobs:
                (_, first), (_, second) = output.logprobs[0].top
                margin = first - second
    return margin
