"""Our engine as one of the measured: started as `python -m mirror_sd.bench.peer_engine`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from mirror_sd import config as configuration
from mirror_sd import engine as engines
from mirror_sd.bench.decode import Run, run_engine
from mirror_sd.bench.peer_drivers.session import Timeline, peak_rss_mb, serve
from mirror_sd.engine import Engine
from mirror_sd.errors import InternalError

# The same prompts come again each turn: their KV must not be found again. A `--set` comes later.
_FIRST = ("engine.prefix_reuse=false",)


class EngineSession:
    """The engine of the first pool, as a worker builds it."""

    def __init__(self) -> None:
        self._loaded: Engine | None = None
        self._streams = 1
        self._stop: tuple[int, ...] = ()
        self._speculation = False

    def handlers(self) -> dict[str, Callable[..., Any]]:
        return {
            "load": self.load,
            "generate": self.generate,
            "decode": self.decode,
            "peak_rss_mb": peak_rss_mb,
        }

    def load(
        self,
        overrides: Sequence[str],
        threads: int,
        streams: int,
        stop: Sequence[int],
        speculation: bool = False,
    ) -> None:
        """Build the engine; it must be able to run `streams` sequences at once."""
        config = configuration.load(overrides=[*_FIRST, *overrides])
        pool = next(iter(config.pools))
        if config.scheduler.max_batch_size.of(pool) < streams:
            size = f"scheduler.max_batch_size.{pool.upper()}={streams}"
            config = configuration.load(overrides=[*_FIRST, *overrides, size])
        self._loaded = engines.build(config, pool, threads)
        self._streams, self._stop, self._speculation = streams, tuple(stop), speculation

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Timeline]:
        """The contract of `peer_drivers.session.Driver`."""
        run = self._run(prompts, max_tokens, self._speculation)
        return list(zip(run.starts, run.times, strict=True))

    def decode(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, speculation: bool
    ) -> dict[str, Any]:
        """A row of `bench decode`; `answers` are the tokens of each prompt."""
        run = self._run(prompts, max_tokens, speculation)
        rates = run.rates().row()
        return {
            "precision": self._engine.capabilities.precision,
            "tok_s": rates["tok_s"],
            "ms_per_token": rates["ms_per_token"],
            "accepted_per_verify": run.accepted_per_verify(),
            "ttft_ms": rates["ttft_ms"],
            "peak_rss_mb": peak_rss_mb(),
            "answers": run.tokens,
        }

    @property
    def _engine(self) -> Engine:
        if self._loaded is None:
            raise InternalError("nothing is loaded")
        return self._loaded

    def _run(self, prompts: Sequence[Sequence[int]], max_tokens: int, speculation: bool) -> Run:
        return run_engine(
            self._engine,
            [tuple(prompt) for prompt in prompts],
            max_tokens=max_tokens,
            speculation=speculation,
            stop=self._stop,
            concurrency=self._streams,
            tag=str(time.monotonic_ns()),
        )


if __name__ == "__main__":
    serve(EngineSession().handlers())
