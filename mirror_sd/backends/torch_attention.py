"""Attention over the paged cache: spans of one padded shape gathered and given to torch's SDPA.

The `heads / kv_heads` query heads that share a KV head are folded into rows,
[S, kv_heads, rows, head_dim], so a key is read once for all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


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


class GroupedAttention:
    """How the tokens of one plan look at the cache.

    output_rows: [padded * heads] into the groups' outputs laid end to end.
    """

    def __init__(
        self, groups: list[AttentionGroup], output_rows: Tensor, num_kv_heads: int
    ) -> None:
        self._groups = groups
        self._output_rows = output_rows
        self._kv_heads = num_kv_heads

    def mix(self, queries: Tensor, cache: Tensor, window: int | None) -> Tensor:
        """[padded * heads, head_dim], what each token's heads read.

        queries: [padded * heads, head_dim], rotated; cache: [slots, 2 * kv_heads, head_dim] of the
        layer, the keys and values of this forward's tokens already in it.
        """
        outputs = [self._group(group, queries, cache, window) for group in self._groups]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, self._output_rows)

    def _group(
        self, group: AttentionGroup, queries: Tensor, cache: Tensor, window: int | None
    ) -> Tensor:
        """Outputs [S * kv_heads * rows, head_dim] of one group."""
        kv_heads, dim = self._kv_heads, queries.shape[1]
        unit = group.keys * group.spans // len(group.units)
        q = queries.index_select(0, group.query_rows).view(-1, kv_heads, group.rows, dim)
        kv = cache.view(-1, unit, 2 * kv_heads, dim).index_select(0, group.units)
        kv = kv.view(group.spans, group.keys, 2 * kv_heads, dim).transpose(1, 2)
        out = functional.scaled_dot_product_attention(
            q, kv[:, :kv_heads], kv[:, kv_heads:], attn_mask=group.masks[window]
        )
        return out.reshape(-1, dim)


def masks(
    positions: Tensor, keys: int, windows: tuple[int | None, ...], dtype: torch.dtype
) -> dict[int | None, Tensor]:
    """For each window [S, 1, rows, keys], of rows at `positions` [S, rows], on their device."""
    columns = torch.arange(keys, device=positions.device)
    ahead = columns > positions[..., None]
    made: dict[int | None, Tensor] = {}
    for window in windows:
        hidden = ahead if window is None else ahead | (columns <= positions[..., None] - window)
        blank = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
        made[window] = blank.masked_fill_(hidden, -math.inf)[:, None]
    return made
