"""The contract between the engine and a device.

The engine owns positions, block tables and which rows it wants; the back end owns weights and KV
memory. Integers cross as int32 numpy arrays, logits come back as float32.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """What the engine may rely on. `bit_stable`: a self-test at load, or at `allocate_kv`, found
    that a row's logits do not depend on the other rows of the batch. `isa`: the instruction set of
    kernels of our own. `is_emulated`: nothing is computed, and answers are no model's.
    `num_layers`, `hidden_size`: of a model whose hidden states can be tapped (`Backend.tap`); else
    0."""

    name: str
    device: str
    precision: str
    vocab_size: int
    max_context: int
    bit_stable: bool
    detail: str = ""
    isa: str = ""
    is_emulated: bool = False
    num_layers: int = 0
    hidden_size: int = 0


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

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the hidden states after these layers (1..num_layers, ascending) of each forward from
        now on; none stops it. Logits do not change by it.

        Raises `ValueError` for a layer that is not there, `UnsupportedModel` where hidden states
        cannot be had.
        """
        ...

    @property
    def features(self) -> Float32:
        """[T, len(layers) * hidden_size] of the last forward: for each of its T tokens the residual
        stream after each tapped layer, before any norm. Valid until the next call."""
        ...


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """What a draft head takes in, and how far it shall go on from there.

    token_ids, positions, sequence_offsets, block_tables: as in `RaggedBatch`; the tables are those
        of the target, and cover the drafted positions too.
    features: [T, F] the target's features of the token *before* each; zeros where they are not
        known, as for position 0.
    steps: [S] tokens to draft after the last one of each sequence, 0 for none.
    floors: [S] drafting ends before a token that would bring the product of the probabilities of
        the drafted ones below this.
    temperatures, seeds: [S] as in `SamplingParams`: above 0, token t is drawn with the noise that
        the target will draw it with.
    """

    token_ids: Int32
    positions: Int32
    sequence_offsets: Int32
    block_tables: tuple[Int32, ...]
    features: Float32
    steps: Int32
    floors: Float32
    temperatures: Float32
    seeds: NDArray[np.uint64]


class DraftHead(Protocol):
    """A one-layer draft on the target's hidden states, with its own keys and values in a cache of
    its own under the target's block tables. Not thread-safe."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states are its features."""
        ...

    def kv_bytes_per_block(self, block_size: int) -> int: ...

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """As many blocks as the target has: a block id means the same positions in both."""
        ...

    def draft(self, batch: DraftBatch) -> tuple[Int32, Float32]:
        """(tokens [S, max(steps)], -1 after the last; probabilities [S, max(steps)] of each by the
        draft's own softmax, 0 after the last). Writes the keys and values of all T tokens and of
        those drafted; the latter are overwritten by the tokens that take their positions.

        Raises `ValueError` or `TypeError` on a bad batch, and leaves the cache as it was.
        """
        ...
