"""Torch devices: whether they can be used, and how torch is set up for them.

Names are torch's own: cpu, cuda (NVIDIA, and AMD's ROCm), xpu (Intel), hpu (Gaudi, with
habana_frameworks installed); `cuda:1` is the second one.
"""

from __future__ import annotations

import torch

from mirror_sd.errors import ConfigError

_GAUDI = "habana_frameworks.torch"


def check(device: str, named: str) -> None:
    """Raises `ConfigError` where it cannot; `named`: what to call the device."""
    try:
        torch.empty(1, device=device).add_(1)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        hint = f"; Gaudi needs the package {_GAUDI}" if device.startswith("hpu") else ""
        raise ConfigError(f"{named} cannot be used: {reason}{hint}") from error


def prepare(device: str) -> None:
    """Make a CUDA device the current one, because streams and graphs are made on that, and keep to
    kernels whose rows do not depend on company.

    Sums of 16-bit products stay fp32 to the end: by default CUDA may add parts in 16 bits. Of the
    attention kernels only the memory-efficient one takes a mask and goes through the keys in order;
    cuDNN's splits them by the size of the batch.
    """
    if not device.startswith("cuda"):
        return
    index = torch.device(device).index
    if index is not None:
        torch.cuda.set_device(index)
    matmul = torch.backends.cuda.matmul
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.enable_cudnn_sdp(False)


def half_precision(device: str) -> str:
    """The 16-bit format that a device multiplies fast: fp16 on GPUs before Ampere, else bf16."""
    if device.startswith("cuda") and torch.cuda.get_device_capability(device)[0] < 8:
        return "fp16"
    return "bf16"
