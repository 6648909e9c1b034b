"""The paged KV cache of the torch decoder: one tensor, keys and values of a slot side by side."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mirror_sd.backends.torch_decoder import TorchDecoder
from mirror_sd.backends.torch_plan import Geometry


def empty_cache(
    decoder: TorchDecoder, slots: int, device: torch.device, layers: int | None = None
) -> Tensor:
    """[layers, slots, 2 * kv_heads, head_dim], zeros: a masked key must be finite.

    layers: by default the model's.
    """
    spec = decoder.spec
    shape = (
        min(layers or spec.num_layers, spec.num_layers),
        slots,
        2 * spec.num_kv_heads,
        spec.head_dim,
    )
    return zeros(shape, decoder.kv_dtype, device)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU the pages are taken from the system only as they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def geometry_of(decoder: TorchDecoder, block_size: int, device: torch.device) -> Geometry:
    """What plans for this decoder and this block size depend on."""
    spec = decoder.spec
    return Geometry(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        block_size=block_size,
        windows=tuple(set(spec.windows)),
        dtype=decoder.dtype,
        device=device,
    )
