"""Writes a safetensors file tensor by tensor, so that no second copy of a model is in memory.

The sizes are known from the shapes, so the header comes first; see `safetensors_file`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mirror_sd.errors import ModelError
from mirror_sd.uir.stored_format import Part


def write(path: Path, parts: Sequence[Part], arrays: Iterable[NDArray[Any]]) -> None:
    """`arrays` come in the order of `parts`, in little-endian. Raises `ModelError` where the disk
    cannot take them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for part in parts:
        header[part.name] = {
            "dtype": part.tag,
            "shape": list(part.shape),
            "data_offsets": [end, end + part.nbytes],
        }
        end += part.nbytes
    try:
        with path.open("wb") as sink:
            sink.write(framed(header))
            for part, values in zip(parts, arrays, strict=True):
                if values.nbytes != part.nbytes:
                    raise ValueError(f"{part.name}: {values.nbytes} bytes for {part.nbytes}")
                sink.write(np.ascontiguousarray(values).data)
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror or error}") from error


def framed(header: Mapping[str, Any]) -> bytes:
    """The header as a file begins with it: its length, and the text padded to 8 bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
