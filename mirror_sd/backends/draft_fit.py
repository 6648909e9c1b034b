"""Whether a draft head can work on a target: what every back end's head asks first."""

from __future__ import annotations

from mirror_sd.backends.protocol import Capabilities
from mirror_sd.errors import UnsupportedModel
from mirror_sd.uir.draft_file import DraftSpec


def check(spec: DraftSpec, target: Capabilities) -> None:
    """Raises `UnsupportedModel` naming what differs."""
    if (spec.vocab_size, spec.hidden_size) != (target.vocab_size, target.hidden_size):
        raise UnsupportedModel(
            f"a draft for {spec.vocab_size} tokens and a hidden size of {spec.hidden_size}; its"
            f" target has {target.vocab_size} and {target.hidden_size}"
        )
    if max(spec.taps) > target.num_layers:
        raise UnsupportedModel(f"a draft from layer {max(spec.taps)} of {target.num_layers}")
