"""Arrays as careless or hostile callers make them."""

from __future__ import annotations

from typing import Any

import numpy as np

DTYPES = ("f4", "f4", "f4", "f8", "f2", "i4", "i8", "u1", "?", ">f4", "c8", "O")


def floats(rng: np.random.Generator, *shape: int) -> Any:
    """float32 with ties, extremes and, at times, what is no number."""
    array = rng.normal(0, rng.choice([0.01, 3, 1e30]), shape).astype(np.float32)
    if rng.random() < 0.3:
        array = np.round(array).astype(np.float32)
    for value in (np.nan, np.inf, -np.inf, 3.4e38, 1e-45, -0.0):
        if array.size and rng.random() < 0.1:
            array.flat[rng.integers(array.size)] = value
    return array


def misshapen(rng: np.random.Generator, array: Any) -> Any:
    """Something like `array`, but of another type, shape or layout."""
    kind = rng.integers(12)
    if kind == 0:
        with np.errstate(all="ignore"):
            return array.astype(rng.choice(DTYPES))
    if kind == 1:
        return array[..., ::-1]
    if kind == 2:
        return array[::2]
    if kind == 3:
        return array.T
    if kind == 4:
        return array[None]
    if kind == 5:
        return array.reshape(-1)
    if kind == 6:
        return array[:0]
    if kind == 7:
        return array[..., :0]
    if kind == 8:  # not aligned to its items
        raw = np.frombuffer(b"\0" + array.tobytes(), dtype=np.uint8)
        return raw[1:].view(array.dtype).reshape(array.shape)
    if kind == 9:
        return rng.choice([None, 0, "x", b"x", 1.5, [], {}])
    if kind == 10:
        return array.tolist()
    array = array.copy()
    array.flags.writeable = False
    return array


def perhaps(rng: np.random.Generator, array: Any) -> Any:
    return misshapen(rng, array) if rng.random() < 0.15 else array
