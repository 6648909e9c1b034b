"""The XLA back end: the protocol's face of the compiled programs."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mirror_sd.backends import batch_check, tapped
from mirror_sd.backends.protocol import Capabilities, Float32, RaggedBatch
from mirror_sd.backends.xla import runtime, selftest
from mirror_sd.backends.xla.buckets import BUCKETS, Bucket
from mirror_sd.backends.xla.decoder import KV_BYTES, read_weights
from mirror_sd.backends.xla.executor import Executor
from mirror_sd.uir.program import Program

log = logging.getLogger(__name__)


class XlaBackend:
    """Raises `ValueError` on a bad batch and leaves the cache as it was."""

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
        bit_stable = selftest.is_bit_stable(program, self._weights, device, self._buckets)
        if not bit_stable:
            log.warning(
                "XLA on this device (%s, %s) gives a row different bits in different batches: "
                "near-ties may be decided differently under load",
                device.platform,
                precision,
            )
        self._capabilities = Capabilities(
            name="xla",
            device=device.platform,
            precision=precision,
            vocab_size=spec.vocab_size,
            max_context=spec.max_context,
            bit_stable=bit_stable,
            detail=f"{device.device_kind}, {program.plan.describe()}",
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def compilations(self) -> int:
        """Programs compiled in this process; constant after `allocate_kv` and `tap`."""
        return runtime.compilations()

    def kv_bytes_per_block(self, block_size: int) -> int:
        spec = self._program.spec
        return 2 * spec.kv_size * spec.num_layers * KV_BYTES[self._program.plan.kv] * block_size

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Compiles, too: some seconds, or a minute where nothing was compiled before."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"cannot allocate {num_blocks} blocks of {block_size} tokens")
        self._executor = None  # its memory is wanted
        begin, before = time.monotonic(), self.compilations
        self._executor = Executor(
            self._program,
            self._weights,
            self._device,
            num_blocks=num_blocks,
            block_size=block_size,
            buckets=self._buckets,
            taps=self._taps,
        )
        self._num_blocks, self._block_size = num_blocks, block_size
        self._tell(begin, before)

    def _tell(self, begin: float, before: int) -> None:
        count, seconds = self.compilations - before, time.monotonic() - begin
        log.info("xla engine: %d programs made ready in %.1f s", count, seconds)

    def forward(self, batch: RaggedBatch) -> Float32:
        batch_check.check(
            batch,
            vocab_size=self._capabilities.vocab_size,
            max_context=self._capabilities.max_context,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
        )
        assert self._executor is not None
        logits, self._features = self._executor.forward(batch)
        return logits

    def tap(self, layers: Sequence[int]) -> None:
        """Compiles, where other layers were tapped before."""
        taps = tapped.checked(layers, self._capabilities.num_layers)
        size = self._capabilities.hidden_size
        self._features = np.empty((0, len(taps) * size), np.float32)
        if taps != self._taps and self._executor is not None:
            begin, before = time.monotonic(), self.compilations
            self._executor.tap(taps, size)
            self._tell(begin, before)
        self._taps = taps

    @property
    def features(self) -> Float32:
        return self._features
