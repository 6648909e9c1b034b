"""Weights as they will be stored, with the gradient of the weights as they are (straight through).

Values are exactly those that `draft_file.write` followed by `read` gives.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mirror_sd.uir.draft_file import GROUP, Precision

_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def stored(weight: Tensor, precision: Precision) -> Tensor:
    """The values of a matrix [outputs, inputs] after a round trip through the file."""
    if precision == "fp32":
        return weight
    with torch.no_grad():
        values = (
            _int8(weight) if precision == "int8" else weight.to(_HALVES[precision]).to(weight.dtype)
        )
    # The second term is zero, and carries the gradient.
    return values + (weight - weight.detach())


def _int8(weight: Tensor) -> Tensor:
    outputs, inputs = weight.shape
    padded = functional.pad(weight, (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    scales = (padded.abs().amax(dim=2, keepdim=True) / 127.0).to(torch.float16).to(weight.dtype)
    codes = torch.where(scales > 0, padded / scales, 0.0).round_().clamp_(-127, 127)
    return (codes * scales).view(outputs, -1)[:, :inputs]
