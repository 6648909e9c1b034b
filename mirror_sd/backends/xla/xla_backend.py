"""The XLA back end: the protocol's face of the compiled programs."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mirror_sd.backends import batch_check, tapped
from mirror_sd.backends.protocol import Capabilities, Float32, RaggedBatch
from mirror_sd.backends.xla import runtime, selftest
from mirror_sd.backends.xla.buckets import BUCKETS, NARROW, Bucket
from mirror_sd.backends.xla.decoder import KV_BYTES, Weights, read_weights
from mirror_sd.backends.xla.executor import Executor
from mirror_sd.uir.precision_plan import PrecisionPlan
from mirror_sd.uir.program import Program

log = logging.getLogger(__name__)


class XlaBackend:
    """Raises `ValueError` on a bad batch and leaves the cache as it was. Whether it is bit-stable
    is known after `allocate_kv`, which tests the very programs that serve."""

    def __init__(
        self,
        program: Program,
        device: Any,
        precision: str,
        buckets: Sequence[Bucket] | None = None,
    ) -> None:
        """device: of `runtime.open_device`. buckets: None takes `BUCKETS`."""
        self._program = program
        self._device = device
        self._buckets = tuple(buckets or BUCKETS)
        self._weights = read_weights(program, device)
        self._executor: Executor | None = None
        self._num_blocks = self._block_size = 0
        self._taps: tuple[int, ...] = ()
        self._features = np.empty((0, 0), np.float32)
        spec = program.spec
        self._capabilities = Capabilities(
            name="xla",
            device=device.platform,
            precision=precision,
            vocab_size=spec.vocab_size,
            max_context=spec.max_context,
            bit_stable=False,  # not known before `allocate_kv`
            detail=f"{device.device_kind}, {program.plan.describe()}",
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def weights(self) -> Weights:
        """For a draft head, which looks tokens up in the embedding."""
        return self._weights

    @property
    def plan(self) -> PrecisionPlan:
        return self._program.plan

    @property
    def device(self) -> Any:
        return self._device

    @property
    def compilations(self) -> int:
        """Programs compiled in this process; constant after `allocate_kv` and `tap`."""
        return runtime.compilations()

    def kv_bytes_per_block(self, block_size: int) -> int:
        spec = self._program.spec
        return 2 * spec.kv_size * spec.num_layers * KV_BYTES[self._program.plan.kv] * block_size

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Compiles and tests, too: seconds, or a minute where nothing was compiled before."""
        batch_check.check_cache(num_blocks, block_size)
        self._executor = None  # its memory is wanted
        begin, before = time.monotonic(), self.compilations
        self._executor = Executor(
            self._program,
            self._weights,
            self._device,
            num_blocks=num_blocks,
            block_size=block_size,
            buckets=self._buckets,
        )
        self._num_blocks, self._block_size = num_blocks, block_size
        count, seconds = self.compilations - before, time.monotonic() - begin
        log.info("xla engine: %d programs made ready in %.1f s", count, seconds)
        self._test(num_blocks * block_size)

    def _test(self, room: int) -> None:
        executor = self._executor
        assert executor is not None
        is_stable = False
        # Wide spans take other kernels, which on a CPU sum an odd head size in another order.
        narrow = tuple(bucket for bucket in self._buckets if bucket.queries == NARROW)
        for buckets in (self._buckets, narrow):
            executor.buckets = buckets
            is_stable = selftest.is_bit_stable(
                executor, self._program.spec, room=room, block_size=self._block_size
            )
            if is_stable:
                break
        else:
            executor.buckets = self._buckets
        if executor.buckets != self._buckets:
            log.info("xla engine: prompts go through narrow spans, whose rows keep their bits")
        self._capabilities = replace(self._capabilities, bit_stable=is_stable)
        if not is_stable:
            log.warning(
                "XLA on this device (%s, %s) gives a row different bits in different batches: "
                "near-ties may be decided differently under load",
                self._capabilities.device,
                self._capabilities.precision,
            )

    def forward(self, batch: RaggedBatch) -> Float32:
        batch_check.check(
            batch,
            vocab_size=self._capabilities.vocab_size,
            max_context=self._capabilities.max_context,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
        )
        assert self._executor is not None
        logits, self._features = self._executor.forward(batch, self._taps)
        return logits

    def tap(self, layers: Sequence[int]) -> None:
        self._taps = tapped.checked(layers, self._capabilities.num_layers)
        width = len(self._taps) * self._capabilities.hidden_size
        self._features = np.empty((0, width), np.float32)

    @property
    def features(self) -> Float32:
        return self._features
