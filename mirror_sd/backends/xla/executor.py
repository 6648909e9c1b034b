"""Forwards of ragged batches through the compiled programs, over one KV buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from mirror_sd.backends.protocol import Float32, RaggedBatch
from mirror_sd.backends.xla.buckets import Bucket, cut
from mirror_sd.backends.xla.decoder import Decoder, Weights
from mirror_sd.backends.xla.programs import Programs
from mirror_sd.uir.program import Program


class Executor:
    """The constructor allocates the buffer and compiles. Each call hands the buffer to the program,
    which writes in place and hands it back."""

    def __init__(
        self,
        program: Program,
        weights: Weights,
        device: Any,
        *,
        num_blocks: int,
        block_size: int,
        buckets: Sequence[Bucket],
        taps: tuple[int, ...] = (),
    ) -> None:
        decoder = Decoder(program, block_size)
        self._buckets = buckets
        self._vocab = program.spec.vocab_size
        # Rows that only fill a shape write behind the last block.
        slots = num_blocks * block_size + max(bucket.rows for bucket in buckets)
        shape = decoder.cache_shape(slots)
        self._cache: Array = jnp.zeros(shape.shape, shape.dtype, device=device)
        self._decoder, self._weights, self._device, self._slots = decoder, weights, device, slots
        self.tap(taps, program.spec.hidden_size)

    def tap(self, taps: tuple[int, ...], hidden_size: int) -> None:
        """Compiles programs that keep these layers' outputs."""
        self._width = len(taps) * hidden_size
        self._programs = Programs(
            self._decoder,
            self._weights,
            self._device,
            slots=self._slots,
            buckets=self._buckets,
            taps=taps,
        )

    def forward(self, batch: RaggedBatch) -> tuple[Float32, Float32]:
        """(logits [R, vocab], features [T, tapped]) of a checked batch."""
        logits = np.empty((len(batch.logit_rows), self._vocab), np.float32)
        features = np.empty((len(batch.token_ids) if self._width else 0, self._width), np.float32)
        for call in cut(batch, self._buckets):
            self._cache, x, kept = self._programs.layers(self._cache, call, batch)
            tokens = call.tokens
            wanted = np.flatnonzero(np.isin(tokens, batch.logit_rows)).astype(np.int32)
            if len(wanted):
                places = np.searchsorted(batch.logit_rows, tokens[wanted])
                logits[places] = self._programs.head(x, wanted)
            if self._width:
                features[tokens] = np.asarray(kept)[: len(tokens)]
        return logits, features
