"""What a back end lowers to its device: a spec, a precision plan and the weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mirror_sd.model_store import ModelFiles
from mirror_sd.uir import gguf_model, hf_model
from mirror_sd.uir.model_spec import ModelSpec, expected_shapes
from mirror_sd.uir.precision_plan import PrecisionPlan
from mirror_sd.uir.weights import Weights


@dataclass(frozen=True, slots=True)
class Program:
    """One decoder, ready to be lowered; weights are checked for presence and shape."""

    name: str
    spec: ModelSpec
    plan: PrecisionPlan
    weights: Weights


def read_spec(files: ModelFiles) -> ModelSpec:
    """The model's spec alone. Raises `ModelError`, or `UnsupportedModel` for another family."""
    if files.format == "gguf":
        return gguf_model.read(files.path)[0]
    return hf_model.read_spec(files.path)


def load(files: ModelFiles, plan: PrecisionPlan, max_context: int | None = None) -> Program:
    """Open a model; no weight is read yet. `max_context` can only lower the model's own."""
    spec, weights = _read(files)
    weights.check(expected_shapes(spec))
    if max_context is not None:
        spec = replace(spec, max_context=min(spec.max_context, max_context))
    return Program(files.name, spec, plan, weights)


def _read(files: ModelFiles) -> tuple[ModelSpec, Weights]:
    if files.format == "gguf":
        return gguf_model.read(files.path)
    return hf_model.read(files.path)
