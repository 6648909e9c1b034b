"""The protocol's face of a decoder's graph on ONNX Runtime."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mirror_sd.backends import batch_check, block_table, stability, tapped
from mirror_sd.backends.onnx import decoder_graph, tiles
from mirror_sd.backends.onnx.onnx_draft import OnnxDraftHead
from mirror_sd.backends.onnx.products import Precision, Products
from mirror_sd.backends.onnx.providers import Provider
from mirror_sd.backends.onnx.session import GraphSession
from mirror_sd.backends.protocol import Capabilities, Float32, RaggedBatch
from mirror_sd.uir.draft_file import DraftProgram
from mirror_sd.uir.program import Program

log = logging.getLogger(__name__)
# A sequence with more tokens than this would widen the rectangle of all the others' queries.
_MOST_TOGETHER = 16


class OnnxBackend:
    """Raises `ValueError` on a bad batch and leaves the cache as it was. Keys and values are fp32
    in every precision."""

    def __init__(
        self, program: Program, provider: Provider, precision: Precision, threads: int
    ) -> None:
        self._spec, self._weights = program.spec, program.weights
        self._provider, self._precision, self._threads = provider, precision, threads
        self._windows = decoder_graph.windows_of(program.spec)
        # A product with a single row may be summed in another order than one with more.
        self._least_queries = 1 if program.spec.num_heads > program.spec.num_kv_heads else 2
        graph = decoder_graph.export(program, Products(precision, provider))
        self._session = GraphSession(graph, provider, threads)
        del graph
        self._num_blocks = self._block_size = 0
        self._taps: tuple[int, ...] = ()
        self._features = np.empty((0, 0), np.float32)
        self._capabilities = Capabilities(
            name="onnxruntime",
            device=provider.name,
            precision=precision,
            vocab_size=self._spec.vocab_size,
            max_context=self._spec.max_context,
            bit_stable=self._tests_stable(provider, precision),
            detail=provider.chain[0],
            num_layers=self._spec.num_layers,
            hidden_size=self._spec.hidden_size,
        )

    def _tests_stable(self, provider: Provider, precision: str) -> bool:
        is_stable = stability.is_bit_stable(
            self, vocab_size=self._spec.vocab_size, max_context=self._spec.max_context
        )
        self._num_blocks = self._block_size = 0
        if not is_stable:
            log.warning(
                "onnxruntime on %s in %s gives a row different bits in different batches: near-ties"
                " may be decided differently under load",
                provider.name,
                precision,
            )
        return is_stable

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def draft_head(self, program: DraftProgram) -> OnnxDraftHead:
        """A head on this model, where and as this model is computed."""
        return OnnxDraftHead(
            program,
            self._capabilities,
            self._weights.load("embedding"),
            provider=self._provider,
            precision=self._precision,
            threads=self._threads,
        )

    def kv_bytes_per_block(self, block_size: int) -> int:
        return 2 * 4 * self._spec.kv_size * self._spec.num_layers * block_size

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        batch_check.check_cache(num_blocks, block_size)
        # And one that stays zero, for padding.
        shape = (num_blocks * block_size + 1, 2 * self._spec.kv_size)
        self._session.allocate(self._spec.num_layers, shape)
        self._num_blocks, self._block_size = num_blocks, block_size

    def forward(self, batch: RaggedBatch) -> Float32:
        batch_check.check(
            batch,
            vocab_size=self._spec.vocab_size,
            max_context=self._spec.max_context,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
        )
        logits = np.empty((len(batch.logit_rows), self._spec.vocab_size), np.float32)
        width = len(self._taps) * self._spec.hidden_size
        self._features = np.empty((len(batch.token_ids), width), np.float32)
        for sequences in _groups(np.diff(batch.sequence_offsets)):
            self._run(batch, sequences, logits)
        return logits

    def _run(self, batch: RaggedBatch, sequences: list[int], logits: Float32) -> None:
        """One run over some of the sequences; their rows of `logits` and of the features."""
        offsets = batch.sequence_offsets
        spans = [np.arange(offsets[i], offsets[i + 1]) for i in sequences]
        tokens = np.concatenate(spans)
        positions = [batch.positions[span].astype(np.int64) for span in spans]
        tables = [batch.block_tables[i] for i in sequences]
        slots = [
            block_table.slots_of(table, at, self._block_size)
            for table, at in zip(tables, positions, strict=True)
        ]
        starts = np.cumsum([0, *(len(span) for span in spans[:-1])])
        wanted = np.isin(batch.logit_rows, tokens)
        rows = np.searchsorted(tokens, batch.logit_rows[wanted])
        feeds = tiles.attention_feeds(
            [start + np.arange(len(span)) for start, span in zip(starts, spans, strict=True)],
            positions,
            tables,
            block_size=self._block_size,
            padding_slot=self._num_blocks * self._block_size,
            windows=self._windows,
            least_queries=self._least_queries,
        )
        feeds |= {
            "token_ids": batch.token_ids[tokens].astype(np.int64),
            "positions": np.concatenate(positions),
            "slots": np.concatenate(slots),
            # None wanted: one is computed all the same, since not all providers know empty tensors.
            "logit_rows": rows if len(rows) else np.zeros(1, np.int64),
        }
        found, *hidden = self._session.run(feeds, ["logits", *(f"hidden.{i}" for i in self._taps)])
        if len(rows):
            logits[wanted] = found
        if hidden:
            self._features[tokens] = np.concatenate(hidden, axis=1)

    def tap(self, layers: Sequence[int]) -> None:
        self._taps = tapped.checked(layers, self._spec.num_layers)
        self._features = np.empty((0, len(self._taps) * self._spec.hidden_size), np.float32)

    @property
    def features(self) -> Float32:
        return self._features


def _groups(counts: NDArray[np.int32]) -> list[list[int]]:
    """Sequences of few tokens together, each longer one by itself."""
    short = [i for i, count in enumerate(counts) if count <= _MOST_TOGETHER]
    longer = [[i] for i, count in enumerate(counts) if count > _MOST_TOGETHER]
    return [short, *longer] if short else longer
