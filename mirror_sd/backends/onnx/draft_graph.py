"""A draft head as two ONNX graphs; `uir.draft_file` says what they compute.

`fusion`: features [T, F] -> states [T, hidden]. `layer`: token_ids [T], states [T, hidden],
drafting_rows [R] and the inputs of `PagedAttention`, whose token_rows are to give R results in the
order of drafting_rows -> outputs [R, hidden], logits [R, draft vocabulary].
"""

from __future__ import annotations

import numpy as np

from mirror_sd.backends.onnx.attention import Heads, PagedAttention, gated, norm
from mirror_sd.backends.onnx.graph import FLOAT, GraphBuilder
from mirror_sd.backends.onnx.products import Products
from mirror_sd.backends.protocol import Float32
from mirror_sd.uir.draft_file import DraftProgram
from mirror_sd.uir.rope import plain_frequencies


def fusion(program: DraftProgram, products: Products) -> GraphBuilder:
    matrix = program.weights["fuse_features"]
    graph = GraphBuilder("fusion")
    features = graph.input("features", ["T", matrix.shape[1]], FLOAT)
    states = products.linear(graph, "fuse_features", features, matrix)
    graph.output("states", states, ["T", matrix.shape[0]])
    return graph


def layer(program: DraftProgram, embedding: Float32, products: Products) -> GraphBuilder:
    """embedding: [vocab, hidden] of the target."""
    return _Layer(program, embedding, products).graph


class _Layer:
    def __init__(self, program: DraftProgram, embedding: Float32, products: Products) -> None:
        spec = self._spec = program.spec
        self._weights, self._products = program.weights, products
        graph = self.graph = GraphBuilder("draft")
        frequencies = plain_frequencies(spec.rope_theta, spec.head_dim)
        heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim, frequencies)
        attention = PagedAttention(graph, heads)
        ids = graph.input("token_ids", ["T"])
        states = graph.input("states", ["T", spec.hidden_size], FLOAT)
        rows = graph.input("drafting_rows", ["R"])
        inputs = (
            self._norm("embedding_norm", products.table(graph, "embedding", embedding, ids)),
            self._norm("feature_norm", states),
        )
        x = self._product(("fuse_input",), graph.op("Concat", *inputs, axis=-1))
        h = self._norm("attention_norm", x)
        mixed = attention.layer(self._product(("q", "k", "v"), h), 0)
        x = graph.op("Add", graph.op("Gather", x, rows), self._product(("o",), mixed))
        h = self._norm("mlp_norm", x)
        inner = gated(graph, self._product(("gate", "up"), h), spec.intermediate_size)
        down = self._product(("down",), inner)
        x = graph.output_op("outputs", ["R", spec.hidden_size], "Add", x, down)
        logits = self._product(("head",), self._norm("final_norm", x))
        graph.output("logits", logits, ["R", spec.draft_vocab_size])

    def _norm(self, name: str, x: str) -> str:
        return norm(self.graph, x, self._weights[name], self._spec.rms_eps)

    def _product(self, names: tuple[str, ...], x: str) -> str:
        matrix = np.concatenate([self._weights[name] for name in names])
        return self._products.linear(self.graph, "_".join(names), x, matrix)
