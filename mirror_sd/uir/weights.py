"""Weights that are read from their file only when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mirror_sd.errors import ModelError
from mirror_sd.uir.model_spec import Shape

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """One stored tensor: its name in the file, its shape, and how to read it as float32."""

    name: str
    shape: Shape
    read: Callable[[], Float32]


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of one model under our own names (`model_spec.expected_shapes`)."""

    origin: Path
    tensors: Mapping[str, LazyTensor]

    def load(self, name: str) -> Float32:
        """A fresh (or memory-mapped, read-only) float32 array; nothing is kept here."""
        return self.tensors[name].read()

    def check(self, expected: Mapping[str, Shape]) -> None:
        """Raise `ModelError` naming the file and the first tensor missing or of a wrong shape."""
        for name, shape in expected.items():
            tensor = self.tensors.get(name)
            if tensor is None:
                raise ModelError(f"{self.origin}: the tensor for {name} is missing")
            if tensor.shape != shape:
                raise ModelError(
                    f"{self.origin}: tensor {tensor.name} has shape {list(tensor.shape)}, "
                    f"expected {list(shape)}"
                )
