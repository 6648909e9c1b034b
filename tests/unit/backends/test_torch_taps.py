"""Hidden states of the torch back end beside the reference's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mirror_sd.backends.reference_backend import ReferenceBackend
from mirror_sd.backends.torch_backend import TorchBackend
from mirror_sd.uir import program
from mirror_sd.uir.precision_plan import PrecisionPlan

IDS = np.random.default_rng(4).integers(0, 160, 50).astype(np.int32)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_features_are_the_residual_stream_after_the_tapped_layers(
    tiny_model: Callable[..., object], whole: Callable[..., np.ndarray], precision: str
) -> None:
    files = tiny_model("LlamaConfig").files  # type: ignore[attr-defined]
    truth = ReferenceBackend(program.load(files, PrecisionPlan.of("fp32")))
    ours = TorchBackend(program.load(files, PrecisionPlan.of(precision)), "cpu", precision)
    plain = whole(ours, IDS)
    for backend in (ours, truth):
        backend.tap((1, 3))
        tapped = whole(backend, IDS)
        assert backend.features.shape == (len(IDS), 2 * 64)
        if backend is ours:
            assert np.array_equal(tapped, plain)
    scale = np.abs(truth.features).max()
    most = 1e-5 if precision == "fp32" else 3e-2
    assert np.abs(ours.features - truth.features).max() < most * scale
    ours.tap(())
    assert np.array_equal(whole(ours, IDS), plain)
    assert ours.features.size == 0


def test_layers_that_are_not_there_are_refused(tiny_model: Callable[..., object]) -> None:
    files = tiny_model("LlamaConfig").files  # type: ignore[attr-defined]
    backend = TorchBackend(program.load(files, PrecisionPlan.of("fp32")), "cpu", "fp32")
    for layers in [(0,), (4,), (2, 1), (1, 1)]:
        with pytest.raises(ValueError, match="ascend"):
            backend.tap(layers)
