"""Matrices packed so that a row's product does not depend on the other rows.

MKL's fp32 kernels, which `F.linear` uses on a CPU, choose a summation order by the number of rows.
oneDNN on prepacked weights does not, from 4 rows up (measured on torch 2.13), and costs no more
for 4 rows than for 1. Its fused tails (bias, SiLU, product) run on the fp32 accumulator, before
rounding to bf16, and have no scalar remainder loop, unlike torch's element-wise `exp`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

MIN_ROWS = 4
# Rows of every product on an accelerator: below it the time is that of reading the weights, on any
# GPU since 2017, and one shape is one kernel, so that a row's sum does not depend on company.
TILE_ROWS = 64
# The row count the packed layout is tuned for; it does not limit the calls.
PACK_ROWS = 16


class Linear(Protocol):
    """y = x W^T + b for x [rows, inputs], rows >= MIN_ROWS; W is [outputs, inputs]."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def silu(self, x: Tensor) -> Tensor:
        """silu(x W^T + b)"""
        ...

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """(x W^T + b) * factor, element by element"""
        ...


class PackedLinear:
    """oneDNN's prepacked layout; CPU only."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        self._bias = bias
        self._call = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._call(x, self._weight, self._bias, "none", [], "")
        return y

    def silu(self, x: Tensor) -> Tensor:
        y: Tensor = self._call(x, self._weight, self._bias, "swish", [], "")
        return y

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        y: Tensor = self._binary(x, factor, self._weight, self._bias, "mul")
        return y


class PlainLinear:
    """torch's own product, for what oneDNN does not pack."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)

    def silu(self, x: Tensor) -> Tensor:
        return functional.silu(self(x))

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        return self(x) * factor


class TiledLinear(PlainLinear):
    """The same, `TILE_ROWS` rows at a time; x has a multiple of them."""

    def __call__(self, x: Tensor) -> Tensor:
        tiles = x.view(-1, TILE_ROWS, x.shape[1]).unbind(0)
        products = [functional.linear(tile, self._weight, self._bias) for tile in tiles]
        return products[0] if len(products) == 1 else torch.cat(products)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of torch has oneDNN's prepacked linears for the device and the numbers."""
    return (
        device.type == "cpu"
        and dtype != torch.float16  # needs AVX512_FP16 or AMX, and is slower than bf16 there
        and bool(torch._C._has_mkldnn)
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def pack(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The best available form of a matrix for the device that it lies on."""
    if can_pack(weight.device, weight.dtype):
        return PackedLinear(weight, bias)
    if weight.device.type == "cpu":
        return PlainLinear(weight, bias)
    return TiledLinear(weight, bias)
