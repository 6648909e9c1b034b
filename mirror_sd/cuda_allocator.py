"""CUDA's own memory pool instead of torch's caching allocator; read by torch when it is imported.

`cudaMallocAsync` shares one pool among all of a process's streams and graphs and gives memory back
to the driver under pressure. Imports nothing heavy: workers set it before torch is there.
"""

from __future__ import annotations

from collections.abc import Mapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_CHOICE = "backend:cudaMallocAsync"


def environment(device: str, present: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a process that computes on a device: nothing on others
    than CUDA, or where the operator has chosen."""
    if not device.startswith(("cuda", "auto")) or any(name in present for name in VARIABLES):
        return {}
    return {VARIABLES[0]: _CHOICE}
