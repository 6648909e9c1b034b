"""The OpenMP settings of a process that computes; they are read when torch is loaded."""

from __future__ import annotations

# libgomp's threads spin between the parallel regions of a forward, by default for milliseconds:
# where another process wants the core, each region then costs a time slice. Measured on two busy
# cores: loading 3.4 s instead of 20 s, decoding 9-36 tok/s instead of 4-6; on idle cores the short
# spin is within the noise of the long one.
_SPIN_COUNT = "3000"


def environment(threads: int) -> dict[str, str]:
    """Variables to set before the process starts, or at least before it imports torch."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": _SPIN_COUNT,
    }
