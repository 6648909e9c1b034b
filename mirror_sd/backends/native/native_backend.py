"""The native back end: the protocol's face of `_native.Decoder`, on the CPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mirror_sd import _native
from mirror_sd.backends import tapped
from mirror_sd.backends.native import lowering, packed_file
from mirror_sd.backends.protocol import Capabilities, Float32, RaggedBatch
from mirror_sd.errors import ConfigError, UnsupportedModel
from mirror_sd.uir.program import Program
from mirror_sd.uir.rope import inverse_frequencies

log = logging.getLogger(__name__)

ISA_VARIABLE = "MIRROR_SD_ISA"
# Of the attention kernels: queries of one tile (src/kernels.h), and a head's width.
_MOST_SHARED, _WIDEST_HEAD = 32, 512


def chosen_isa(environ: Mapping[str, str] = os.environ) -> str:
    """The best instruction set of this machine, or the one that MIRROR_SD_ISA names.

    Raises `ConfigError` if that one is not available.
    """
    available = _native.available_isas()
    wanted = environ.get(ISA_VARIABLE, "") or available[0]
    if wanted not in available:
        raise ConfigError(
            f"{ISA_VARIABLE}={wanted!r} is not one of {', '.join(available)}, which this machine"
            " and this build have"
        )
    return wanted


class NativeBackend:
    """Raises `ValueError` or `TypeError` on a bad batch and leaves the cache as it was. To be made
    in the process that uses it: a fork has none of its threads, and is told so by `RuntimeError`.

    The constructor raises `UnsupportedModel` for heads beyond the kernels' limits. source: the
    model file or directory, to name its packed weights on disk; None packs them in
    memory. isa: one of `_native.available_isas()`.
    """

    def __init__(
        self, program: Program, *, threads: int, isa: str, source: Path | None = None
    ) -> None:
        self._vocab = program.spec.vocab_size
        self._decoder = _make_decoder(program, threads, isa)
        self._logits = np.empty((0, self._vocab), np.float32)
        self._taps: tuple[int, ...] = ()
        self._features = np.empty((0, 0), np.float32)
        self._tokens = 0  # of the last forward
        self.weight_bytes = _load_weights(self._decoder, program, threads, source)
        self._capabilities = Capabilities(
            name="native",
            device="cpu",
            precision=program.plan.weights,
            vocab_size=self._vocab,
            max_context=program.spec.max_context,
            # By construction, and held by tests/unit/backends/native.
            bit_stable=True,
            isa=isa,
            detail=f"{threads} threads, {program.plan.describe()}",
            num_layers=program.spec.num_layers,
            hidden_size=program.spec.hidden_size,
        )
        log.info("native engine: %s, %s", isa, self._capabilities.detail)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def decoder(self) -> _native.Decoder:
        """For a draft head, which shares its threads."""
        return self._decoder

    @property
    def threads(self) -> int:
        return self._decoder.threads

    def kv_bytes_per_block(self, block_size: int) -> int:
        return self._decoder.kv_bytes_per_block(block_size)

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self._decoder.allocate_kv(num_blocks, block_size)

    def discard_kv(self, blocks: Sequence[int]) -> None:
        """Give the memory of blocks that hold nothing any more back to the system."""
        self._decoder.discard_kv(np.array(sorted(set(blocks)), dtype=np.int32))

    def forward(self, batch: RaggedBatch) -> Float32:
        rows = len(batch.logit_rows)
        if rows > len(self._logits):
            self._logits = np.empty((rows, self._vocab), np.float32)
        tokens = len(batch.token_ids) if self._taps else 0
        if tokens > len(self._features):
            self._features = np.empty((tokens, self._features.shape[1]), np.float32)
        self._decoder.forward(
            batch.token_ids,
            batch.positions,
            batch.sequence_offsets,
            batch.block_tables,
            batch.logit_rows,
            self._logits,
            self._taps,
            self._features,
        )
        self._tokens = tokens
        return self._logits[:rows]

    def tap(self, layers: Sequence[int]) -> None:
        taps = tapped.checked(layers, self._capabilities.num_layers)
        if taps != self._taps:
            width = len(taps) * self._capabilities.hidden_size
            self._taps, self._features = taps, np.empty((0, width), np.float32)
            self._tokens = 0

    @property
    def features(self) -> Float32:
        return self._features[: self._tokens]


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raises `UnsupportedModel` for attention heads beyond the kernels' limits."""
    shared = num_heads // num_kv_heads
    if shared > _MOST_SHARED:
        raise UnsupportedModel(
            f"{shared} query heads share a KV head; the native engine takes {_MOST_SHARED}"
        )
    if head_dim > _WIDEST_HEAD:
        raise UnsupportedModel(
            f"attention heads of {head_dim}; the native engine takes {_WIDEST_HEAD}"
        )


def _make_decoder(program: Program, threads: int, isa: str) -> _native.Decoder:
    spec = program.spec
    check_heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    frequencies, scale = inverse_frequencies(spec)
    return _native.Decoder(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        layers=spec.num_layers,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_context=spec.max_context,
        rms_eps=spec.rms_eps,
        rope_scale=scale,
        frequencies=frequencies,
        windows=[window or 0 for window in spec.windows],
        cache=program.plan.kv,
        isa=isa,
        threads=threads,
        cores=_native.usable_cores(threads),
    )


def _load_weights(
    decoder: _native.Decoder, program: Program, threads: int, source: Path | None
) -> int:
    """Gives the decoder all weights; returns the bytes of the matrices."""
    layouts = lowering.layouts(program)

    def pack(layout: lowering.MatrixLayout, out: lowering.Bytes) -> float:
        return lowering.pack(program, layout, out, threads)

    if source is None:
        packed = packed_file.pack_in_memory(layouts, pack)
    else:
        packed = packed_file.load_or_pack(source, layouts, pack)
    for layout, data, multiplier in zip(layouts, packed.data, packed.multipliers, strict=True):
        roles = [layout.role]
        if layout.role == "head" and program.spec.tied_embeddings:
            roles.append("embedding")
        for role in roles:
            decoder.set_matrix(
                role,
                layout.layer,
                data,
                layout.outputs,
                layout.inputs,
                multiplier,
                layout.format,
            )
    for role, layer, values in lowering.vectors(program):
        decoder.set_vector(role, layer, np.ascontiguousarray(values, np.float32))
    decoder.seal()
    return sum(len(data) for data in packed.data)
