"""The ways to sample that this machine has, for tests that must hold for each."""

from __future__ import annotations

from functools import partial

import pytest

from mirror_sd.messages import SamplingParams
from mirror_sd.speculative.sampler import NATIVE_ISA, NativeChooser, NumpyChooser

ISAS: list[str] = []
if NATIVE_ISA is not None:
    from mirror_sd import _native

    ISAS = _native.available_isas()

needs_native = pytest.mark.skipif(NATIVE_ISA is None, reason="mirror_sd._native is not built")
CHOOSERS = {"numpy": NumpyChooser} | {isa: partial(NativeChooser, isa=isa) for isa in ISAS}
with_every_chooser = pytest.mark.parametrize(
    "open_chooser", list(CHOOSERS.values()), ids=list(CHOOSERS)
)


def params(**fields):
    return SamplingParams(max_tokens=10, seed=fields.pop("seed", 0), **fields)
