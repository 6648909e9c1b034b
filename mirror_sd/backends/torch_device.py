"""Whether torch can compute on a device."""

from __future__ import annotations

import torch

from mirror_sd.errors import ConfigError


def check(device: str, named: str) -> None:
    """Raises `ConfigError` where it cannot; `named`: what to call the device."""
    try:
        torch.empty(1, device=device).add_(1)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{named} cannot be used: {reason}") from error
