"""Which number format each role of a program has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mirror_sd.errors import ModelError

Dtype = Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """Norms, rotary positions, the residual stream, softmax, logits and accumulations are fp32
    in every plan, so they are not listed.

    weights: matrices of the layers and the embedding table.
    activations: inputs and outputs of those matrices.
    kv: keys and values in the cache.
    head: the output projection; fp32 in every plan so far, because logits rounded to bf16 tie.
    """

    weights: Dtype
    activations: Dtype
    kv: Dtype
    head: Dtype

    @classmethod
    def of(cls, precision: str) -> PrecisionPlan:
        """The plan of a configured precision, `fp32` or `bf16`."""
        if precision == "fp32":
            return cls("fp32", "fp32", "fp32", "fp32")
        if precision == "bf16":
            return cls("bf16", "bf16", "bf16", "fp32")
        raise ModelError(f"precision {precision!r} is not one of fp32, bf16")
