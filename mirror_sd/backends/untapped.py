"""For back ends whose hidden states cannot be had: a draft head then has nothing to draft from."""

from __future__ import annotations

from collections.abc import Sequence

from mirror_sd.backends.protocol import Float32
from mirror_sd.errors import UnsupportedModel


class Untapped:
    """`Backend.tap` and `Backend.features` of such a back end."""

    def tap(self, layers: Sequence[int]) -> None:
        """Raises `UnsupportedModel`, unless nothing is asked for."""
        if layers:
            raise UnsupportedModel(f"{type(self).__name__} does not give hidden states")

    @property
    def features(self) -> Float32:
        raise UnsupportedModel(f"{type(self).__name__} does not give hidden states")
