"""Small arrays to a device and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mirror_sd.backends.protocol import Float32


class Transfer(Protocol):
    def upload(self, values: NDArray[np.int64], target: Tensor) -> None:
        """Fill `target`, of the same length, before what is launched next reads it."""
        ...

    def download(self, tensors: Sequence[Tensor]) -> list[Float32]:
        """fp32 tensors [rows, width] after all that was launched; valid until the next call."""
        ...


class PlainTransfer:
    """For devices without streams that are worth it, a CPU among them."""

    def upload(self, values: NDArray[np.int64], target: Tensor) -> None:
        target.copy_(torch.from_numpy(values))

    def download(self, tensors: Sequence[Tensor]) -> list[Float32]:
        return [tensor.cpu().numpy() for tensor in tensors]


class StreamedTransfer:
    """CUDA: through page-locked memory, which alone is copied without the CPU, on a stream of its
    own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staging = _Pinned(torch.int64)
        self._results: list[_Pinned] = []

    def upload(self, values: NDArray[np.int64], target: Tensor) -> None:
        staged = self._staging.take(len(values))
        staged.copy_(torch.from_numpy(values))
        with torch.cuda.stream(self._stream):
            target.copy_(staged, non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def download(self, tensors: Sequence[Tensor]) -> list[Float32]:
        while len(self._results) < len(tensors):
            self._results.append(_Pinned(torch.float32))
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        arrays: list[Any] = []
        with torch.cuda.stream(self._stream):
            for tensor, pinned in zip(tensors, self._results, strict=False):
                target = pinned.take(tensor.numel()).view(tensor.shape)
                target.copy_(tensor, non_blocking=True)
                arrays.append(target.numpy())
        # Also frees the staging buffer for the next upload.
        self._stream.synchronize()
        return arrays


class _Pinned:
    """A page-locked buffer that grows: locking pages takes milliseconds."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._buffer = torch.empty(0, dtype=dtype)

    def take(self, length: int) -> Tensor:
        if len(self._buffer) < length:
            size = 1 << max(length - 1, 1).bit_length()
            self._buffer = torch.empty(size, dtype=self._buffer.dtype, pin_memory=True)
        return self._buffer[:length]


def transfer_of(device: torch.device) -> Transfer:
    """The way to and from a device."""
    return StreamedTransfer(device) if device.type == "cuda" else PlainTransfer()
