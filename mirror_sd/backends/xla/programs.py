"""The compiled programs of one decoder: all made before the first forward, none after."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mirror_sd.backends import block_table
from mirror_sd.backends.protocol import Int32, RaggedBatch
from mirror_sd.backends.xla.buckets import Bucket, Call
from mirror_sd.backends.xla.decoder import CHUNK, Decoder, Inputs, Weights

# Logits are wanted of one row of a prompt, or of each row of a verify.
LEAST_LOGITS = 4


class Programs:
    """Compiles for `slots` slots of keys and values."""

    def __init__(
        self,
        decoder: Decoder,
        weights: Weights,
        device: Any,
        *,
        slots: int,
        buckets: Sequence[Bucket],
    ) -> None:
        self._decoder = decoder
        self._weights = weights
        self._slots = slots
        self._sharding = jax.sharding.SingleDeviceSharding(device)
        shapes = jax.tree.map(self._shape_of, (weights.shared, weights.layers))
        layers = {bucket: self._lowered_layers(bucket, shapes) for bucket in buckets}
        rows = sorted({bucket.rows for bucket in buckets})
        heads = {
            (count, wanted): self._lowered_head(count, wanted, shapes[0])
            for count in rows
            for wanted in sorted({LEAST_LOGITS, count})
        }
        # XLA compiles on one thread, and lets go of the interpreter.
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as compilers:
            self._layers = dict(zip(layers, compilers.map(_compiled, layers.values()), strict=True))
            self._heads = dict(zip(heads, compilers.map(_compiled, heads.values()), strict=True))

    def layers(
        self, cache: Array, call: Call, batch: RaggedBatch
    ) -> tuple[Array, tuple[Array, ...]]:
        """As `Decoder.layers`; takes `cache` away."""
        inputs = self._inputs(call, batch)
        weights = self._weights
        result: tuple[Array, tuple[Array, ...]] = self._layers[call.bucket](
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

    def _lowered_layers(self, bucket: Bucket, shapes: Any) -> Any:
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
            chunks=ints((bucket.spans,)),
            groups=ints(()),
        )
        cache = self._shape_of(self._decoder.cache_shape(self._slots))
        return jax.jit(self._decoder.layers, donate_argnums=0).lower(cache, *shapes, inputs)

    def _lowered_head(self, rows: int, wanted: int, shapes: Any) -> Any:
        x = (rows, self._decoder.spec.hidden_size)
        return jax.jit(self._decoder.head).lower(
            shapes,
            jax.ShapeDtypeStruct(x, jnp.float32, sharding=self._sharding),
            jax.ShapeDtypeStruct((wanted,), jnp.int32, sharding=self._sharding),
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
        chunks = np.zeros(bucket.spans, np.int32)
        first = 0
        for place, span in enumerate(call.spans):
            length = span.end - span.begin
            table, own = batch.block_tables[span.sequence], slice(first, first + length)
            last = int(positions[first + length - 1])
            used = last // size + 1
            group = place // self._decoder.group
            chunks[group] = max(chunks[group], last // CHUNK + 1)
            tables[place, :used] = table[:used]
            slots[own] = block_table.slots_of(table, positions[own], size)
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
            chunks=chunks,
            groups=np.int32(-(-len(call.spans) // self._decoder.group)),
        )


def _compiled(lowered: Any) -> Any:
    return lowered.compile()
