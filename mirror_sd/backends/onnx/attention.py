"""The parts of a pre-norm decoder layer as ONNX operators; decoders and draft heads share them.

Attention reads a paged cache. Its queries lie in a padded rectangle [S, Q], S sequences of Q
tokens, because a product wants one; everything else works on the T tokens end to end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mirror_sd.backends.onnx.graph import FLOAT, GraphBuilder
from mirror_sd.backends.protocol import Float32

# The runtime shares the columns of a product among threads by 16, and sums the rows in blocks that
# depend on how many columns a thread gets. Strips of values that cannot be shared are always summed
# alike.
_WIDEST_STRIP = 16


@dataclass(frozen=True, slots=True)
class Heads:
    """Dimensions of attention. rope: [dim / 2] radians a position; cosines and sines are scaled."""

    queries: int
    keys: int
    dim: int
    rope: Float32
    rope_scale: float = 1.0

    @property
    def query_size(self) -> int:
        return self.queries * self.dim

    @property
    def kv_size(self) -> int:
        return self.keys * self.dim


def norm(graph: GraphBuilder, x: str, weight: Float32, eps: float) -> str:
    """RMS norm over the last dimension. ONNX Runtime has one operator for these six."""
    square = graph.op("Pow", x, graph.constant(np.array(2.0)))
    mean = graph.op("ReduceMean", square, graph.integers([-1]), keepdims=1)
    deviation = graph.op("Sqrt", graph.op("Add", mean, graph.constant(np.array(eps))))
    return graph.op("Mul", graph.op("Div", x, deviation), graph.constant(weight))


class PagedAttention:
    """Writes what is common to the layers once: the inputs, the rotations and the masks.

    Inputs of the graph: positions, slots [T]; query_index [S, Q] into the tokens, context_slots
    [S, C] into the cache, mask.<i> [S, Q, C] added to the scores, token_rows [N] into the S * Q
    results: those that are wanted.
    """

    def __init__(self, graph: GraphBuilder, heads: Heads, masks: int = 1) -> None:
        self._graph, self._heads = graph, heads
        self._strip = max(n for n in range(1, _WIDEST_STRIP + 1) if heads.dim % n == 0)
        positions = graph.input("positions", ["T"])
        self._slots = graph.op("Unsqueeze", graph.input("slots", ["T"]), graph.integers([1]))
        self._query_index = graph.input("query_index", ["S", "Q"])
        self._context = graph.input("context_slots", ["S", "C"])
        self._rows = graph.input("token_rows", ["N"])
        self._masks = [self._mask(i) for i in range(masks)]
        self._cosines, self._sines = self._rotations(positions)

    def _mask(self, index: int) -> str:
        """[S, 1, group * Q, C]: the rows of all query heads that share a key."""
        graph = self._graph
        mask = graph.input(f"mask.{index}", ["S", "Q", "C"], FLOAT)
        group = self._heads.queries // self._heads.keys
        if group > 1:
            mask = graph.op("Concat", *[mask] * group, axis=1)
        return graph.op("Unsqueeze", mask, graph.integers([1]))

    def _rotations(self, positions: str) -> tuple[str, str]:
        """Cosines, and sines signed for `_rotated`: [T, 1, dim]."""
        graph, heads = self._graph, self._heads
        column = graph.op("Unsqueeze", positions, graph.integers([1, 2]))
        both = np.concatenate([heads.rope, heads.rope])
        angles = graph.op("Mul", graph.op("Cast", column, to=FLOAT), graph.constant(both))
        scale = np.full(heads.dim, heads.rope_scale, np.float32)
        signed = np.where(np.arange(heads.dim) < heads.dim // 2, -scale, scale)
        return (
            graph.op("Mul", graph.op("Cos", angles), graph.constant(scale)),
            graph.op("Mul", graph.op("Sin", angles), graph.constant(signed)),
        )

    def _rotated(self, x: str) -> str:
        """Pairs (i, i + dim / 2) of each head of x [T, heads, dim] turned by their angles."""
        graph, half = self._graph, self._heads.dim // 2
        first, second = graph.split(x, [half, half])
        swapped = graph.op("Concat", second, first, axis=-1)
        return graph.op(
            "Add",
            graph.op("Mul", x, self._cosines),
            graph.op("Mul", swapped, self._sines),
        )

    def layer(
        self,
        qkv: str,
        layer: int,
        *,
        mask: int = 0,
        head_norm: tuple[Float32, float] | None = None,
    ) -> str:
        """[N, query_size] from qkv [T, query_size + 2 * kv_size] and the layer's cache, which the
        graph takes as `cache.<layer>` and gives as `written.<layer>`, for the same memory.

        head_norm: norm weights [query and key heads, dim] and epsilon.
        """
        graph, heads = self._graph, self._heads
        turned, values = graph.split(qkv, [heads.query_size + heads.kv_size, heads.kv_size])
        turned = graph.reshape(turned, 0, -1, heads.dim)
        if head_norm is not None:
            turned = norm(graph, turned, *head_norm)
        queries, keys = graph.split(self._rotated(turned), [heads.queries, heads.keys], axis=1)
        fresh = graph.op("Concat", graph.reshape(keys, 0, heads.kv_size), values, axis=-1)
        shape: list[int | str] = ["slots", 2 * heads.kv_size]
        before = graph.input(f"cache.{layer}", shape, FLOAT)
        cache = graph.output_op(f"written.{layer}", shape, "ScatterND", before, self._slots, fresh)
        return self._attend(queries, cache, self._masks[mask])

    def _attend(self, queries: str, cache: str, mask: str) -> str:
        graph, heads = self._graph, self._heads
        group, strips = heads.queries // heads.keys, heads.dim // self._strip
        context = graph.op("Gather", cache, self._context)
        keys, values = graph.split(context, [heads.kv_size, heads.kv_size])
        keys = graph.reshape(keys, 0, 0, heads.keys, heads.dim)
        keys = graph.op("Transpose", keys, perm=[0, 2, 3, 1])
        values = graph.reshape(values, 0, 0, heads.keys, strips, self._strip)
        values = graph.op("Transpose", values, perm=[0, 2, 3, 1, 4])
        asked = graph.op("Gather", queries, self._query_index)
        asked = graph.reshape(asked, 0, 0, heads.keys, group, heads.dim)
        asked = graph.op("Transpose", asked, perm=[0, 2, 3, 1, 4])
        asked = graph.reshape(asked, 0, heads.keys, -1, heads.dim)
        scale = graph.constant(np.array(1 / math.sqrt(heads.dim)))
        scores = graph.op("MatMul", graph.op("Mul", asked, scale), keys)
        shares = graph.op("Softmax", graph.op("Add", scores, mask), axis=-1)
        mixed = graph.op("MatMul", graph.op("Unsqueeze", shares, graph.integers([2])), values)
        mixed = graph.reshape(mixed, 0, heads.keys, strips, group, -1, self._strip)
        mixed = graph.op("Transpose", mixed, perm=[0, 4, 1, 3, 2, 5])
        mixed = graph.reshape(mixed, -1, heads.query_size)
        return graph.op("Gather", mixed, self._rows)


def gated(graph: GraphBuilder, gate_up: str, inner: int) -> str:
    """silu(gate) * up of [.., 2 * inner]."""
    gate, up = graph.split(gate_up, [inner, inner])
    silu = graph.op("Mul", gate, graph.op("Sigmoid", gate))
    return graph.op("Mul", silu, up)
