"""The native draft head: the protocol's face of `_native.DraftHead`."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from mirror_sd import _native
from mirror_sd.backends import draft_fit
from mirror_sd.backends.native import lowering
from mirror_sd.backends.native.native_backend import NativeBackend, check_heads
from mirror_sd.backends.protocol import DraftBatch, Float32, Int32
from mirror_sd.uir.draft_file import VECTORS, DraftProgram, Precision
from mirror_sd.uir.rope import plain_frequencies

log = logging.getLogger(__name__)

_GROUP = 64


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How the matrices multiply, by role, as `lowering.MatrixLayout.format`; `default` the others.
    cache: format of keys and values."""

    default: str
    cache: str
    products: tuple[tuple[str, str], ...] = ()

    def product(self, role: str) -> str:
        return dict(self.products).get(role, self.default)


# Of int8 the codes of the file stay as they are. Activations of 8 or 16 bits drafted alike: of
# 1,260 tokens on 16 held-out conversations a half-trained head had 32.5 % accepted, with all in 16
# bits 32.4, in fp32 32.4. The two products whose inputs stand out get 16, which costs nothing
# measurable; all would cost a sixth at 16 streams.
PLANS: dict[Precision, DraftPlan] = {
    "int8": DraftPlan("int8", "bf16", (("fuse_features", "int16"), ("down", "int16"))),
    "fp16": DraftPlan("bf16", "bf16"),
    "bf16": DraftPlan("bf16", "bf16"),
    "fp32": DraftPlan("fp32", "fp32"),
}


class NativeDraftHead:
    """Shares the embedding and the threads of `target`: while one of them works, the other waits.
    `draft` raises `ValueError` or `TypeError` on a bad batch and leaves the cache as it was.

    The constructor raises `UnsupportedModel` for a draft that does not fit the target or the
    kernels. plan: None is that of the draft's precision.
    """

    def __init__(
        self, program: DraftProgram, target: NativeBackend, plan: DraftPlan | None = None
    ) -> None:
        self._spec = program.spec
        self._plan = plan or PLANS[program.spec.precision]
        self._head = _make_head(program, target, self._plan)
        self.weight_bytes = self._load(program, target.threads)
        log.info(
            "draft head for %s: %.1f MB, %s",
            program.spec.target,
            self.weight_bytes / 1e6,
            program.spec.precision,
        )

    @property
    def taps(self) -> tuple[int, ...]:
        return self._spec.taps

    def kv_bytes_per_block(self, block_size: int) -> int:
        return self._head.kv_bytes_per_block(block_size)

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self._head.allocate_kv(num_blocks, block_size)

    def draft(self, batch: DraftBatch) -> tuple[Int32, Float32]:
        shape = len(batch.block_tables), int(max(batch.steps, default=0))
        if shape[1] < 0:
            raise ValueError(f"steps of {shape[1]}")
        tokens, probabilities = np.empty(shape, np.int32), np.empty(shape, np.float32)
        self._head.draft(
            batch.token_ids,
            batch.positions,
            batch.sequence_offsets,
            batch.block_tables,
            batch.features,
            batch.steps,
            batch.floors,
            batch.temperatures,
            batch.seeds,
            tokens,
            probabilities,
        )
        return tokens, probabilities

    def _load(self, program: DraftProgram, threads: int) -> int:
        size = 0
        for role, matrix in _matrices(program).items():
            product = self._plan.product(role)
            outputs, inputs = matrix.shape
            data = np.zeros(_native.packed_bytes(product, outputs, inputs), np.uint8)
            multiplier = _native.pack(matrix, product, threads, data)
            self._head.set_matrix(role, data, outputs, inputs, multiplier, product)
            size += len(data)
        for name in VECTORS:
            self._head.set_vector(name, np.ascontiguousarray(program.weights[name], np.float32))
        self._head.seal()
        return size


def _make_head(program: DraftProgram, target: NativeBackend, plan: DraftPlan) -> _native.DraftHead:
    spec = program.spec
    check_heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    draft_fit.check(spec, target.capabilities)
    return _native.DraftHead(
        target.decoder,
        feature_size=len(spec.taps) * spec.hidden_size,
        token_ids=np.ascontiguousarray(program.token_ids, np.int32),
        intermediate_size=spec.intermediate_size,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_eps=spec.rms_eps,
        frequencies=plain_frequencies(spec.rope_theta, spec.head_dim),
        cache=plan.cache,
    )


def _matrices(program: DraftProgram) -> dict[str, Float32]:
    """What the head multiplies by, in the order of a step."""
    weights, hidden = program.weights, program.spec.hidden_size
    # Both halves in whole groups, so that their codes keep their scales.
    wide = ((0, 0), (0, -hidden % _GROUP))
    fuse_input = [np.pad(half, wide) for half in np.split(weights["fuse_input"], 2, axis=1)]
    return {
        "fuse_features": np.ascontiguousarray(weights["fuse_features"], np.float32),
        "fuse_input": np.concatenate(fuse_input, axis=1),
        "qkv": np.concatenate([weights[name] for name in ("q", "k", "v")]),
        "output": np.ascontiguousarray(weights["o"], np.float32),
        "gate_up": lowering.interleaved(weights["gate"], weights["up"]),
        "down": np.ascontiguousarray(weights["down"], np.float32),
        "head": np.ascontiguousarray(weights["head"], np.float32),
    }
