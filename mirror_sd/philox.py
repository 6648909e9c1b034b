"""Counter-based random numbers: any process can make the noise of any cell alone.

Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011).
Known-answer vectors are in `tests/contracts/philox.json`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt32 = NDArray[np.uint32]
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_MASK32 = 0xFFFFFFFF


def philox4x32(counter: tuple[UInt32, UInt32, UInt32, UInt32], key: tuple[int, int]) -> UInt32:
    """Ten rounds over N counters; the four words of each, [N, 4]."""
    c0, c1, c2, c3 = (np.asarray(c, dtype=np.uint64) for c in counter)
    k0, k1 = key[0] & _MASK32, key[1] & _MASK32
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & _MASK32, (k1 + _W1) & _MASK32
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def gumbel(seed: int, position: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise of the cells (position, token) of a request with `seed`.

    key = seed (64 bits, low word first), counter = (position, token // 4, 0, 0), word token % 4,
    mapped to the open interval (0, 1) as u = (word + 0.5) / 2**32; the noise is -log(-log(u)).
    """
    quads = token_ids // 4
    low, high = int(quads.min()), int(quads.max())
    if high - low < 8 * quads.size:  # dense enough that sorting costs more than spare noise
        groups, lanes = np.arange(low, high + 1), quads - low
    else:
        groups, lanes = np.unique(quads, return_inverse=True)
    zeros = np.zeros(len(groups), dtype=np.uint32)
    counter = (zeros + np.uint32(position & _MASK32), groups.astype(np.uint32), zeros, zeros)
    words = philox4x32(counter, (seed & _MASK32, (seed >> 32) & _MASK32))
    u = (words[lanes, token_ids % 4].astype(np.float64) + 0.5) / 2.0**32
    noise: NDArray[np.float64] = -np.log(-np.log(u))
    return noise


# Temperatures below take no noise: logits are then so far apart that it decides nothing, and
# dividing by the temperature overflows.
GREEDY_BELOW = 1e-5
# -log(-log(u)) of the largest u, rounded up: no cell's noise exceeds it.
MAX_GUMBEL = 22.9
