"""The safetensors container: a JSON header, then raw little-endian arrays.

Read directly because the library's numpy side has no bfloat16: here it becomes float32 by a shift.
Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import mmap
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mirror_sd.errors import ModelError
from mirror_sd.uir import bfloat16
from mirror_sd.uir.weights import LazyTensor

Float32 = NDArray[np.float32]
STORED: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "F64": np.dtype("<f8"),
    "I8": np.dtype("i1"),  # codes of `stored_format`
}
BF16: np.dtype[Any] = np.dtype("<u2")


def read(path: Path) -> dict[str, LazyTensor]:
    """Name -> tensor of one file, memory-mapped. Raises `ModelError` naming file and tensor."""
    try:
        with path.open("rb") as source:
            data = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the weights {path}: {error}") from error
    start = 8 + int.from_bytes(data[:8], "little")
    if start > len(data):
        raise ModelError(f"{path} is not a safetensors file, or is cut short in its header")
    try:
        header = json.loads(data[8:start])
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: _tensor(path, data, start, name, entry) for name, entry in entries.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ModelError(f"{path} has a bad safetensors header: {error}") from error


def _tensor(
    path: Path, data: mmap.mmap, start: int, name: str, entry: dict[str, Any]
) -> LazyTensor:
    shape = tuple(int(size) for size in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
    stored = BF16 if entry["dtype"] == "BF16" else STORED.get(entry["dtype"])
    if stored is None:
        raise ModelError(f"{path}: tensor {name} has the dtype {entry['dtype']}, not supported")
    if min(shape, default=1) < 0 or begin < 0 or end - begin != math.prod(shape) * stored.itemsize:
        raise ModelError(f"{path}: tensor {name} has {end - begin} bytes for shape {list(shape)}")
    if start + end > len(data):
        raise ModelError(
            f"{path} is cut short: tensor {name} ends at byte {start + end} of {len(data)}"
        )
    return LazyTensor(name, shape, partial(_load, data, start + begin, shape, stored))


def _load(data: mmap.mmap, offset: int, shape: tuple[int, ...], stored: np.dtype[Any]) -> Float32:
    values = np.frombuffer(data, stored, math.prod(shape), offset).reshape(shape)
    if stored == BF16:
        return bfloat16.widened(values)
    return values.astype(np.float32, copy=False)
