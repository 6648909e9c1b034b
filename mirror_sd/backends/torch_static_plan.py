"""Plans of few shapes for accelerators, so that a step can be captured once and replayed.

A sequence's new tokens are cut into spans of at most `SPAN_TOKENS`, whether they are one token of a
decode, a draft to verify or a piece of a prompt. So all three pass through products and attention
of the same shapes, and only the number of spans and of tiles of rows differs. All indexes of a
batch lie in one buffer of int64, which is one copy to the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mirror_sd.backends.block_table import Int64
from mirror_sd.backends.protocol import RaggedBatch
from mirror_sd.backends.torch_attention import AttentionGroup, GroupedAttention, masks
from mirror_sd.backends.torch_linear import TILE_ROWS
from mirror_sd.backends.torch_plan import (
    Geometry,
    HostGroup,
    Plan,
    Span,
    ceil,
    host_group,
    padded_ids,
    place_outputs,
    slots_of,
    spans_of,
)

SPAN_TOKENS = 16
LEAST_KEYS = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """rows: of every matrix product; groups: (spans, keys) ascending in keys; logit_rows."""

    rows: int
    groups: tuple[tuple[int, int], ...]
    logit_rows: int


def power_of_two(value: int, least: int = 1) -> int:
    """The least power of two that is neither below the value nor below `least`."""
    return max(least, 1 << max(value - 1, 0).bit_length())


def static_keys(position: int) -> int:
    """Keys that the row at a position is given: 256, 512, 1024, ..."""
    return power_of_two(position + 1, LEAST_KEYS)


class StaticPlanner:
    """scratch_slot: the cache slot that padding rows write to."""

    def __init__(self, geometry: Geometry, scratch_slot: int) -> None:
        self._geometry = geometry
        self._scratch_slot = scratch_slot
        self._rows = ceil(SPAN_TOKENS * geometry.shared_heads, 16)

    def host(self, batch: RaggedBatch) -> tuple[Shape, Int64]:
        """The shape of a checked batch, and its indexes for that shape."""
        rows = ceil(len(batch.token_ids), TILE_ROWS)
        by_keys: dict[int, list[Span]] = {}
        for span in sorted(spans_of(batch, static_keys, SPAN_TOKENS), key=lambda s: s.keys):
            by_keys.setdefault(span.keys, []).append(span)
        groups = tuple((power_of_two(len(spans)), keys) for keys, spans in by_keys.items())
        shape = Shape(rows, groups, ceil(max(len(batch.logit_rows), 1), TILE_ROWS))
        return shape, np.concatenate(list(self._sections(batch, shape, by_keys)))

    def blank(self, shape: Shape) -> Int64:
        """Indexes of a batch that is all padding."""
        geometry = self._geometry
        per_span = (geometry.num_kv_heads + 1) * self._rows
        size = 3 * shape.rows + shape.logit_rows + shape.rows * geometry.num_heads
        size += sum(n * (per_span + keys // geometry.unit) for n, keys in shape.groups)
        indexes = np.zeros(size, np.int64)
        indexes[2 * shape.rows : 3 * shape.rows] = self._scratch_slot
        return indexes

    def _sections(
        self, batch: RaggedBatch, shape: Shape, by_keys: dict[int, list[Span]]
    ) -> Iterator[Int64]:
        geometry = self._geometry
        yield padded_ids(batch.token_ids, shape.rows)
        yield padded_ids(batch.positions, shape.rows)
        slots = np.full(shape.rows, self._scratch_slot, np.int64)
        slots[: len(batch.token_ids)] = slots_of(batch, geometry.block_size)
        yield slots
        yield padded_ids(batch.logit_rows, shape.logit_rows)
        output_rows = np.zeros((shape.rows, geometry.num_heads), np.int64)
        start = 0
        for (count, keys), spans in zip(shape.groups, by_keys.values(), strict=True):
            group = host_group(batch, geometry, spans, self._rows, keys)
            place_outputs(geometry, spans, self._rows, start, output_rows)
            start += count * geometry.num_kv_heads * self._rows
            yield from _padded_group(group, count)
        yield output_rows.reshape(-1)

    def plan(self, shape: Shape, indexes: Tensor) -> Plan:
        """The plan whose indexes lie in a device buffer; masks are computed there."""
        geometry = self._geometry
        take = _Sections(indexes)
        token_ids, positions, slots = (take.next(shape.rows) for _ in range(3))
        logit_rows = take.next(shape.logit_rows)
        groups = [self._group(take, spans, keys) for spans, keys in shape.groups]
        output_rows = take.next(shape.rows * geometry.num_heads)
        return Plan(
            tokens=shape.rows,
            padded=shape.rows,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            attention=GroupedAttention(groups, output_rows, geometry.num_kv_heads),
            logit_rows=logit_rows,
        )

    def _group(self, take: _Sections, spans: int, keys: int) -> AttentionGroup:
        geometry = self._geometry
        query_rows = take.next(spans * geometry.num_kv_heads * self._rows)
        positions = take.next(spans * self._rows).view(spans, self._rows)
        return AttentionGroup(
            spans=spans,
            rows=self._rows,
            keys=keys,
            query_rows=query_rows,
            units=take.next(spans * keys // geometry.unit),
            masks=masks(positions, keys, geometry.windows, geometry.dtype),
        )


class _Sections:
    """Consecutive pieces of a buffer."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._start = 0

    def next(self, length: int) -> Tensor:
        self._start += length
        return self._buffer[self._start - length : self._start]


def _padded_group(group: HostGroup, spans: int) -> Iterator[Int64]:
    """With copies of the first span, whose outputs are never read, up to so many spans."""
    for values in (group.query_rows, group.positions, group.units):
        more = np.broadcast_to(values[:1], (spans - len(values), *values.shape[1:]))
        yield np.concatenate((values, more)).reshape(-1)
