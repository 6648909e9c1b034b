"""The integers that a graph of `PagedAttention` is fed with, from block tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mirror_sd.backends import block_table
from mirror_sd.backends.block_table import Int64
from mirror_sd.backends.protocol import Int32

# A multiple of every length that the runtime's loops over a context unroll to: what is padded
# changes no sum.
_CONTEXT = 64
# Below any score, and no infinity, which not all providers subtract well.
_HIDDEN = np.float32(-1e9)


def attention_feeds(
    queries: Sequence[Int64],
    positions: Sequence[Int64],
    tables: Sequence[Int32],
    *,
    block_size: int,
    padding_slot: int,
    windows: Sequence[int | None] = (None,),
    least_queries: int = 1,
) -> dict[str, NDArray[Any]]:
    """queries: of each sequence, the indexes of its asking tokens; positions: theirs.

    Results come in this order. `padding_slot` holds finite keys and values, of which nothing is
    seen.
    """
    count = len(queries)
    width = max(least_queries, *(len(q) for q in queries))
    length = max(int(p[-1]) for p in positions) + 1
    context = -(-length // _CONTEXT) * _CONTEXT
    query_index = np.zeros((count, width), np.int64)
    places = np.zeros((count, width), np.int64)
    slots = np.full((count, context), padding_slot, np.int64)
    rows: list[Int64] = []
    for i, (asking, at, table) in enumerate(zip(queries, positions, tables, strict=True)):
        query_index[i, : len(asking)] = asking
        places[i, : len(asking)] = at
        slots[i, : at[-1] + 1] = block_table.slots_of(table, np.arange(at[-1] + 1), block_size)
        rows.append(i * width + np.arange(len(asking)))
    feeds: dict[str, NDArray[Any]] = {
        "query_index": query_index,
        "context_slots": slots,
        "token_rows": np.concatenate(rows),
    }
    keys = np.arange(context)
    for number, window in enumerate(windows):
        hidden = keys > places[:, :, None]
        if window is not None:
            hidden |= keys <= places[:, :, None] - window
        feeds[f"mask.{number}"] = np.where(hidden, _HIDDEN, np.float32(0))
    return feeds
