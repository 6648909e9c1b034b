"""How many KV blocks an engine gets: by the settings, by what its sequences can fill, by what its
device has. Integers only; who allocates is the back end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Bound = Literal["setting", "sequences", "device"]
# Left of the device's free memory for what is not the cache: activations, logits, other processes.
_SPARE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Arena:
    """`blocks` of `block_bytes` each. `bound`: what keeps them from being more: the setting, the
    sequences that could fill them, or the memory of the device."""

    blocks: int
    block_bytes: int
    bound: Bound

    @property
    def size_bytes(self) -> int:
        return self.blocks * self.block_bytes


def plan(
    wanted_bytes: int,
    block_bytes: int,
    *,
    sequences: int,
    blocks_per_sequence: int,
    free_bytes: int | None = None,
) -> Arena:
    """The arena of an engine that runs `sequences` at once, of at most `blocks_per_sequence` each,
    on a device of which `free_bytes` are free; None where that is not known. At least one block."""
    limits: list[tuple[int, Bound]] = [
        (wanted_bytes // block_bytes, "setting"),
        (sequences * blocks_per_sequence, "sequences"),
    ]
    if free_bytes is not None:
        limits.append((int(free_bytes * (1 - _SPARE_SHARE)) // block_bytes, "device"))
    blocks, bound = min(limits, key=lambda limit: limit[0])
    return Arena(max(blocks, 1), block_bytes, bound)
