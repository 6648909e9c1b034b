"""A ragged batch turned into index tensors, once per forward, shared by all layers.

Attention runs on groups of spans padded to one shape (`torch_attention`). A span is a run of tokens
of one sequence whose keys are padded to the same length.

torch's CPU attention gives a row the same bits among any rows if their number is a multiple of
`ROW_PAD`, but not with any number of keys: 1 bf16 row in 1,000 changes with masked keys added
(torch 2.13), because the product over the keys is split by their number. So the padded number of
keys follows from the token's own position and from nothing else. `torch_selftest` checks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mirror_sd.backends import block_table
from mirror_sd.backends.block_table import Int64
from mirror_sd.backends.protocol import Int32, RaggedBatch
from mirror_sd.backends.torch_attention import AttentionGroup, GroupedAttention, masks
from mirror_sd.backends.torch_linear import MIN_ROWS

ROW_PAD = 4
KEY_PAD = 64


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a plan depends on besides the batch."""

    num_heads: int
    num_kv_heads: int
    block_size: int
    windows: tuple[int | None, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def shared_heads(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def unit(self) -> int:
        """Slots gathered in one piece: divides both a block and the padding of keys."""
        return math.gcd(self.block_size, KEY_PAD)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens begin..end-1 of the batch, all of one sequence, which are given so many keys."""

    sequence: int
    begin: int
    end: int
    keys: int


@dataclass(frozen=True, slots=True)
class HostGroup:
    """S spans of one padded shape, not yet on the device.

    query_rows: [S, kv_heads, rows] into the [tokens * heads] query vectors; positions: [S, rows];
    units: [S, keys / unit] into the cache seen as units of slots.
    """

    query_rows: Int64
    positions: Int64
    units: Int64


@dataclass(frozen=True, slots=True)
class Plan:
    """tokens: T whose keys and values are written; padded: rows of every matrix product.

    token_ids, positions: [padded]; slots: [T] cache slot of each token; logit_rows: at least
    MIN_ROWS.
    """

    tokens: int
    padded: int
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    attention: GroupedAttention
    logit_rows: Tensor


def make_plan(batch: RaggedBatch, geometry: Geometry) -> Plan:
    """The plan of a checked batch."""
    tokens = len(batch.token_ids)
    padded = padded_rows(tokens)
    device = geometry.device
    return Plan(
        tokens=tokens,
        padded=padded,
        token_ids=_tensor(padded_ids(batch.token_ids, padded), device),
        positions=_tensor(padded_ids(batch.positions, padded), device),
        slots=_tensor(slots_of(batch, geometry.block_size), device),
        attention=_attention(batch, geometry, padded),
        logit_rows=_tensor(
            padded_ids(batch.logit_rows, max(len(batch.logit_rows), MIN_ROWS)), device
        ),
    )


def padded_rows(tokens: int) -> int:
    """Few distinct row counts, because oneDNN compiles a kernel for each: 4, 8, 16, 24, ..."""
    if tokens <= MIN_ROWS:
        return MIN_ROWS
    step = 8 if tokens <= 64 else 32
    return ceil(tokens, step)


def slots_of(batch: RaggedBatch, block_size: int) -> Int64:
    """[T] the cache slot of each token."""
    slots = np.empty(len(batch.token_ids), np.int64)
    for index, table in enumerate(batch.block_tables):
        begin, end = batch.sequence_offsets[index], batch.sequence_offsets[index + 1]
        slots[begin:end] = block_table.slots_of(table, batch.positions[begin:end], block_size)
    return slots


def padded_keys(position: int) -> int:
    """Keys that the row at a position is given: few distinct numbers, at most half in excess.

    64, 128, 192, 256, 384, 512, 768, 1024, 1536, ...
    """
    pads = position // KEY_PAD + 1
    step = 1 << max((pads - 1).bit_length() - 2, 0)
    return ceil(pads, step) * KEY_PAD


def padded_query_rows(tokens: int, geometry: Geometry) -> int:
    """Query rows of a span; few distinct numbers, so that groups are large."""
    rows = ceil(tokens * geometry.shared_heads, ROW_PAD)
    return rows if rows <= 4 * ROW_PAD else ceil(rows, 4 * ROW_PAD)


def ceil(value: int, multiple: int) -> int:
    """The least multiple that is not below the value."""
    return -(-value // multiple) * multiple


def spans_of(
    batch: RaggedBatch, keys_of: Callable[[int], int], longest: int | None = None
) -> list[Span]:
    """The batch cut into spans, none across an edge of `keys_of(position)` or over the length."""
    spans = []
    for index, (begin, end) in enumerate(pairwise(batch.sequence_offsets.tolist())):
        first = int(batch.positions[begin])
        while begin < end:
            keys = keys_of(first)
            stop = min(end, begin + keys - first, begin + (longest or end))
            spans.append(Span(index, begin, stop, keys))
            first, begin = first + stop - begin, stop
    return spans


def _attention(batch: RaggedBatch, geometry: Geometry, padded: int) -> GroupedAttention:
    shapes: dict[tuple[int, int], list[Span]] = {}
    for span in spans_of(batch, padded_keys):
        rows = padded_query_rows(span.end - span.begin, geometry)
        shapes.setdefault((rows, span.keys), []).append(span)
    output_rows = np.zeros((padded, geometry.num_heads), np.int64)
    groups, start = [], 0
    for (rows, keys), spans in shapes.items():
        host = host_group(batch, geometry, spans, rows, keys)
        groups.append(_on_device(host, geometry))
        place_outputs(geometry, spans, rows, start, output_rows)
        start += len(spans) * geometry.num_kv_heads * rows
    return GroupedAttention(
        groups, _tensor(output_rows.reshape(-1), geometry.device), geometry.num_kv_heads
    )


def host_group(
    batch: RaggedBatch, geometry: Geometry, spans: list[Span], rows: int, keys: int
) -> HostGroup:
    """The indexes of spans that have one shape."""
    unit, shared = geometry.unit, geometry.shared_heads
    heads = np.arange(geometry.num_heads).reshape(geometry.num_kv_heads, 1, shared)
    query_rows = np.empty((len(spans), geometry.num_kv_heads, rows), np.int64)
    # A padding row looks at key 0 alone; its output is never read.
    positions = np.zeros((len(spans), rows), np.int64)
    units = np.empty((len(spans), keys // unit), np.int64)
    for place, span in enumerate(spans):
        used = (span.end - span.begin) * shared
        tokens = np.arange(span.begin, span.end).reshape(1, -1, 1) * geometry.num_heads
        query_rows[place, :, :used] = (tokens + heads).reshape(geometry.num_kv_heads, used)
        query_rows[place, :, used:] = query_rows[place, :, :1]
        positions[place, :used] = np.repeat(batch.positions[span.begin : span.end], shared)
        context = int(batch.positions[span.end - 1]) + 1
        units[place] = _units(batch.block_tables[span.sequence], geometry, context, keys)
    return HostGroup(query_rows, positions, units)


def _on_device(host: HostGroup, geometry: Geometry) -> AttentionGroup:
    spans, rows = host.positions.shape
    keys = host.units.shape[1] * geometry.unit
    positions = _tensor(host.positions, geometry.device)
    return AttentionGroup(
        spans=spans,
        rows=rows,
        keys=keys,
        query_rows=_tensor(host.query_rows.reshape(-1), geometry.device),
        units=_tensor(host.units.reshape(-1), geometry.device),
        masks=masks(positions, keys, geometry.windows, geometry.dtype),
    )


def _units(table: Int32, geometry: Geometry, context: int, keys: int) -> Int64:
    """Units that hold keys 0..keys-1; beyond the context the first one, masked, stands in."""
    per_block = geometry.block_size // geometry.unit
    blocks = table[: -(-context // geometry.block_size)].astype(np.int64)
    held = (blocks[:, None] * per_block + np.arange(per_block)).reshape(-1)[: keys // geometry.unit]
    units = np.full(keys // geometry.unit, held[0], np.int64)
    units[: len(held)] = held
    return units


def place_outputs(
    geometry: Geometry, spans: list[Span], rows: int, start: int, output_rows: Int64
) -> None:
    """Note in `output_rows` [padded, heads] where a group, whose outputs begin at `start`, puts
    each token's."""
    shared = geometry.shared_heads
    head = np.arange(geometry.num_heads)
    for place, span in enumerate(spans):
        within = np.arange(span.end - span.begin)[:, None] * shared + head % shared
        first = start + (place * geometry.num_kv_heads + head // shared) * rows
        output_rows[span.begin : span.end] = first + within


def padded_ids(values: Int32, length: int) -> Int64:
    """The values, then zeros."""
    padded = np.zeros(length, np.int64)
    padded[: len(values)] = values
    return padded


def _tensor(values: Int64, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)
