"""Forwards in few shapes on an accelerator; on CUDA each shape is captured once and then replayed.

A forward of a small model launches some 500 kernels, which takes the host longer than the GPU: a
CUDA graph launches them at once. On other devices, and on a CPU in tests, the same plans run
without graphs.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mirror_sd.backends.protocol import Float32, RaggedBatch
from mirror_sd.backends.torch_decoder import TorchDecoder
from mirror_sd.backends.torch_linear import TILE_ROWS
from mirror_sd.backends.torch_plan import Geometry
from mirror_sd.backends.torch_static_plan import LEAST_KEYS, Shape, StaticPlanner
from mirror_sd.backends.torch_transfer import transfer_of

log = logging.getLogger(__name__)

# Beyond it a forward is a prompt's, whose kernels take longer than their launches.
GRAPH_ROWS = 512
MOST_GRAPHS = 96
# Spans of the batches whose shapes are captured before the first request.
WARM_SPANS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class _Captured:
    indexes: Tensor
    graph: torch.cuda.CUDAGraph


class StaticForward:
    """cache: [layers, slots, 2 * kv_heads, head_dim]; its last slot, in no sequence's block, takes
    what padding rows write. layers limits the depth. `captures` counts graphs: it stops growing
    once the shapes of a load were seen."""

    def __init__(
        self, decoder: TorchDecoder, geometry: Geometry, cache: Tensor, layers: int | None = None
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._layers = layers
        self._planner = StaticPlanner(geometry, cache.shape[1] - 1)
        self._transfer = transfer_of(geometry.device)
        self._has_graphs = geometry.device.type == "cuda" and layers is None
        self._graphs: OrderedDict[Shape, _Captured] = OrderedDict()
        # Where results appear, by rows: shared by all graphs, as each is read before the next runs.
        self._logits: dict[int, Tensor] = {}
        self._features: dict[int, Tensor] = {}
        self._taps: tuple[int, ...] = ()
        self._pool: Any = None
        self.captures = 0

    def tap(self, layers: tuple[int, ...]) -> None:
        """As `Backend.tap`; graphs that were captured with other taps are dropped."""
        if layers != self._taps:
            self._taps = layers
            self._graphs.clear()
            self._features.clear()

    def warm_up(self) -> None:
        """Capture the shapes of small decodes and verifications."""
        if self._has_graphs:
            with torch.inference_mode():
                for spans in WARM_SPANS:
                    self._captured(Shape(TILE_ROWS, ((spans, LEAST_KEYS),), TILE_ROWS))

    def __call__(self, batch: RaggedBatch) -> tuple[Float32, Float32]:
        """(logits [R, vocab], features [T, taps * hidden]) of a checked batch."""
        with torch.inference_mode():
            shape, indexes = self._planner.host(batch)
            if self._has_graphs and shape.rows <= GRAPH_ROWS:
                captured = self._captured(shape)
                self._transfer.upload(indexes, captured.indexes)
                captured.graph.replay()
            else:
                on_device = torch.empty(len(indexes), dtype=torch.int64, device=self._cache.device)
                self._transfer.upload(indexes, on_device)
                self._run(shape, on_device)
            wanted = [self._logits[shape.logit_rows][: len(batch.logit_rows)]]
            if self._taps:
                wanted.append(self._features[shape.rows][: len(batch.token_ids)])
            logits, *features = self._transfer.download(wanted)
        if not features:
            return logits, np.empty((len(batch.token_ids), 0), np.float32)
        return logits, features[0]

    def _run(self, shape: Shape, indexes: Tensor) -> None:
        """Leave the results in `_logits` and `_features`."""
        kept = dict.fromkeys(self._taps, indexes)
        plan = self._planner.plan(shape, indexes)
        logits = self._decoder.forward(plan, self._cache, self._layers, tapped=kept)
        _keep(self._logits, logits)
        if kept:
            _keep(self._features, torch.cat(list(kept.values()), dim=1))

    def _captured(self, shape: Shape) -> _Captured:
        found = self._graphs.get(shape)
        if found is not None:
            self._graphs.move_to_end(shape)
            return found
        indexes = torch.from_numpy(self._planner.blank(shape)).to(self._cache.device)
        aside = torch.cuda.Stream(self._cache.device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            # Libraries choose kernels and take workspaces at a first call.
            self._run(shape, indexes)
        torch.cuda.current_stream().wait_stream(aside)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._run(shape, indexes)
        self.captures += 1
        log.debug("graph %d is of %s", self.captures, shape)
        self._graphs[shape] = captured = _Captured(indexes, graph)
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return captured


def _keep(results: dict[int, Tensor], values: Tensor) -> None:
    """Copy into the buffer for so many rows, which every later graph writes to."""
    target = results.get(len(values))
    if target is None:
        target = results[len(values)] = torch.empty_like(values)
    target.copy_(values)
