"""Which hidden states of a model are kept: what `Backend.tap` checks."""

from __future__ import annotations

from collections.abc import Sequence


def checked(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Raises `ValueError` unless the layers ascend within 1..num_layers."""
    taps = tuple(layers)
    if list(taps) != sorted(set(taps)) or (taps and not 1 <= taps[0] <= taps[-1] <= num_layers):
        raise ValueError(f"tapped layers {list(taps)} do not ascend within 1..{num_layers}")
    return taps
