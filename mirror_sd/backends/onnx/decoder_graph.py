"""A program as one ONNX graph.

Besides the inputs of `PagedAttention` it takes token_ids [T] and logit_rows [R], and gives logits
[R, vocab] and hidden.<i> [T, hidden], the residual stream after layer i of 1..layers.
"""

from __future__ import annotations

import numpy as np

from mirror_sd.backends.onnx.attention import Heads, PagedAttention, gated, norm
from mirror_sd.backends.onnx.graph import GraphBuilder
from mirror_sd.backends.onnx.products import Products
from mirror_sd.backends.protocol import Float32
from mirror_sd.uir.model_spec import ModelSpec
from mirror_sd.uir.program import Program
from mirror_sd.uir.rope import inverse_frequencies


def heads_of(spec: ModelSpec) -> Heads:
    frequencies, scale = inverse_frequencies(spec)
    return Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim, frequencies, scale)


def windows_of(spec: ModelSpec) -> list[int | None]:
    """The windows of the masks 0, 1, ..; each once."""
    return list(dict.fromkeys(spec.windows))


def export(program: Program, products: Products) -> GraphBuilder:
    """The graph, with the weights that it needs in the products' precision."""
    return _Export(program, products).graph


class _Export:
    def __init__(self, program: Program, products: Products) -> None:
        self._spec, self._weights = program.spec, program.weights
        self._products = products
        self.graph = GraphBuilder(program.name)
        windows = windows_of(self._spec)
        self._attention = PagedAttention(self.graph, heads_of(self._spec), len(windows))
        x = self._embedded(self.graph.input("token_ids", ["T"]))
        for layer, window in enumerate(self._spec.windows):
            x = self._layer(layer, x, windows.index(window))
        self._logits(x)

    def _embedded(self, ids: str) -> str:
        matrix = self._weights.load("embedding")
        if self._spec.tied_embeddings and self._products.shares_table:
            # Under the name of the product's weights, which have the same form.
            return self._products.table(self.graph, "head", matrix, ids)
        return self._products.table(self.graph, "embedding", matrix, ids)

    def _layer(self, layer: int, x: str, mask: int) -> str:
        graph, spec = self.graph, self._spec
        h = norm(graph, x, self._weight(layer, "attention_norm"), spec.rms_eps)
        mixed = self._attention.layer(
            self._product(layer, ("q", "k", "v"), h),
            layer,
            mask=mask,
            head_norm=self._head_norm(layer) if spec.qk_norm else None,
        )
        x = graph.op("Add", x, self._product(layer, ("o",), mixed))
        h = norm(graph, x, self._weight(layer, "mlp_norm"), spec.rms_eps)
        inner = gated(graph, self._product(layer, ("gate", "up"), h), spec.intermediate_size)
        shape: list[int | str] = ["T", spec.hidden_size]
        down = self._product(layer, ("down",), inner)
        return graph.output_op(f"hidden.{layer + 1}", shape, "Add", x, down)

    def _logits(self, x: str) -> None:
        graph, spec = self.graph, self._spec
        wanted = graph.op("Gather", x, graph.input("logit_rows", ["R"]))
        wanted = norm(graph, wanted, self._weights.load("final_norm"), spec.rms_eps)
        matrix = self._weights.load("embedding" if spec.tied_embeddings else "head")
        logits = self._products.linear(graph, "head", wanted, matrix)
        graph.output("logits", logits, ["R", spec.vocab_size])

    def _product(self, layer: int, roles: tuple[str, ...], x: str) -> str:
        """x times the matrices of the roles, their outputs side by side."""
        matrix = np.concatenate([self._weight(layer, role) for role in roles])
        name = f"layers.{layer}.{'_'.join(roles)}"
        result = self._products.linear(self.graph, name, x, matrix)
        if f"layers.{layer}.{roles[0]}_bias" not in self._weights.tensors:
            return result
        bias = np.concatenate([self._weight(layer, f"{role}_bias") for role in roles])
        return self.graph.op("Add", result, self.graph.constant(bias))

    def _head_norm(self, layer: int) -> tuple[Float32, float]:
        rows = [self._weight(layer, "q_norm")] * self._spec.num_heads
        rows += [self._weight(layer, "k_norm")] * self._spec.num_kv_heads
        return np.stack(rows), self._spec.rms_eps

    def _weight(self, layer: int, role: str) -> Float32:
        return self._weights.load(f"layers.{layer}.{role}")
