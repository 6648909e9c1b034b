"""A ragged batch turned into index tensors, once per forward, shared by all layers.

Attention runs on groups of sequences padded to one shape. The `heads / kv_heads` query heads that
share a KV head are folded into rows, [S, kv_heads, rows, head_dim], so a key is read once for all
of them. torch's CPU attention kernel gives a row the same bits in any group if the rows are padded
to a multiple of `ROW_PAD` and the keys to a multiple of `KEY_PAD` (masked keys add exact zeros);
`torch_selftest` checks that at load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mirror_sd.backends.protocol import RaggedBatch
from mirror_sd.backends.torch_linear import MIN_ROWS

Int64 = NDArray[np.int64]
ROW_PAD = 4
KEY_PAD = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 512}


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
    def key_pad(self) -> int:
        return KEY_PAD[self.dtype]

    @property
    def unit(self) -> int:
        """Slots gathered in one piece: divides both a block and the padding of keys."""
        return math.gcd(self.block_size, self.key_pad)


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """S sequences of one padded shape.

    query_rows: [S * kv_heads * rows] into the [tokens * heads] query vectors.
    units:      [S * keys / unit] into the cache seen as units of slots.
    masks:      window -> [S, 1, rows, keys], 0 where a row may look and -inf elsewhere.
    """

    sequences: int
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


def _attention_groups(
    batch: RaggedBatch, geometry: Geometry, padded: int
) -> tuple[list[AttentionGroup], Tensor]:
    heads = geometry.num_heads
    shapes: dict[tuple[int, int], list[int]] = {}
    for index in range(len(batch.block_tables)):
        begin, end = batch.sequence_offsets[index], batch.sequence_offsets[index + 1]
        shape = _group_shape(int(end - begin), int(batch.positions[end - 1]) + 1, geometry)
        shapes.setdefault(shape, []).append(index)
    output_rows = np.zeros((padded, heads), np.int64)
    groups, start = [], 0
    for (rows, keys), members in shapes.items():
        group = _group(batch, geometry, members, rows, keys)
        groups.append(group)
        _place_outputs(batch, geometry, members, rows, start, output_rows)
        start += len(members) * geometry.num_kv_heads * rows
    return groups, _tensor(output_rows.reshape(-1), geometry.device)


def _group_shape(tokens: int, context: int, geometry: Geometry) -> tuple[int, int]:
    """(rows, keys) that a sequence is padded to; few distinct ones, so that groups are large."""
    rows = _ceil(tokens * geometry.num_heads // geometry.num_kv_heads, ROW_PAD)
    if rows > 4 * ROW_PAD:
        rows = _ceil(rows, 4 * ROW_PAD)
    # Up to a quarter more keys than needed: 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...
    pads = -(-context // geometry.key_pad)
    step = 1 << max(pads.bit_length() - 3, 0)
    return rows, _ceil(pads, step) * geometry.key_pad


def _ceil(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _group(
    batch: RaggedBatch, geometry: Geometry, members: list[int], rows: int, keys: int
) -> AttentionGroup:
    unit, shared = geometry.unit, geometry.num_heads // geometry.num_kv_heads
    heads = np.arange(geometry.num_heads).reshape(geometry.num_kv_heads, 1, shared)
    query_rows = np.empty((len(members), geometry.num_kv_heads, rows), np.int64)
    # A padding row looks at key 0 alone; its output is never read.
    row_positions = np.zeros((len(members), rows), np.int64)
    units = np.empty((len(members), keys // unit), np.int64)
    for place, index in enumerate(members):
        begin, end = batch.sequence_offsets[index], batch.sequence_offsets[index + 1]
        used = int(end - begin) * shared
        tokens = np.arange(begin, end).reshape(1, -1, 1) * geometry.num_heads
        query_rows[place, :, :used] = (tokens + heads).reshape(geometry.num_kv_heads, used)
        query_rows[place, :, used:] = query_rows[place, :, :1]
        row_positions[place, :used] = np.repeat(batch.positions[begin:end], shared)
        units[place] = _units(batch.block_tables[index], geometry, row_positions[place], keys)
    positions = torch.from_numpy(row_positions).to(geometry.device)
    return AttentionGroup(
        sequences=len(members),
        rows=rows,
        keys=keys,
        query_rows=_tensor(query_rows.reshape(-1), geometry.device),
        units=_tensor(units.reshape(-1), geometry.device),
        masks={window: _mask(positions, keys, window, geometry) for window in geometry.windows},
    )


def _units(table: NDArray[np.int32], geometry: Geometry, positions: Int64, keys: int) -> Int64:
    """Units that hold keys 0..keys-1; beyond the context the first one, masked, stands in."""
    per_block = geometry.block_size // geometry.unit
    blocks = table[: int(positions.max()) // geometry.block_size + 1].astype(np.int64)
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
    batch: RaggedBatch,
    geometry: Geometry,
    members: list[int],
    rows: int,
    start: int,
    output_rows: Int64,
) -> None:
    shared = geometry.num_heads // geometry.num_kv_heads
    head = np.arange(geometry.num_heads)
    for place, index in enumerate(members):
        begin, end = batch.sequence_offsets[index], batch.sequence_offsets[index + 1]
        within = np.arange(end - begin)[:, None] * shared + head % shared
        first = start + (place * geometry.num_kv_heads + head // shared) * rows
        output_rows[begin:end] = first + within


def _padded(values: NDArray[np.int32], length: int) -> Int64:
    padded = np.zeros(length, np.int64)
    padded[: len(values)] = values
    return padded


def _tensor(values: Int64, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)
