"""The draft head on XLA: one layer over a buffer of its own, a program for each number of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mirror_sd.backends.protocol import Capabilities, DraftBatch, Float32
from mirror_sd.backends.stepped_draft import DraftRows, SteppedDraft
from mirror_sd.backends.xla.decoder import (
    CHUNK,
    DTYPES,
    KV_BYTES,
    Context,
    Decoder,
    Inputs,
    Tree,
    rotary_of,
    rotary_tables,
)
from mirror_sd.backends.xla.xla_backend import XlaBackend
from mirror_sd.uir.draft_file import VECTORS, DraftProgram, DraftSpec
from mirror_sd.uir.model_spec import ModelSpec

# Rows of a call; a longer pass becomes several.
ROWS = (4, 16, 64)


class XlaDraftHead(SteppedDraft[Float32]):
    """In the target's precision. `allocate_kv` compiles."""

    def __init__(self, program: DraftProgram, target: XlaBackend) -> None:
        super().__init__(program, target.capabilities)
        self._model = _as_model(program.spec, target.capabilities)
        self._plan, self._device = target.plan, target.device
        cosines, sines = rotary_tables(self._model)
        self._weights = _read(program, self._put, self._plan.weights)
        self._shared = {
            "embedding": target.weights.shared["embedding"],
            "cosines": self._put(cosines, "fp32"),
            "sines": self._put(sines, "fp32"),
        }
        self._decoder = Decoder(self._model, self._plan, 1, 1)
        self._cache: Any = None
        self._slots_end = 0
        self._fuse: dict[int, Any] = {}
        self._passes: dict[int, Any] = {}

    def _put(self, values: Float32, dtype: str) -> Array:
        return jax.device_put(values.astype(DTYPES[dtype]), self._device)

    def kv_bytes_per_block(self, block_size: int) -> int:
        return KV_BYTES[self._plan.kv] * 2 * self._model.kv_size * block_size

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        super().allocate_kv(num_blocks, block_size)
        self._decoder = Decoder(self._model, self._plan, block_size, 1)
        shape = self._decoder.cache_shape(self._slots_end)
        self._cache = jnp.zeros(shape.shape, shape.dtype, device=self._device)
        sharding = jax.sharding.SingleDeviceSharding(self._device)
        of = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
        self._passes = {rows: self._compiled_pass(rows, of) for rows in ROWS}
        matrix = self._weights["fuse_features"]
        for rows in ROWS:
            features = of((rows, matrix.shape[1]), jnp.float32)
            shape_of = of(matrix.shape, matrix.dtype)
            self._fuse[rows] = jax.jit(self._product).lower(features, shape_of).compile()

    def _allocate(self, slots: int) -> None:
        # Rows that only fill a shape write behind the last block.
        self._slots_end = slots + max(ROWS)

    def _fused(self, features: Float32) -> Float32:
        parts = []
        for begin, end, rows in _calls(len(features)):
            padded = _padded(features[begin:end], rows)
            fused = self._fuse[rows](padded, self._weights["fuse_features"])
            parts.append(np.asarray(fused)[: end - begin])
        return np.concatenate(parts)

    def _taken(self, outputs: Float32, rows: Sequence[int]) -> Float32:
        return outputs[list(rows)]

    def _pass(self, batch: DraftBatch, rows: DraftRows, states: Float32) -> tuple[Float32, Float32]:
        outputs = np.empty((len(rows.indexes), self._model.hidden_size), np.float32)
        logits = np.empty((len(rows.indexes), len(self._token_ids)), np.float32)
        for begin, end, count in _calls(len(rows.token_ids)):
            drafted = [i for i, index in enumerate(rows.indexes) if begin <= index < end]
            inputs, wanted = self._inputs(batch, rows, begin, end, count, drafted)
            self._cache, x, scores = self._passes[count](
                self._cache,
                self._shared,
                self._weights,
                inputs,
                _padded(states[begin:end], count),
                wanted,
            )
            if drafted:
                outputs[drafted] = np.asarray(x)[: len(drafted)]
                logits[drafted] = np.asarray(scores)[: len(drafted)]
        return outputs, logits

    def _inputs(
        self,
        batch: DraftBatch,
        rows: DraftRows,
        begin: int,
        end: int,
        count: int,
        drafted: Sequence[int],
    ) -> tuple[Inputs, np.ndarray]:
        """Of rows begin..end-1; each that is drafted from is a span, the others need no attention:
        their keys and values alone are wanted."""
        span_rows, span_positions = np.zeros((count, 1), np.int32), np.zeros((count, 1), np.int32)
        tables = np.zeros((count, self._decoder.table_width()), np.int32)
        chunks, places = np.zeros(count, np.int32), np.zeros(count, np.int32)
        for place, i in enumerate(drafted):
            row, position = rows.indexes[i] - begin, int(rows.positions[rows.indexes[i]])
            blocks = position // self._block_size + 1
            tables[place, :blocks] = batch.block_tables[rows.sequences[i]][:blocks]
            span_rows[place], span_positions[place] = row, position
            chunks[place], places[row] = position // CHUNK + 1, place
        slots = np.arange(self._slots_end - count, self._slots_end, dtype=np.int32)
        slots[: end - begin] = rows.slots[begin:end]
        inputs = Inputs(
            token_ids=_padded(rows.token_ids[begin:end].astype(np.int32), count),
            positions=_padded(rows.positions[begin:end].astype(np.int32), count),
            slots=slots,
            span_rows=span_rows,
            span_positions=span_positions,
            row_places=places,
            block_tables=tables,
            chunks=chunks,
            groups=np.int32(len(drafted)),
        )
        return inputs, span_rows[:, 0].copy()

    def _compiled_pass(self, rows: int, of: Callable[..., Any]) -> Any:
        ints = functools.partial(of, dtype=jnp.int32)
        inputs = Inputs(
            token_ids=ints((rows,)),
            positions=ints((rows,)),
            slots=ints((rows,)),
            span_rows=ints((rows, 1)),
            span_positions=ints((rows, 1)),
            row_places=ints((rows,)),
            block_tables=ints((rows, self._decoder.table_width())),
            chunks=ints((rows,)),
            groups=ints(()),
        )
        cache = self._decoder.cache_shape(self._slots_end)
        weights = jax.tree.map(lambda a: of(a.shape, a.dtype), (self._shared, self._weights))
        return (
            jax.jit(self._step, donate_argnums=0)
            .lower(
                of(cache.shape, cache.dtype),
                *weights,
                inputs,
                of((rows, self._model.hidden_size), jnp.float32),
                ints((rows,)),
            )
            .compile()
        )

    def _step(
        self, cache: Array, shared: Tree, layer: Tree, inputs: Inputs, states: Array, wanted: Array
    ) -> tuple[Array, Array, Array]:
        decoder = self._decoder
        embedded = shared["embedding"][inputs.token_ids].astype(jnp.float32)
        normed = (
            decoder.norm(embedded, layer["embedding_norm"]),
            decoder.norm(states, layer["feature_norm"]),
        )
        x = self._product(jnp.concatenate(normed, axis=1), layer["fuse_input"])
        context = Context(np.int32(0), inputs, rotary_of(shared, inputs))
        x, cache = decoder.layer(x, cache, layer, context, window=None)
        x = x[wanted]
        return cache, x, self._product(decoder.norm(x, layer["final_norm"]), layer["head"])

    @staticmethod
    def _product(x: Array, weight: Array) -> Array:
        return Decoder.product(x.astype(weight.dtype), weight)


def _as_model(spec: DraftSpec, target: Capabilities) -> ModelSpec:
    """The layer as a model of its own."""
    return ModelSpec(
        family="llama",
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=1,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rope_theta=spec.rope_theta,
        rms_eps=spec.rms_eps,
        max_context=target.max_context,
        windows=(None,),
    )


def _read(program: DraftProgram, put: Callable[[Float32, str], Array], dtype: str) -> Tree:
    """All weights but those of the target; q, k, v and gate, up one after another."""
    weights = program.weights

    def joined(*names: str) -> Array:
        return put(np.concatenate([weights[name] for name in names]), dtype)

    read = {name: put(weights[name], "fp32") for name in VECTORS}
    read |= {name: joined(name) for name in ("fuse_features", "fuse_input", "o", "down", "head")}
    return read | {"qkv": joined("q", "k", "v"), "gate_up": joined("gate", "up")}


def _calls(rows: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, rows of the program) of each call."""
    for begin in range(0, rows, max(ROWS)):
        end = min(begin + max(ROWS), rows)
        yield begin, end, min(count for count in ROWS if count >= end - begin)


def _padded(values: np.ndarray, rows: int) -> np.ndarray:
    padded = np.zeros((rows, *values.shape[1:]), values.dtype)
    padded[: len(values)] = values
    return padded
