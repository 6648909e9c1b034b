"""bfloat16 numbers as their bits, because numpy has none."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# An embedding has tens of millions of values, and rounding takes them several times over.
_ROWS_AT_ONCE = 2048


def bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to even."""
    rounded = np.empty(values.shape, np.uint16)
    for first in range(0, len(values), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        wide = np.ascontiguousarray(values[rows], np.float32).view(np.uint32)
        rounded[rows] = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
    return rounded


def widened(stored: NDArray[Any]) -> NDArray[np.float32]:
    """The numbers that bits stand for."""
    return (stored.astype(np.uint32) << 16).view(np.float32)
