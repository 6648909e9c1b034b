"""A `Program` as the arrays that the native decoder takes: packed matrices and fp32 vectors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mirror_sd import _native
from mirror_sd.uir.program import Program

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
_STRIP, _GROUP = 16, 32


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One matrix in the layout of `src/kernels.h`. `format` says how it multiplies: int8, int16
    (8-bit weights with 16-bit activations), bf16 or fp32. `layer` is -1 outside the layers."""

    role: str
    layer: int
    data: Bytes
    outputs: int
    inputs: int
    multiplier: float
    format: str

    @property
    def name(self) -> str:
        return self.role if self.layer < 0 else f"layers.{self.layer}.{self.role}"


def matrices(program: Program, threads: int) -> Iterator[PackedMatrix]:
    """Packs the matrices one by one, in the order in which a forward reads them."""
    spec, weights, plan = program.spec, program.weights, program.plan
    embedding = "embedding" if spec.tied_embeddings else "head"
    if not spec.tied_embeddings:
        yield _pack("embedding", -1, weights.load("embedding"), plan.format("embedding"), threads)
    for layer in range(spec.num_layers):
        load = _loader(program, layer)
        for role, matrix in (
            ("qkv", lambda load=load: np.concatenate([load("q"), load("k"), load("v")])),
            ("output", lambda load=load: load("o")),
            ("gate_up", lambda load=load: interleaved(load("gate"), load("up"))),
            ("down", lambda load=load: load("down")),
        ):
            yield _pack(role, layer, matrix(), plan.format(role, layer), threads)
    yield _pack("head", -1, weights.load(embedding), plan.format("head"), threads)


def vectors(program: Program) -> Iterator[tuple[str, int, Float32]]:
    """(role, layer, values) of norms and biases."""
    spec = program.spec
    for layer in range(spec.num_layers):
        load = _loader(program, layer)
        yield "attention_norm", layer, load("attention_norm")
        yield "mlp_norm", layer, load("mlp_norm")
        if spec.qk_norm:
            yield "q_norm", layer, load("q_norm")
            yield "k_norm", layer, load("k_norm")
        if spec.qkv_bias:
            biases = [load("q_bias"), load("k_bias"), load("v_bias")]
            yield "qkv_bias", layer, np.concatenate(biases)
        if spec.output_bias:
            yield "output_bias", layer, load("o_bias")
    yield "final_norm", -1, program.weights.load("final_norm")


def interleaved(gate: Float32, up: Float32) -> Float32:
    """Strips of 16 outputs in turn, gate first; zero outputs pad to whole groups of 32."""
    missing = -len(gate) % _GROUP
    strips = [
        np.pad(matrix, ((0, missing), (0, 0))).reshape(-1, _STRIP, matrix.shape[1])
        for matrix in (gate, up)
    ]
    return np.stack(strips, axis=1).reshape(-1, gate.shape[1])


def _loader(program: Program, layer: int):  # type: ignore[no-untyped-def]
    return lambda role: program.weights.load(f"layers.{layer}.{role}")


def _pack(role: str, layer: int, matrix: Float32, form: str, threads: int) -> PackedMatrix:
    outputs, inputs = matrix.shape
    data = np.empty(_native.packed_bytes(form, outputs, inputs), np.uint8)
    multiplier = _native.pack(np.ascontiguousarray(matrix, np.float32), form, threads, data)
    return PackedMatrix(role, layer, data, outputs, inputs, multiplier, form)
