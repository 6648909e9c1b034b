"""A `Program` as what the native decoder takes: packed matrices and fp32 vectors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mirror_sd import _native
from mirror_sd.uir.program import Program

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
_STRIP, _GROUP = 16, 64


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """One matrix of the decoder. `layer` is -1 outside the layers; `format` says how it
    multiplies: int8, int16 (8-bit weights, 16-bit activations), bf16 or fp32."""

    role: str
    layer: int
    outputs: int
    inputs: int
    format: str

    @property
    def name(self) -> str:
        return self.role if self.layer < 0 else f"layers.{self.layer}.{self.role}"

    @property
    def packed_bytes(self) -> int:
        """Size in the layout of `src/kernels.h`, a multiple of 64."""
        return _native.packed_bytes(self.format, self.outputs, self.inputs)


def layouts(program: Program) -> list[MatrixLayout]:
    """All matrices in the order in which a forward reads them. With tied embeddings the head is
    the embedding too, so that only the head is listed."""
    spec, plan = program.spec, program.plan
    hidden, vocab = spec.hidden_size, spec.vocab_size
    listed: list[MatrixLayout] = []

    def add(role: str, layer: int, outputs: int, inputs: int) -> None:
        listed.append(MatrixLayout(role, layer, outputs, inputs, plan.product(role, layer)))

    if not spec.tied_embeddings:
        add("embedding", -1, vocab, hidden)
    padded = spec.intermediate_size + -spec.intermediate_size % _GROUP
    for layer in range(spec.num_layers):
        add("qkv", layer, spec.query_size + 2 * spec.kv_size, hidden)
        add("output", layer, hidden, spec.query_size)
        add("gate_up", layer, 2 * padded, hidden)
        add("down", layer, hidden, spec.intermediate_size)
    add("head", -1, vocab, hidden)
    return listed


def pack(program: Program, layout: MatrixLayout, out: Bytes, threads: int) -> float:
    """Reads one matrix of the program and packs it into `out`; returns its multiplier."""
    matrix = np.ascontiguousarray(_matrix(program, layout), np.float32)
    return _native.pack(matrix, layout.format, threads, out)


def vectors(program: Program) -> Iterator[tuple[str, int, Float32]]:
    """(role, layer, values) of norms and biases."""
    spec = program.spec
    for layer in range(spec.num_layers):
        yield "attention_norm", layer, _load(program, layer, "attention_norm")
        yield "mlp_norm", layer, _load(program, layer, "mlp_norm")
        if spec.qk_norm:
            yield "q_norm", layer, _load(program, layer, "q_norm")
            yield "k_norm", layer, _load(program, layer, "k_norm")
        if spec.qkv_bias:
            biases = [_load(program, layer, role) for role in ("q_bias", "k_bias", "v_bias")]
            yield "qkv_bias", layer, np.concatenate(biases)
        if spec.output_bias:
            yield "output_bias", layer, _load(program, layer, "o_bias")
    yield "final_norm", -1, program.weights.load("final_norm")


def interleaved(gate: Float32, up: Float32) -> Float32:
    """Strips of 16 outputs in turn, gate first; zero outputs pad to whole groups of 64."""
    missing = -len(gate) % _GROUP
    strips = [
        np.pad(matrix, ((0, missing), (0, 0))).reshape(-1, _STRIP, matrix.shape[1])
        for matrix in (gate, up)
    ]
    return np.stack(strips, axis=1).reshape(-1, gate.shape[1])


def _matrix(program: Program, layout: MatrixLayout) -> Float32:
    layer = layout.layer
    match layout.role:
        case "qkv":
            return np.concatenate([_load(program, layer, role) for role in ("q", "k", "v")])
        case "output":
            return _load(program, layer, "o")
        case "gate_up":
            return interleaved(_load(program, layer, "gate"), _load(program, layer, "up"))
        case "down":
            return _load(program, layer, "down")
        case "head" if program.spec.tied_embeddings:
            return program.weights.load("embedding")
        case role:
            return program.weights.load(role)


def _load(program: Program, layer: int, role: str) -> Float32:
    return program.weights.load(f"layers.{layer}.{role}")
