"""The draft head on ONNX Runtime, whatever computes its target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mirror_sd.backends.onnx import draft_graph, tiles
from mirror_sd.backends.onnx.products import Precision, Products
from mirror_sd.backends.onnx.providers import Provider
from mirror_sd.backends.onnx.session import GraphSession
from mirror_sd.backends.protocol import Capabilities, DraftBatch, Float32
from mirror_sd.backends.stepped_draft import DraftRows, SteppedDraft
from mirror_sd.uir.draft_file import DraftProgram

_ONE = np.zeros(1, np.int64)


class OnnxDraftHead(SteppedDraft[Float32]):
    def __init__(
        self,
        program: DraftProgram,
        target: Capabilities,
        embedding: Float32,
        *,
        provider: Provider,
        precision: Precision,
        threads: int,
    ) -> None:
        """embedding: [vocab, hidden] of the target. Raises `UnsupportedModel` for a draft that
        does not fit, `ConfigError` where the provider does not start."""
        super().__init__(program, target)
        products = Products(precision, provider)
        self._fusion = GraphSession(draft_graph.fusion(program, products), provider, threads)
        graph = draft_graph.layer(program, embedding, products)
        self._layer = GraphSession(graph, provider, threads)
        self._padding_slot = 0

    def _allocate(self, slots: int) -> None:
        width = 2 * self._spec.num_kv_heads * self._spec.head_dim
        self._layer.allocate(1, (slots + 1, width))
        self._padding_slot = slots

    def _fused(self, features: Float32) -> Float32:
        return self._fusion.run({"features": features}, ["states"])[0]

    def _pass(self, batch: DraftBatch, rows: DraftRows, states: Float32) -> tuple[Float32, Float32]:
        # Where nothing is drafted, one row is computed all the same: not all providers know empty
        # tensors.
        indexes = np.array(rows.indexes, np.int64) if rows.indexes else _ONE
        tables = [batch.block_tables[i] for i in rows.sequences] or [batch.block_tables[0]]
        asking: list[NDArray[np.int64]] = list(indexes[:, None])
        feeds = tiles.attention_feeds(
            asking,
            [rows.positions[index] for index in asking],
            tables,
            block_size=self._block_size,
            padding_slot=self._padding_slot,
        )
        feeds |= {
            "token_ids": rows.token_ids,
            "positions": rows.positions,
            "slots": rows.slots,
            "states": states,
            "drafting_rows": indexes,
        }
        outputs, logits = self._layer.run(feeds, ["outputs", "logits"])
        return outputs[: len(rows.indexes)], logits[: len(rows.indexes)]

    def _taken(self, outputs: Float32, rows: Sequence[int]) -> Float32:
        return outputs[list(rows)]
