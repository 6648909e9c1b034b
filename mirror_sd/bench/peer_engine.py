"""Our engine as one of the measured: started as `python -m mirror_sd.bench.peer_engine`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mirror_sd import config as configuration
from mirror_sd import draft_store, model_store
from mirror_sd import engine as engines
from mirror_sd.bench.decode import Run, joined, run_engine
from mirror_sd.bench.peer_drivers.session import Timeline, peak_rss_mb, serve
from mirror_sd.engine import Engine
from mirror_sd.errors import InternalError, ModelError
from mirror_sd.messages import SamplingParams

# The same prompts come again each turn: their KV must not be found again. A `--set` comes later.
_FIRST = ("engine.prefix_reuse=false",)


class EngineSession:
    """The engine of the first pool, as a worker builds it."""

    def __init__(self) -> None:
        self._loaded: Engine | None = None
        self._streams = 1
        self._stop: tuple[int, ...] = ()
        self._drafter = "off"

    def handlers(self) -> dict[str, Callable[..., Any]]:
        return {
            "load": self.load,
            "missing": self.missing,
            "generate": self.generate,
            "decode": self.decode,
            "decode_clusters": self.decode_clusters,
            "peak_rss_mb": peak_rss_mb,
        }

    def load(
        self,
        overrides: Sequence[str],
        threads: int,
        streams: int,
        stop: Sequence[int],
        drafter: str = "off",
    ) -> str:
        """Build the engine, which must be able to run `streams` sequences at once; its precision.
        `drafter` is that of `generate`."""
        config = configuration.load(overrides=[*_FIRST, *overrides])
        pool = next(iter(config.pools))
        if config.scheduler.max_batch_size.of(pool) < streams:
            size = f"scheduler.max_batch_size.{pool.upper()}={streams}"
            config = configuration.load(overrides=[*_FIRST, *overrides, size])
        self._config = config
        self._loaded = engines.build(config, pool, threads)
        self._streams, self._stop, self._drafter = streams, tuple(stop), drafter
        return self._loaded.capabilities.precision

    def missing(self, drafters: Sequence[str]) -> dict[str, str]:
        """Which of these sources of drafts the engine does not have, and why."""
        there = {"auto", *self._engine.draft_sources}
        return {name: self._reason(name) for name in drafters if name not in there}

    def _reason(self, drafter: str) -> str:
        config = self._config
        if not config.speculation.enabled:
            return "speculation.enabled is false"
        if drafter != "head":
            return "this engine has no such source of drafts"
        files = model_store.resolve(config.model.path)
        path = draft_store.find(config, files, self._engine.device_class)
        if path is None:
            return f"no draft ships for {files.name}, or speculation.draft asks for none"
        try:
            draft_store.load(path, files)
        except ModelError as error:
            return error.message
        return f"the {self._engine.capabilities.name} engine cannot draft with {path}"

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Timeline]:
        """The contract of `peer_drivers.session.Driver`."""
        run = self._run(prompts, self._params(max_tokens, self._drafter))
        return list(zip(run.starts, run.times, strict=True))

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        drafter: str = "off",
        temperature: float = 0.0,
    ) -> dict[str, Any]:
        """A row of `bench decode`; `answers` are the tokens of each prompt.

        What a run leaves in the history of requests is not seen by another run.
        """
        run = self._run(prompts, self._params(max_tokens, drafter, temperature))
        return self._row(run) | {"answers": run.tokens}

    def decode_clusters(
        self,
        prompts: Sequence[Sequence[int]],
        kinds: Sequence[str | None],
        tenants: Sequence[str],
        hints: Sequence[int | None],
        max_tokens: int,
        drafter: str = "off",
        temperature: float = 0.0,
    ) -> dict[str, Any]:
        """As `decode`, one prompt after the other. Those of a kind count, those of none only come
        before them; `kinds` of the row has the figures of each. `hints`: the prompt whose answer is
        handed to the engine as one that this one's may resemble."""
        params = self._params(max_tokens, drafter, temperature)
        tag = str(time.monotonic_ns())
        runs: list[Run] = []
        for index, prompt in enumerate(prompts):
            source = hints[index]
            run = run_engine(
                self._engine,
                [tuple(prompt)],
                msgspec.structs.replace(params, seed=index),
                tag=f"{tag}.{index}",
                tenant=f"{tag}-{tenants[index]}",
                hint=() if source is None else tuple(runs[source].tokens[0]),
            )
            runs.append(run)
        by_kind: dict[str, list[Run]] = {}
        for kind, run in zip(kinds, runs, strict=True):
            if kind is not None:
                by_kind.setdefault(kind, []).append(run)
        counted = [run for kind, run in zip(kinds, runs, strict=True) if kind is not None]
        shown = {kind: _figures(joined(found)) for kind, found in by_kind.items()}
        answers = [run.tokens[0] for run in runs]
        return self._row(joined(counted)) | {"kinds": shown, "answers": answers}

    def _row(self, run: Run) -> dict[str, Any]:
        return {
            "precision": self._engine.capabilities.precision,
            **_figures(run),
            "peak_rss_mb": peak_rss_mb(),
        }

    @property
    def _engine(self) -> Engine:
        if self._loaded is None:
            raise InternalError("nothing is loaded")
        return self._loaded

    def _params(self, max_tokens: int, drafter: str, temperature: float = 0.0) -> SamplingParams:
        is_off = drafter == "off"
        return SamplingParams(
            max_tokens=max_tokens,
            seed=0,
            temperature=temperature,
            stop_token_ids=self._stop,
            speculation=not is_off,
            draft_source="auto" if is_off else drafter,
        )

    def _run(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Run:
        tag = str(time.monotonic_ns())
        return run_engine(
            self._engine,
            [tuple(prompt) for prompt in prompts],
            params,
            concurrency=self._streams,
            tag=tag,
            tenant=tag,
        )


def _figures(run: Run) -> dict[str, Any]:
    rates = run.rates().row()
    draft_ms, verify_ms = run.step_ms()
    return {
        "tok_s": rates["tok_s"],
        "decode_tok_s": run.decode_tok_s(),
        "ms_per_token": rates["ms_per_token"],
        "ttft_ms": rates["ttft_ms"],
        "accepted_per_verify": run.accepted_per_verify(),
        "acceptance": run.acceptance(),
        "sources": run.sources(),
        "draft_ms": draft_ms,
        "verify_ms": verify_ms,
    }


if __name__ == "__main__":
    serve(EngineSession().handlers())
