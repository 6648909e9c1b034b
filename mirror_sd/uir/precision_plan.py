"""Which number format each role of a program has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mirror_sd.errors import ModelError

Dtype = Literal["fp32", "bf16", "fp16", "int8"]
KV_FORMATS: dict[str, Dtype] = {"fp32": "fp32", "bf16": "bf16", "int8": "int8"}


@dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """Norms, rotary positions, the residual stream, softmax, logits and accumulations are fp32
    in every plan, so they are not listed.

    weights: matrices of the layers and the embedding table. int8 is 8-bit codes with a scale and
        a minimum for each 32 inputs.
    activations: inputs and outputs of those matrices. int8 is symmetric, a scale for each 32.
    kv: keys and values in the cache.
    head: the output projection. int8 has 8-bit activations; the logits within 5 nats of a row's
        best are computed again with 16-bit ones.
    wide: with int8, matrices whose inputs are 16-bit integers instead: a role (qkv, output,
        gate_up, down, head) or one layer of it (`qkv.0`).
    """

    weights: Dtype
    activations: Dtype
    kv: Dtype
    head: Dtype
    wide: frozenset[str] = frozenset()

    @classmethod
    def of(cls, precision: str) -> PrecisionPlan:
        """The plan of a configured precision for the torch engine: `fp32`, `bf16` or `fp16`."""
        # The head in fp32, because logits that torch rounds to 16 bits tie.
        if precision == "fp32":
            return cls("fp32", "fp32", "fp32", "fp32")
        if precision == "bf16":
            return cls("bf16", "bf16", "bf16", "fp32")
        if precision == "fp16":
            return cls("fp16", "fp16", "fp16", "fp32")
        raise ModelError(f"precision {precision!r} is not one of fp32, bf16, fp16")

    @classmethod
    def native(cls, precision: str, kv: str = "auto") -> PrecisionPlan:
        """The plan of a configured precision for the native engine: `fp32`, `bf16` or `int8`.

        kv: number format of the cache; auto is fp32 in the fp32 plan, else bf16.

        `docs/decisions/0005-native-cpu-engine.md` has the error of each choice in int8.
        """
        cache = KV_FORMATS.get(kv, "fp32" if precision == "fp32" else "bf16")
        if precision == "fp32":
            return cls("fp32", "fp32", cache, "fp32")
        if precision == "bf16":
            return cls("bf16", "bf16", cache, "bf16")
        if precision == "int8":
            return cls("int8", "int8", cache, "int8")
        raise ModelError(f"precision {precision!r} is not one of fp32, bf16, int8")

    def product(self, role: str, layer: int = -1) -> str:
        """How a matrix multiplies: fp32, bf16, or with int8 weights

        rotated: both sides times a Hadamard matrix in groups of 32, 8-bit activations;
        int8: 8-bit activations, not rotated. For the head, which is the embedding table too: a
            file's 8-bit codes stay exact;
        int16: 16-bit activations, for what is in `wide`.
        """
        if role in self.wide or f"{role}.{layer}" in self.wide:
            return "int16"
        if role == "head":
            return self.head
        # The embedding table is only read, so nothing is gained by rotating it.
        return "rotated" if self.weights == "int8" and role != "embedding" else self.weights

    def describe(self) -> str:
        """For logs and reports, as `weights int8, head int8 with the best in 16 bits, kv bf16`."""
        refined = self.head == "int8" and "head" not in self.wide
        head = f"{self.head}{' with the best in 16 bits' if refined else ''}"
        wide = f", wide {'+'.join(sorted(self.wide))}" if self.wide else ""
        return f"weights {self.weights}, head {head}, kv {self.kv}{wide}"
