"""What every back end checks about its cache and a ragged batch before it touches memory."""

from __future__ import annotations

import numpy as np

from mirror_sd.backends.protocol import DraftBatch, RaggedBatch


def check_cache(num_blocks: int, block_size: int) -> None:
    """Raise `ValueError` for a cache of nothing."""
    if num_blocks < 1 or block_size < 1:
        raise ValueError(f"cannot allocate {num_blocks} blocks of {block_size} tokens")


def check(
    batch: RaggedBatch, *, vocab_size: int, max_context: int, num_blocks: int, block_size: int
) -> None:
    """Raise `ValueError` saying which field of the batch is wrong."""
    tokens = len(batch.token_ids)
    if num_blocks == 0:
        raise ValueError("allocate_kv must come before the first forward")
    if tokens == 0 or len(batch.positions) != tokens:
        raise ValueError(f"{tokens} token ids with {len(batch.positions)} positions")
    _check_range("token id", batch.token_ids, vocab_size)
    _check_range("position", batch.positions, max_context)
    _check_offsets(batch, tokens)
    if len(batch.logit_rows):
        _check_range("logit row", batch.logit_rows, tokens)
        if (np.diff(batch.logit_rows) <= 0).any():
            raise ValueError("logit rows must ascend")
    starts = batch.sequence_offsets[:-1]
    lasts = batch.positions[batch.sequence_offsets[1:] - 1]
    steps = np.diff(batch.positions) != 1
    steps[starts[1:] - 1] = False
    if steps.any():
        raise ValueError("positions must be consecutive within a sequence")
    for index, (last, table) in enumerate(zip(lasts, batch.block_tables, strict=True)):
        needed = int(last) // block_size + 1
        if len(table) < needed:
            raise ValueError(f"block table {index} has {len(table)} blocks, needs {needed}")
        _check_range(f"block of table {index}", table[:needed], num_blocks)


def check_draft(
    batch: DraftBatch,
    *,
    vocab_size: int,
    max_context: int,
    num_blocks: int,
    block_size: int,
    feature_size: int,
) -> None:
    """As `check`, of what a draft head takes in."""
    check(
        RaggedBatch(
            token_ids=batch.token_ids,
            positions=batch.positions,
            sequence_offsets=batch.sequence_offsets,
            block_tables=batch.block_tables,
            logit_rows=np.empty(0, np.int32),
        ),
        vocab_size=vocab_size,
        max_context=max_context,
        num_blocks=num_blocks,
        block_size=block_size,
    )
    if batch.features.shape != (len(batch.token_ids), feature_size):
        raise ValueError(f"features {list(batch.features.shape)}, {feature_size} wanted a token")
    for name in ("steps", "floors", "temperatures", "seeds"):
        if getattr(batch, name).shape != (len(batch.block_tables),):
            raise ValueError(f"{name} has another length than the block tables")
    lasts = batch.positions[batch.sequence_offsets[1:] - 1]
    for index, (last, steps) in enumerate(zip(lasts, batch.steps, strict=True)):
        end, table = int(last) + max(int(steps) - 1, 0), batch.block_tables[index]
        if steps < 0 or end >= max_context:
            raise ValueError(f"{steps} steps after position {last} in a context of {max_context}")
        if len(table) <= end // block_size:
            raise ValueError(f"block table {index} does not reach position {end}")
        _check_range(f"block of table {index}", table[: end // block_size + 1], num_blocks)


def _check_offsets(batch: RaggedBatch, tokens: int) -> None:
    offsets = batch.sequence_offsets
    if len(offsets) != len(batch.block_tables) + 1:
        raise ValueError(f"{len(offsets)} offsets for {len(batch.block_tables)} block tables")
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != tokens:
        raise ValueError(f"sequence offsets must run from 0 to {tokens}")
    if (np.diff(offsets) <= 0).any():
        raise ValueError("every sequence must have a token")


def _check_range(what: str, values: np.ndarray[tuple[int], np.dtype[np.int32]], end: int) -> None:
    if int(values.min()) < 0 or int(values.max()) >= end:
        wrong = values[(values < 0) | (values >= end)][0]
        raise ValueError(f"{what} {wrong} is outside 0..{end - 1}")
