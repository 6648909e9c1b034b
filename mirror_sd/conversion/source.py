"""What is converted: a model's own weights, or the averaged ones that its training kept.

Training that averages weights (an exponential moving average, EMA) saves them as tensors of the
same names in a file of their own, or under a prefix beside the last step's.
"""

from __future__ import annotations

from pathlib import Path

from mirror_sd.errors import ModelError
from mirror_sd.model_store import ModelFiles
from mirror_sd.uir import hf_model, program, safetensors_file
from mirror_sd.uir.model_spec import expected_shapes
from mirror_sd.uir.precision_plan import PrecisionPlan
from mirror_sd.uir.program import Program
from mirror_sd.uir.weights import LazyTensor, Weights

PREFIXES = ("", "ema.", "ema_model.", "ema_model.module.", "shadow.", "module.")


def load(files: ModelFiles, averaged: Path | None) -> Program:
    """The model in fp32. Raises `ModelError` naming what the averaged weights lack."""
    source = program.load(files, PrecisionPlan.of("fp32"))
    if averaged is None:
        return source
    stored = _tensors(averaged)
    names = hf_model.stored_names(source.spec.num_layers)
    expected = expected_shapes(source.spec)
    prefix = _prefix(averaged, stored, [names[name] for name in expected])
    tensors = {name: stored[prefix + names[name]] for name in expected}
    weights = Weights(averaged, tensors)
    weights.check(expected)
    return Program(source.name, source.spec, source.plan, weights)


def _tensors(averaged: Path) -> dict[str, LazyTensor]:
    files = sorted(averaged.glob("*.safetensors")) if averaged.is_dir() else [averaged]
    if not files:
        raise ModelError(f"{averaged} has no *.safetensors file with averaged weights")
    tensors: dict[str, LazyTensor] = {}
    for file in files:
        tensors |= safetensors_file.read(file)
    return tensors


def _prefix(averaged: Path, stored: dict[str, LazyTensor], wanted: list[str]) -> str:
    """Of the averaged weights; one that says so goes before none."""
    for prefix in (*PREFIXES[1:], PREFIXES[0]):
        if all(prefix + name in stored for name in wanted):
            return prefix
    best = max(PREFIXES, key=lambda prefix: sum(prefix + name in stored for name in wanted))
    missing = next(best + name for name in wanted if best + name not in stored)
    raise ModelError(f"{averaged}: the averaged weights have no tensor {missing}")
