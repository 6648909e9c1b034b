"""The GGUF container, versions 2 and 3, little-endian: metadata and where each tensor lies.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf package's reader makes
a numpy view of every string, which takes 2 s for a vocabulary of 49,152; this one takes 0.1 s and
checks every length against the file.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mirror_sd.errors import ModelError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 8
# GGUF value type -> struct code; 8 is a string, 9 an array.
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's place: `shape` outermost first (the file lists it innermost first), the ggml
    type number, its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


class GgufFile:
    """An open file. Raises `ModelError` naming the file if it is not sound."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as source:
                self._map = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read the model file {path}: {error}") from error
        cursor = _Cursor(self._map, path)
        tensor_count, field_count = _read_header(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(field_count):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        infos = [_read_tensor_info(cursor) for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{path}: general.alignment is {alignment!r}")
        start = -(-cursor.position // alignment) * alignment
        self.tensors = {
            info.name: StoredTensor(info.name, info.shape, info.ggml_type, start + info.offset)
            for info in infos
        }

    def raw(self, tensor: StoredTensor, num_bytes: int) -> NDArray[np.uint8]:
        """The tensor's bytes as they lie in the file, memory-mapped."""
        if tensor.offset + num_bytes > len(self._map):
            raise ModelError(
                f"{self.path} is cut short: tensor {tensor.name} ends at byte "
                f"{tensor.offset + num_bytes} of {len(self._map)}"
            )
        return np.frombuffer(self._map, np.uint8, num_bytes, tensor.offset)


class _Cursor:
    """Reads values one after another and never past the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self._data):
            raise ModelError(f"{self._path} is cut short: its header ends at byte {end}")
        piece = self._data[self.position : end]
        self.position = end
        return piece

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array()
        if kind not in SCALARS:
            raise ModelError(f"{self._path}: metadata of the unknown type {kind}")
        return self.scalar(SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in SCALARS:
            code = SCALARS[kind]
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code))))
        if count > len(self._data):
            raise ModelError(f"{self._path}: an array of {count} entries cannot be in it")
        return [self.value(kind) for _ in range(count)]


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    if cursor.take(4) != MAGIC:
        raise ModelError(f"{cursor._path} is not a GGUF file")
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ModelError(f"{cursor._path}: GGUF version {version} is not supported (2 and 3 are)")
    return cursor.scalar("Q"), cursor.scalar("Q")


def _read_tensor_info(cursor: _Cursor) -> StoredTensor:
    name = cursor.string()
    dimensions = cursor.scalar("I")
    if dimensions > MAX_DIMENSIONS:
        raise ModelError(f"{cursor._path}: tensor {name} has {dimensions} dimensions")
    sizes = [cursor.scalar("Q") for _ in range(dimensions)]
    return StoredTensor(name, tuple(reversed(sizes)), cursor.scalar("I"), cursor.scalar("Q"))
