"""A ragged batch turned into index tensors, once per forward, shared by all layers.

Attention runs on groups of spans padded to one shape. A span is a run of tokens of one sequence
whose keys are padded to the same length. The `heads / kv_heads` query heads that share a KV head
are folded into rows, [S, kv_heads, rows, head_dim], so a key is read once for all of them.

torch's CPU attention gives a row the same bits among any rows if their number is a multiple of
`ROW_PAD`, but not with any number of keys: 1 bf16 row in 1,000 changes with masked keys added
(torch 2.13), because the product over the keys is split by their number. So the padded number of
keys follows from the token's own position and from nothing else. `torch_selftest` checks it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mirror_sd.backends.protocol import Int32, RaggedBatch
from mirror_sd.backends.torch_linear import MIN_ROWS

Int64 = NDArray[np.int64]
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
class _Span:
    """Tokens begin..end-1 of the batch, all of one sequence."""

    sequence: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """S spans of one padded shape.

    query_rows: [S * kv_heads * rows] into the [tokens * heads] query vectors.
    units:      [S * keys / unit] into the cache seen as units of slots.
    masks:      window -> [S, 1, rows, keys], 0 where a row may look and -inf elsewhere.
    """

    spans: int
    rows: int
    keys: int
    query_rows: Tensor
    units: Tensor
    masks: dict[int | None, Tensor]


@dataclass(frozen=True, slots=True)
class Plan:
    """tokens: T; padded: rows of every matrix product, >= MIN_ROWS.

    token_ids, positions: [padded]; slots: [T] cache slot of each token; output_rows:
    [padded * heads] into the groups' outputs laid end to end; logit_rows: [>= MIN_ROWS].
    """

    tokens: int
    padded: int
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    groups: list[AttentionGroup]
    output_rows: Tensor
    logit_rows: Tensor


def make_plan(batch: RaggedBatch, geometry: Geometry) -> Plan:
    """The plan of a checked batch."""
    tokens = len(batch.token_ids)
    padded = padded_rows(tokens)
    device = geometry.device
    groups, output_rows = _attention_groups(batch, geometry, padded)
    return Plan(
        tokens=tokens,
        padded=padded,
        token_ids=_tensor(_padded(batch.token_ids, padded), device),
        positions=_tensor(_padded(batch.positions, padded), device),
        slots=_tensor(_slots(batch, geometry.block_size), device),
        groups=groups,
        output_rows=output_rows,
        logit_rows=_tensor(_padded(batch.logit_rows, max(len(batch.logit_rows), MIN_ROWS)), device),
    )


def padded_rows(tokens: int) -> int:
    """Few distinct row counts, because oneDNN compiles a kernel for each: 4, 8, 16, 24, ..."""
    if tokens <= MIN_ROWS:
        return MIN_ROWS
    step = 8 if tokens <= 64 else 32
    return -(-tokens // step) * step


def _slots(batch: RaggedBatch, block_size: int) -> Int64:
    slots = np.empty(len(batch.token_ids), np.int64)
    for index, table in enumerate(batch.block_tables):
        begin, end = batch.sequence_offsets[index], batch.sequence_offsets[index + 1]
        positions = batch.positions[begin:end]
        slots[begin:end] = table[positions // block_size].astype(np.int64) * block_size
        slots[begin:end] += positions % block_size
    return slots


def padded_keys(position: int) -> int:
    """Keys that the row at a position is given: few distinct numbers, at most half in excess.

    64, 128, 192, 256, 384, 512, 768, 1024, 1536, ...
    """
    pads = position // KEY_PAD + 1
    step = 1 << max((pads - 1).bit_length() - 2, 0)
    return _ceil(pads, step) * KEY_PAD


def padded_query_rows(tokens: int, geometry: Geometry) -> int:
    """Query rows of a span; few distinct numbers, so that groups are large."""
    rows = _ceil(tokens * geometry.shared_heads, ROW_PAD)
    return rows if rows <= 4 * ROW_PAD else _ceil(rows, 4 * ROW_PAD)


def _ceil(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _spans(batch: RaggedBatch, geometry: Geometry) -> dict[tuple[int, int], list[_Span]]:
    """All spans of the batch by (rows, keys)."""
    shapes: dict[tuple[int, int], list[_Span]] = {}
    offsets = batch.sequence_offsets.tolist()
    for index, (begin, end) in enumerate(pairwise(offsets)):
        first = int(batch.positions[begin])
        while begin < end:
            keys = padded_keys(first)
            stop = min(end, begin + keys - first)
            shape = padded_query_rows(stop - begin, geometry), keys
            shapes.setdefault(shape, []).append(_Span(index, begin, stop))
            first, begin = first + stop - begin, stop
    return shapes


def _attention_groups(
    batch: RaggedBatch, geometry: Geometry, padded: int
) -> tuple[list[AttentionGroup], Tensor]:
    output_rows = np.zeros((padded, geometry.num_heads), np.int64)
    groups, start = [], 0
    for (rows, keys), spans in _spans(batch, geometry).items():
        groups.append(_group(batch, geometry, spans, rows, keys))
        _place_outputs(geometry, spans, rows, start, output_rows)
        start += len(spans) * geometry.num_kv_heads * rows
    return groups, _tensor(output_rows.reshape(-1), geometry.device)


def _group(
    batch: RaggedBatch, geometry: Geometry, spans: list[_Span], rows: int, keys: int
) -> AttentionGroup:
    unit, shared = geometry.unit, geometry.shared_heads
    heads = np.arange(geometry.num_heads).reshape(geometry.num_kv_heads, 1, shared)
    query_rows = np.empty((len(spans), geometry.num_kv_heads, rows), np.int64)
    # A padding row looks at key 0 alone; its output is never read.
    row_positions = np.zeros((len(spans), rows), np.int64)
    units = np.empty((len(spans), keys // unit), np.int64)
    for place, span in enumerate(spans):
        used = (span.end - span.begin) * shared
        tokens = np.arange(span.begin, span.end).reshape(1, -1, 1) * geometry.num_heads
        query_rows[place, :, :used] = (tokens + heads).reshape(geometry.num_kv_heads, used)
        query_rows[place, :, used:] = query_rows[place, :, :1]
        row_positions[place, :used] = np.repeat(batch.positions[span.begin : span.end], shared)
        context = int(batch.positions[span.end - 1]) + 1
        units[place] = _units(batch.block_tables[span.sequence], geometry, context, keys)
    positions = torch.from_numpy(row_positions).to(geometry.device)
    return AttentionGroup(
        spans=len(spans),
        rows=rows,
        keys=keys,
        query_rows=_tensor(query_rows.reshape(-1), geometry.device),
        units=_tensor(units.reshape(-1), geometry.device),
        masks={window: _mask(positions, keys, window, geometry) for window in geometry.windows},
    )


def _units(table: Int32, geometry: Geometry, context: int, keys: int) -> Int64:
    """Units that hold keys 0..keys-1; beyond the context the first one, masked, stands in."""
    per_block = geometry.block_size // geometry.unit
    blocks = table[: -(-context // geometry.block_size)].astype(np.int64)
    held = (blocks[:, None] * per_block + np.arange(per_block)).reshape(-1)[: keys // geometry.unit]
    units = np.full(keys // geometry.unit, held[0], np.int64)
    units[: len(held)] = held
    return units


def _mask(positions: Tensor, keys: int, window: int | None, geometry: Geometry) -> Tensor:
    columns = torch.arange(keys, device=geometry.device)
    hidden = columns > positions[..., None]
    if window is not None:
        hidden |= columns <= positions[..., None] - window
    mask = torch.zeros(hidden.shape, dtype=geometry.dtype, device=geometry.device)
    return mask.masked_fill_(hidden, -math.inf)[:, None]


def _place_outputs(
    geometry: Geometry, spans: list[_Span], rows: int, start: int, output_rows: Int64
) -> None:
    shared = geometry.shared_heads
    head = np.arange(geometry.num_heads)
    for place, span in enumerate(spans):
        within = np.arange(span.end - span.begin)[:, None] * shared + head % shared
        first = start + (place * geometry.num_kv_heads + head // shared) * rows
        output_rows[span.begin : span.end] = first + within


def _padded(values: NDArray[np.int32], length: int) -> Int64:
    padded = np.zeros(length, np.int64)
    padded[: len(values)] = values
    return padded


def _tensor(values: Int64, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)
