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

# Spans whose attention is computed at once, by platform; others take 8.
GROUPS = {"cpu": 1}


class Executor:
    """The constructor allocates the buffer and compiles. Each call hands the buffer to the program,
    which writes in place and hands it back. `buckets` can be set to some of those compiled."""

    def __init__(
        self,
        program: Program,
        weights: Weights,
        device: Any,
        *,
        num_blocks: int,
        block_size: int,
        buckets: Sequence[Bucket],
    ) -> None:
        decoder = Decoder(program.spec, program.plan, block_size, GROUPS.get(device.platform, 8))
        self.buckets = tuple(buckets)
        self._spec = program.spec
        # Rows that only fill a shape write behind the last block.
        slots = num_blocks * block_size + max(bucket.rows for bucket in buckets)
        shape = decoder.cache_shape(slots)
        self._cache: Array = jnp.zeros(shape.shape, shape.dtype, device=device)
        self._programs = Programs(decoder, weights, device, slots=slots, buckets=buckets)

    def forward(self, batch: RaggedBatch, taps: tuple[int, ...] = ()) -> tuple[Float32, Float32]:
        """(logits [R, vocab], features [T, len(taps) * hidden]) of a checked batch."""
        width = len(taps) * self._spec.hidden_size
        logits = np.empty((len(batch.logit_rows), self._spec.vocab_size), np.float32)
        features = np.empty((len(batch.token_ids) if taps else 0, width), np.float32)
        for call in cut(batch, self.buckets):
            self._cache, streams = self._programs.layers(self._cache, call, batch)
            tokens = call.tokens
            wanted = np.flatnonzero(np.isin(tokens, batch.logit_rows)).astype(np.int32)
            if len(wanted):
                places = np.searchsorted(batch.logit_rows, tokens[wanted])
                logits[places] = self._programs.head(streams[-1], wanted)
            if taps:
                kept = [np.asarray(streams[layer - 1])[: len(tokens)] for layer in taps]
                features[tokens] = np.concatenate(kept, axis=1)
        return logits, features
