"""The compiled programs of one decoder: all made before the first forward, none after."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mirror_sd.backends.protocol import Int32, RaggedBatch
from mirror_sd.backends.xla.buckets import Bucket, Call
from mirror_sd.backends.xla.decoder import CHUNK, Decoder, Inputs, Weights

# Logits are wanted of one row of a prompt, or of each row of a verify.
LEAST_LOGITS = 8


class Programs:
    """Compiles for `slots` slots of keys and values, and for what is tapped."""

    def __init__(
        self,
        decoder: Decoder,
        weights: Weights,
        device: Any,
        *,
        slots: int,
        buckets: Sequence[Bucket],
        taps: tuple[int, ...],
    ) -> None:
        self._decoder = decoder
        self._weights = weights
        self._slots = slots
        self._sharding = jax.sharding.SingleDeviceSharding(device)
        shapes = jax.tree.map(self._shape_of, (weights.shared, weights.layers))
        self._layers = {bucket: self._compile_layers(bucket, shapes, taps) for bucket in buckets}
        rows = sorted({bucket.rows for bucket in buckets})
        self._heads = {
            (count, wanted): self._compile_head(count, wanted, shapes[0])
            for count in rows
            for wanted in sorted({LEAST_LOGITS, count})
        }

    def layers(self, cache: Array, call: Call, batch: RaggedBatch) -> tuple[Array, Array, Array]:
        """As `Decoder.layers`; takes `cache` away."""
        inputs = self._inputs(call, batch)
        weights = self._weights
        result: tuple[Array, Array, Array] = self._layers[call.bucket](
            cache, weights.shared, weights.layers, inputs
        )
        return result

    def head(self, x: Array, rows: Int32) -> np.ndarray:
        """Logits [len(rows), vocab] of rows of a residual stream."""
        wanted = LEAST_LOGITS if len(rows) <= LEAST_LOGITS else len(x)
        padded = np.zeros(wanted, np.int32)
        padded[: len(rows)] = rows
        logits = self._heads[len(x), wanted](self._weights.shared, x, padded)
        return np.asarray(logits)[: len(rows)]

    def _shape_of(self, array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self._sharding)

    def _compile_layers(self, bucket: Bucket, shapes: Any, taps: tuple[int, ...]) -> Any:
        rows, spans, queries = bucket.rows, bucket.spans, bucket.queries
        ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32, sharding=self._sharding)
        inputs = Inputs(
            token_ids=ints((rows,)),
            positions=ints((rows,)),
            slots=ints((rows,)),
            span_rows=ints((spans, queries)),
            span_positions=ints((spans, queries)),
            row_places=ints((rows,)),
            block_tables=ints((spans, self._decoder.table_width())),
            chunks=ints(()),
        )
        function = functools.partial(self._decoder.layers, taps=taps)
        cache = self._shape_of(self._decoder.cache_shape(self._slots))
        return jax.jit(function, donate_argnums=0).lower(cache, *shapes, inputs).compile()

    def _compile_head(self, rows: int, wanted: int, shapes: Any) -> Any:
        x = (rows, self._decoder.spec.hidden_size)
        return (
            jax.jit(self._decoder.head)
            .lower(
                shapes,
                jax.ShapeDtypeStruct(x, jnp.float32, sharding=self._sharding),
                jax.ShapeDtypeStruct((wanted,), jnp.int32, sharding=self._sharding),
            )
            .compile()
        )

    def _inputs(self, call: Call, batch: RaggedBatch) -> Inputs:
        bucket, size = call.bucket, self._decoder.block_size
        rows, queries = bucket.rows, bucket.queries
        tokens = call.tokens
        count = len(tokens)
        token_ids, positions, places = (np.zeros(rows, np.int32) for _ in range(3))
        token_ids[:count] = batch.token_ids[tokens]
        positions[:count] = batch.positions[tokens]
        # What is there to fill the shape writes beside the blocks, each row in a place of its own.
        slots = np.arange(self._slots - rows, self._slots, dtype=np.int32)
        span_rows, span_positions = (np.zeros((bucket.spans, queries), np.int32) for _ in range(2))
        tables = np.zeros((bucket.spans, self._decoder.table_width()), np.int32)
        first = 0
        for place, span in enumerate(call.spans):
            length = span.end - span.begin
            table, own = batch.block_tables[span.sequence], slice(first, first + length)
            used = int(positions[first + length - 1]) // size + 1
            tables[place, :used] = table[:used]
            slots[own] = table[positions[own] // size] * size + positions[own] % size
            span_rows[place, :length] = np.arange(first, first + length)
            span_positions[place, :length] = positions[own]
            places[own] = place * queries + np.arange(length)
            first += length
        return Inputs(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            span_rows=span_rows,
            span_positions=span_positions,
            row_places=places,
            block_tables=tables,
            chunks=np.int32(int(positions.max()) // CHUNK + 1),
        )
