"""The decoder's forward as two pure JAX functions of static shapes: layers, and the head.

A row's bits must not depend on its company. XLA compiles each bucket on its own, so every reduction
is laid out alike in all of them: products have at least `buckets.LEAST_ROWS` rows (on a CPU one row
takes another kernel), and attention goes over the keys in chunks of `CHUNK`, in the order of their
positions, with a running maximum. A chunk that is masked for a row leaves it as it was, to the bit,
so the number of chunks may follow from the longest sequence. `selftest` checks it on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mirror_sd.uir.model_spec import ModelSpec
from mirror_sd.uir.program import Program
from mirror_sd.uir.rope import inverse_frequencies

# Keys of one pass of attention.
CHUNK = 128
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
# The cache holds bit patterns: XLA on a CPU widens a whole bf16 buffer to scatter into it, which
# copied 7 MB for 8 rows (1.7 ms; the same as integers: 8 us).
_PATTERNS = {"fp32": jnp.uint32, "bf16": jnp.uint16}
KV_BYTES = {"fp32": 4, "bf16": 2}
# Below any score, and finite: a row that has seen no key yet must not become NaN.
_LOWEST = -1e30

Tree = dict[str, Array]
Layers = tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Weights:
    """vectors and tables [..] fp32, matrices [outputs, inputs] in the plan's formats."""

    shared: Tree
    layers: Layers


def read_weights(program: Program, device: jax.Device) -> Weights:
    """Reads the tensors one by one, so that no second copy of the model exists."""
    spec, plan = program.spec, program.plan
    load = program.weights.load

    def put(values: np.ndarray, dtype: str = "fp32") -> Array:
        return jax.device_put(values.astype(DTYPES[dtype]), device)

    def joined(layer: int, *roles: str, dtype: str) -> Array:
        parts = [load(f"layers.{layer}.{role}") for role in roles]
        return put(np.concatenate(parts), dtype)

    shared = {"embedding": put(load("embedding"), plan.weights), "norm": put(load("final_norm"))}
    if not spec.tied_embeddings or plan.head != plan.weights:
        name = "embedding" if spec.tied_embeddings else "head"
        shared["head"] = put(load(name), plan.head)
    cosines, sines = _rotary_tables(spec)
    shared |= {"cosines": put(cosines), "sines": put(sines)}
    layers = []
    for index in range(spec.num_layers):
        layer = {
            "attention_norm": put(load(f"layers.{index}.attention_norm")),
            "qkv": joined(index, "q", "k", "v", dtype=plan.weights),
            "o": joined(index, "o", dtype=plan.weights),
            "mlp_norm": put(load(f"layers.{index}.mlp_norm")),
            "gate_up": joined(index, "gate", "up", dtype=plan.weights),
            "down": joined(index, "down", dtype=plan.weights),
        }
        if spec.qkv_bias:
            layer["qkv_bias"] = joined(index, "q_bias", "k_bias", "v_bias", dtype="fp32")
        if spec.output_bias:
            layer["o_bias"] = joined(index, "o_bias", dtype="fp32")
        if spec.qk_norm:
            query, key = load(f"layers.{index}.q_norm"), load(f"layers.{index}.k_norm")
            heads = [query] * spec.num_heads + [key] * spec.num_kv_heads
            layer["qk_norm"] = put(np.stack(heads))
        layers.append(layer)
    return Weights(shared, tuple(layers))


def _rotary_tables(spec: ModelSpec) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and signed sines, [max_context, head_dim], such that x*cos + swapped(x)*sin turns."""
    frequencies, scale = inverse_frequencies(spec)
    angles = np.arange(spec.max_context, dtype=np.float32)[:, None] * frequencies
    cosines, sines = np.cos(angles) * np.float32(scale), np.sin(angles) * np.float32(scale)
    return np.concatenate((cosines, cosines), axis=1), np.concatenate((-sines, sines), axis=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Inputs:
    """One call of a bucket of T rows in B spans of Q queries; see `buckets.Call`.

    token_ids, positions, slots: [T]. span_rows: [B, Q] rows of the call. span_positions: [B, Q].
    row_places: [T] each row's place among the B * Q queries. block_tables: [B, blocks] of the
    spans' sequences. chunks: [] passes of attention.
    """

    token_ids: Array
    positions: Array
    slots: Array
    span_rows: Array
    span_positions: Array
    row_places: Array
    block_tables: Array
    chunks: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class _Context:
    """What a layer needs besides its weights: its number, and what all of them share."""

    number: np.int32
    inputs: Inputs
    rotary: tuple[Array, ...]
    key_slots: Array


class Decoder:
    """The two functions, for one model, one precision and one size of KV blocks."""

    def __init__(self, program: Program, block_size: int) -> None:
        self.spec = program.spec
        self.block_size = block_size
        self.kv = program.plan.kv
        self._dtype = DTYPES[program.plan.activations]
        self._kv_dtype = DTYPES[program.plan.kv]
        self._pattern = _PATTERNS[program.plan.kv]
        self._head_dtype = DTYPES[program.plan.head]

    def cache_shape(self, slots: int) -> jax.ShapeDtypeStruct:
        """[layers, slots, 2 * kv_heads * head_dim]: keys and values of a slot side by side."""
        return jax.ShapeDtypeStruct(
            (self.spec.num_layers, slots, 2 * self.spec.kv_size), self._pattern
        )

    def layers(
        self, cache: Array, shared: Tree, layers: Layers, inputs: Inputs, taps: tuple[int, ...]
    ) -> tuple[Array, Array, Array]:
        """(cache with the rows' keys and values, the last residual stream [T, hidden], what was
        tapped [T, len(taps) * hidden])."""
        rotary = tuple(shared[name][inputs.positions][:, None] for name in ("cosines", "sines"))
        key_slots = self._key_slots(inputs.block_tables)
        # Traced and lowered once for all layers, which then differ by their number alone.
        one = jax.jit(self._layer, static_argnames="window")
        x = shared["embedding"][inputs.token_ids].astype(jnp.float32)
        kept = []
        for number, layer in enumerate(layers):
            context = _Context(np.int32(number), inputs, rotary, key_slots)
            x, cache = one(x, cache, layer, context, window=self.spec.windows[number])
            if number + 1 in taps:
                kept.append(x)
        return cache, x, jnp.concatenate(kept, axis=-1) if kept else x[:, :0]

    def _layer(
        self, x: Array, cache: Array, layer: Tree, context: _Context, window: int | None
    ) -> tuple[Array, Array]:
        h = self._norm(x, layer["attention_norm"]).astype(self._dtype)
        mixed, cache = self._attend(layer, h, cache, context, window)
        x = x + mixed
        h = self._norm(x, layer["mlp_norm"]).astype(self._dtype)
        gate, up = jnp.split(self._product(h, layer["gate_up"]), 2, axis=-1)
        h = (gate * jax.nn.sigmoid(gate) * up).astype(self._dtype)
        return x + self._product(h, layer["down"]), cache

    def head(self, shared: Tree, x: Array, rows: Array) -> Array:
        """Logits [len(rows), vocab] in fp32 of rows of the residual stream."""
        h = self._norm(x[rows], shared["norm"]).astype(self._head_dtype)
        return self._product(h, shared.get("head", shared["embedding"]))

    def table_width(self) -> int:
        """Blocks of a table that reaches the longest context, in whole chunks of keys."""
        return -(-_padded_context(self.spec) // self.block_size)

    def _key_slots(self, tables: Array) -> Array:
        """[B, keys] the slot of each position."""
        slots = tables[:, :, None] * self.block_size + jnp.arange(self.block_size)
        return slots.reshape(len(tables), -1)[:, : _padded_context(self.spec)]

    def _norm(self, x: Array, weight: Array | float) -> Array:
        mean_square = _sum(jnp.square(x)) * np.float32(1 / x.shape[-1])
        return x * lax.rsqrt(mean_square + self.spec.rms_eps) * weight

    @staticmethod
    def _product(x: Array, weight: Array) -> Array:
        """x W^T [T, outputs] in fp32."""
        # Without it a TPU multiplies fp32 in one pass of bf16.
        precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return lax.dot_general(
            x,
            weight,
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    def _attend(
        self, layer: Tree, h: Array, cache: Array, context: _Context, window: int | None
    ) -> tuple[Array, Array]:
        spec = self.spec
        qkv = self._product(h, layer["qkv"])
        if "qkv_bias" in layer:
            qkv = qkv + layer["qkv_bias"]
        rotated = spec.num_heads + spec.num_kv_heads
        qkv = qkv.reshape(len(h), -1, spec.head_dim)
        qk, values = qkv[:, :rotated], qkv[:, rotated:]
        if "qk_norm" in layer:
            qk = self._norm(qk, layer["qk_norm"])
        cosines, sines = context.rotary
        qk = qk * cosines + jnp.roll(qk, spec.head_dim // 2, axis=-1) * sines
        queries, keys = qk[:, : spec.num_heads], qk[:, spec.num_heads :]
        new = jnp.concatenate((keys, values), axis=1).reshape(len(h), -1).astype(self._kv_dtype)
        cache = cache.at[context.number, context.inputs.slots].set(
            lax.bitcast_convert_type(new, self._pattern),
            mode="promise_in_bounds",
            unique_indices=True,
        )
        mixed = self._attention(queries.astype(self._dtype), cache, context, window)
        mixed = self._product(mixed.astype(self._dtype), layer["o"])
        return mixed + layer["o_bias"] if "o_bias" in layer else mixed, cache

    def _attention(
        self, queries: Array, cache: Array, context: _Context, window: int | None
    ) -> Array:
        """[T, heads * head_dim] in fp32 of queries [T, heads, head_dim]."""
        spec, inputs = self.spec, context.inputs
        spans, rows = inputs.span_rows.shape
        shared = spec.num_heads // spec.num_kv_heads
        q = queries[inputs.span_rows].reshape(spans, rows, spec.num_kv_heads, shared, -1)
        q = q.transpose(0, 2, 1, 3, 4).reshape(spans, spec.num_kv_heads, rows * shared, -1)
        own = jnp.repeat(inputs.span_positions, shared, axis=1)[:, None, :, None]
        scale = np.float32(1 / np.sqrt(spec.head_dim))

        def chunk(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            highest, total, mixed = state
            slots = lax.dynamic_slice_in_dim(context.key_slots, index * CHUNK, CHUNK, axis=1)
            kv = cache.at[context.number, slots].get(mode="promise_in_bounds")
            kv = lax.bitcast_convert_type(kv, self._kv_dtype)
            kv = kv.reshape(spans, CHUNK, 2 * spec.num_kv_heads, spec.head_dim)
            keys, values = kv[:, :, : spec.num_kv_heads], kv[:, :, spec.num_kv_heads :]
            scores = _batched(q, keys, 3) * scale
            at = index * CHUNK + jnp.arange(CHUNK)
            hidden = at > own
            if window is not None:
                hidden |= at <= own - window
            scores = jnp.where(hidden, -jnp.inf, scores)
            best = jnp.maximum(highest, scores.max(axis=-1, keepdims=True))
            weights = jnp.exp(scores - best)
            fade = jnp.exp(highest - best)
            total = total * fade + _sum(weights)
            mixed = mixed * fade + _batched(weights.astype(self._kv_dtype), values, 1)
            return best, total, mixed

        shape = (*q.shape[:3], 1)
        start = jnp.full(shape, _LOWEST), jnp.zeros(shape), jnp.zeros(q.shape)
        _, total, mixed = lax.fori_loop(0, inputs.chunks, chunk, start)
        mixed = (mixed / total).reshape(spans, spec.num_kv_heads, rows, shared, -1)
        mixed = mixed.transpose(0, 2, 1, 3, 4).reshape(spans * rows, -1)
        return mixed[inputs.row_places]


def _sum(x: Array) -> Array:
    """[.., 1] sums over the last axis in an order that is written down: XLA's own depends on how
    many rows there are. Additions element by element are fixed by IEEE."""
    while (size := x.shape[-1]) > 1:
        half = size // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        if size % 2:
            folded = jnp.concatenate((folded[..., :1] + x[..., -1:], folded[..., 1:]), axis=-1)
        x = folded
    return x


def _padded_context(spec: ModelSpec) -> int:
    return -(-spec.max_context // CHUNK) * CHUNK


def _batched(x: Array, kv: Array, axis: int) -> Array:
    """[B, heads, rows, ..] of x [B, heads, rows, n] and kv [B, keys, heads, head_dim], over axis
    `axis` of kv, in fp32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x,
        kv,
        (((3,), (axis,)), ((0, 1), (0, 2))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
