"""How a matrix lies in a file: as fp32, bf16 or fp16 numbers, or as int8 codes with scales.

int8 is symmetric: codes -127..127 times a scale for each output (per channel), or one for each
`group` inputs of an output. They are two tensors, `NAME.codes` I8 [outputs, inputs] and
`NAME.scales` F32 [outputs, groups].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mirror_sd.errors import ModelError
from mirror_sd.uir import bfloat16
from mirror_sd.uir.model_spec import Shape
from mirror_sd.uir.precision_plan import Dtype

Float32 = NDArray[np.float32]
CODES, SCALES = ".codes", ".scales"
_TAGS: dict[Dtype, str] = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1}
_MOST = 127.0


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a safetensors file; `tag` is its dtype there."""

    name: str
    tag: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * _BYTES[self.tag]


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """group: inputs that share a scale of int8; None is per channel."""

    dtype: Dtype
    group: int | None = None

    def parts(self, name: str, shape: Shape) -> list[Part]:
        """What `encode` gives for a tensor of this shape, under its names."""
        if self.dtype != "int8":
            return [Part(name, _TAGS[self.dtype], shape)]
        outputs, inputs = shape
        groups = 1 if self.group is None else -(-inputs // self.group)
        return [Part(name + CODES, "I8", shape), Part(name + SCALES, "F32", (outputs, groups))]

    def encode(self, name: str, values: Float32) -> list[NDArray[Any]]:
        """The arrays as they lie in the file. Raises `ModelError` for what the format cannot hold;
        `name` is for its message."""
        if not np.isfinite(values).all():
            raise ModelError(f"the tensor {name} holds numbers that are not finite")
        if self.dtype == "int8":
            return list(quantise(values, self.group))
        if self.dtype == "bf16":
            return [bfloat16.bits(values)]
        if self.dtype == "fp16":
            if np.abs(values).max(initial=0.0) > np.finfo(np.float16).max:
                raise ModelError(f"the tensor {name} has numbers beyond fp16's 65504: take bf16")
            return [values.astype("<f2")]
        return [values.astype("<f4")]


def quantise(
    matrix: Float32, group: int | None, scale: type[np.floating[Any]] = np.float32
) -> tuple[NDArray[np.int8], NDArray[Any]]:
    """(codes [outputs, inputs], scales [outputs, groups] of type `scale`) with the least largest
    error."""
    outputs, inputs = matrix.shape
    size = _size(group, inputs)
    padded = np.pad(matrix, ((0, 0), (0, -inputs % size))).reshape(outputs, -1, size)
    scales = np.asarray(np.abs(padded).max(axis=2) / _MOST, scale)
    wide = scales.astype(np.float32)[:, :, None]
    codes = np.divide(padded, wide, out=np.zeros_like(padded), where=wide > 0)
    rounded = np.clip(np.rint(codes), -_MOST, _MOST).astype(np.int8)
    return np.ascontiguousarray(rounded.reshape(outputs, -1)[:, :inputs]), scales


def dequantise(codes: NDArray[Any], scales: NDArray[Any], group: int | None) -> Float32:
    """Codes times scales."""
    inputs = codes.shape[1]
    wide = np.repeat(scales.astype(np.float32), _size(group, inputs), axis=1)[:, :inputs]
    return np.asarray(codes.astype(np.float32) * wide, np.float32)


def _size(group: int | None, inputs: int) -> int:
    """Inputs of a row that share a scale: a group may be longer than the row."""
    return inputs if group is None else min(group, inputs)
