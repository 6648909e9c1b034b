"""The decoder's forward as two pure JAX functions of static shapes: layers, and the head.

A row's bits must not depend on its company. XLA compiles each bucket on its own, so every reduction
is laid out alike in all of them: products have at least `buckets.LEAST_ROWS` rows (on a CPU one row
takes another kernel), sums are written down as a tree, and attention goes over the keys in chunks
of `CHUNK`, in the order of their positions, with a running maximum. A chunk that is masked for a
row leaves it as it was, to the bit. `selftest` checks it on the device.

Spans and chunks are loops whose counts are data, not shapes: they need no buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mirror_sd.uir.model_spec import ModelSpec
from mirror_sd.uir.precision_plan import PrecisionPlan
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
    cosines, sines = rotary_tables(spec)
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


def rotary_tables(spec: ModelSpec) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and signed sines, [max_context, head_dim], such that x*cos + swapped(x)*sin turns."""
    frequencies, scale = inverse_frequencies(spec)
    angles = np.arange(spec.max_context, dtype=np.float32)[:, None] * frequencies
    cosines, sines = np.cos(angles) * np.float32(scale), np.sin(angles) * np.float32(scale)
    return np.concatenate((cosines, cosines), axis=1), np.concatenate((-sines, sines), axis=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Inputs:
    """One call of a bucket of T rows and room for S spans of Q queries; see `buckets.Call`.

    token_ids, positions, slots: [T]. span_rows: [S, Q] rows of the call. span_positions: [S, Q].
    row_places: [T] each row's place among the S * Q queries. block_tables: [S, blocks] of the
    spans' sequences. chunks: [groups] passes over keys for each `Decoder.group` spans. groups: []
    how many of them there are.
    """

    token_ids: Array
    positions: Array
    slots: Array
    span_rows: Array
    span_positions: Array
    row_places: Array
    block_tables: Array
    chunks: Array
    groups: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Context:
    """What a layer needs besides its weights: its number, and what all of them share."""

    number: np.int32
    inputs: Inputs
    rotary: tuple[Array, ...]


class Decoder:
    """The two functions, for one model, one precision and one size of KV blocks.

    group: spans whose attention is computed at once; a CPU gains nothing by more than one.
    """

    def __init__(self, spec: ModelSpec, plan: PrecisionPlan, block_size: int, group: int) -> None:
        self.spec = spec
        self.block_size = block_size
        self.group = group
        self._dtype = DTYPES[plan.activations]
        self._kv_dtype = DTYPES[plan.kv]
        self._pattern = _PATTERNS[plan.kv]
        self._head_dtype = DTYPES[plan.head]

    def cache_shape(self, slots: int) -> jax.ShapeDtypeStruct:
        """[layers, slots, 2 * kv_heads * head_dim]: keys and values of a slot side by side."""
        return jax.ShapeDtypeStruct(
            (self.spec.num_layers, slots, 2 * self.spec.kv_size), self._pattern
        )

    def layers(
        self, cache: Array, shared: Tree, layers: Layers, inputs: Inputs
    ) -> tuple[Array, tuple[Array, ...]]:
        """(cache with the rows' keys and values, the residual stream [T, hidden] after each layer).
        All of them, so that other taps need no other program."""
        rotary = rotary_of(shared, inputs)
        # Traced and lowered once for all layers, which then differ by their number alone.
        one = jax.jit(self.layer, static_argnames="window")
        x = shared["embedding"][inputs.token_ids].astype(jnp.float32)
        streams = []
        for number, layer in enumerate(layers):
            context = Context(np.int32(number), inputs, rotary)
            x, cache = one(x, cache, layer, context, window=self.spec.windows[number])
            streams.append(x)
        return cache, tuple(streams)

    def layer(
        self, x: Array, cache: Array, layer: Tree, context: Context, window: int | None
    ) -> tuple[Array, Array]:
        h = self.norm_to(x, layer["attention_norm"])
        mixed, cache = self._attend(layer, h, cache, context, window)
        x = x + mixed
        h = self.norm_to(x, layer["mlp_norm"])
        gate, up = jnp.split(self.product(h, layer["gate_up"]), 2, axis=-1)
        h = (gate * jax.nn.sigmoid(gate) * up).astype(self._dtype)
        return x + self.product(h, layer["down"]), cache

    def head(self, shared: Tree, x: Array, rows: Array) -> Array:
        """Logits [len(rows), vocab] in fp32 of rows of the residual stream."""
        h = self.norm(x[rows], shared["norm"]).astype(self._head_dtype)
        return self.product(h, shared.get("head", shared["embedding"]))

    def table_width(self) -> int:
        """Blocks of a table that reaches the longest context, in whole chunks of keys."""
        return -(-_padded_context(self.spec) // self.block_size)

    def norm(self, x: Array, weight: Array | float) -> Array:
        mean_square = _sum(jnp.square(x)) * np.float32(1 / x.shape[-1])
        return x * lax.rsqrt(mean_square + self.spec.rms_eps) * weight

    def norm_to(self, x: Array, weight: Array) -> Array:
        """In the format of activations."""
        return self.norm(x, weight).astype(self._dtype)

    @staticmethod
    def product(x: Array, weight: Array) -> Array:
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
        self, layer: Tree, h: Array, cache: Array, context: Context, window: int | None
    ) -> tuple[Array, Array]:
        spec = self.spec
        qkv = self.product(h, layer["qkv"])
        if "qkv_bias" in layer:
            qkv = qkv + layer["qkv_bias"]
        rotated = spec.num_heads + spec.num_kv_heads
        qkv = qkv.reshape(len(h), -1, spec.head_dim)
        qk, values = qkv[:, :rotated], qkv[:, rotated:]
        if "qk_norm" in layer:
            qk = self.norm(qk, layer["qk_norm"])
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
        mixed = self.product(mixed.astype(self._dtype), layer["o"])
        return mixed + layer["o_bias"] if "o_bias" in layer else mixed, cache

    def _attention(
        self, queries: Array, cache: Array, context: Context, window: int | None
    ) -> Array:
        """[T, heads * head_dim] in fp32 of queries [T, heads, head_dim]."""
        spec, inputs = self.spec, context.inputs
        spans, rows = inputs.span_rows.shape
        shared, size = spec.num_heads // spec.num_kv_heads, min(self.group, spans)
        q = queries[inputs.span_rows].reshape(spans, rows, spec.num_kv_heads, shared, -1)
        q = q.transpose(0, 2, 1, 3, 4).reshape(spans, spec.num_kv_heads, rows * shared, -1)
        own = jnp.repeat(inputs.span_positions, shared, axis=1)[:, None, :, None]

        def group(index: Array, mixed: Array) -> Array:
            def part(of: Array) -> Array:
                return lax.dynamic_slice_in_dim(of, index * size, size)

            one = self._group(
                part(q),
                part(own),
                part(inputs.block_tables),
                inputs.chunks[index],
                cache,
                context.number,
                window,
            )
            return lax.dynamic_update_slice_in_dim(mixed, one, index * size, axis=0)

        mixed = lax.fori_loop(0, inputs.groups, group, jnp.zeros(q.shape))
        mixed = mixed.reshape(spans, spec.num_kv_heads, rows, shared, -1)
        mixed = mixed.transpose(0, 2, 1, 3, 4).reshape(spans * rows, -1)
        return mixed[inputs.row_places]

    def _group(
        self,
        q: Array,
        own: Array,
        tables: Array,
        chunks: Array,
        cache: Array,
        number: np.int32,
        window: int | None,
    ) -> Array:
        """Outputs like q [G, kv_heads, rows, head_dim]; own: positions [G, 1, rows, 1]."""
        heads = self.spec.num_kv_heads
        scale = np.float32(1 / np.sqrt(self.spec.head_dim))

        def chunk(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            highest, total, mixed = state
            at = index * CHUNK + jnp.arange(CHUNK)
            slots = tables[:, at // self.block_size] * self.block_size + at % self.block_size
            kv = cache.at[number, slots].get(mode="promise_in_bounds")
            # What was left behind the last position may be no number, and 0 times that is none.
            kv = jnp.where((at <= own.max(axis=2))[:, 0, :, None], kv, 0)
            kv = lax.bitcast_convert_type(kv, self._kv_dtype)
            kv = kv.reshape(len(tables), CHUNK, 2 * heads, -1)
            hidden = at > own
            if window is not None:
                hidden |= at <= own - window
            scores = jnp.where(hidden, -jnp.inf, _batched(q, kv[:, :, :heads], 3) * scale)
            best = jnp.maximum(highest, scores.max(axis=-1, keepdims=True))
            weights = jnp.exp(scores - best)
            fade = jnp.exp(highest - best)
            total = total * fade + _sum(weights)
            mixed = mixed * fade + _batched(weights.astype(self._kv_dtype), kv[:, :, heads:], 1)
            return best, total, mixed

        shape = (*q.shape[:3], 1)
        start = jnp.full(shape, _LOWEST), jnp.zeros(shape), jnp.zeros(q.shape)
        _, total, mixed = lax.fori_loop(0, chunks, chunk, start)
        return mixed / total


def rotary_of(shared: Tree, inputs: Inputs) -> tuple[Array, ...]:
    return tuple(shared[name][inputs.positions][:, None] for name in ("cosines", "sines"))


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
