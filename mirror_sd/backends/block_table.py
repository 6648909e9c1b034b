"""Where a block table puts the keys and values of positions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mirror_sd.backends.protocol import Int32

Int64 = NDArray[np.int64]


def slots_of(table: Int32, positions: Int32 | Int64, block_size: int) -> Int64:
    """The cache slot of each position of the table's sequence."""
    return table[positions // block_size].astype(np.int64) * block_size + positions % block_size
