"""The contract between the engine and a device.

The engine owns positions, block tables and which rows it wants; the back end owns weights and KV
memory. Integers cross as int32 numpy arrays, logits come back as float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Tokens of S sequences laid end to end, T in all; any mix of prefill, decode and verify.

    token_ids:        [T] ids to embed.
    positions:        [T] absolute position of each token; consecutive within a sequence.
    sequence_offsets: [S + 1]; tokens `offsets[i]:offsets[i + 1]` belong to sequence i.
    block_tables:     S arrays; entry j is the KV block of positions
                      `j * block_size : (j + 1) * block_size`. Long enough for the last position.
    logit_rows:       [R] indexes into the T tokens whose logits are wanted, ascending.

    A forward writes the KV of all T tokens, then lets the token at position p attend to positions
    0..p of its own sequence through its block table. Sequences may share blocks that none of them
    writes in this batch.
    """

    token_ids: Int32
    positions: Int32
    sequence_offsets: Int32
    block_tables: tuple[Int32, ...]
    logit_rows: Int32


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the engine may rely on. `bit_stable`: a self-test at load found that a row's logits do
    not depend on the other rows of the batch. `isa`: the instruction set of kernels of our own.
    `is_emulated`: nothing is computed, and answers are no model's."""

    name: str
    device: str
    precision: str
    vocab_size: int
    max_context: int
    bit_stable: bool
    detail: str = ""
    isa: str = ""
    is_emulated: bool = False


class Backend(Protocol):
    """Not thread-safe: one engine, one thread."""

    @property
    def capabilities(self) -> Capabilities: ...

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of one KV block over all layers (keys and values)."""
        ...

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Allocate the paged cache; called once, before the first forward."""
        ...

    def forward(self, batch: RaggedBatch) -> Float32:
        """Logits [R, vocab_size] of the wanted rows. The array is valid until the next call."""
        ...
