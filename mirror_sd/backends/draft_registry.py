"""Draft heads by the back end of their target. The heavy imports happen inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mirror_sd.backends.protocol import Backend, Capabilities, DraftHead
from mirror_sd.errors import UnsupportedModel

if TYPE_CHECKING:
    from mirror_sd.model_store import ModelFiles
    from mirror_sd.uir.draft_file import DraftProgram


def create(backend: Backend, program: DraftProgram, *, threads: int | None) -> DraftHead:
    """A head that drafts for the model of `backend`; one of the native engine works on the threads
    of its target, whatever `threads` says, None included.

    Raises `UnsupportedModel` for a back end without hidden states, or a draft that does not fit.
    """
    match backend.capabilities.name:
        case "native":
            from mirror_sd.backends.native.native_backend import NativeBackend
            from mirror_sd.backends.native.native_draft import NativeDraftHead

            if isinstance(backend, NativeBackend):
                return NativeDraftHead(program, backend)
        case "torch":
            from mirror_sd.backends.torch_backend import TorchBackend
            from mirror_sd.backends.torch_draft import TorchDraftHead

            if isinstance(backend, TorchBackend):
                return TorchDraftHead(program, backend)
        case "onnxruntime":
            from mirror_sd.backends.onnx.onnx_backend import OnnxBackend

            if isinstance(backend, OnnxBackend):
                return backend.draft_head(program)
        case "xla":
            from mirror_sd.backends.xla.xla_backend import XlaBackend
            from mirror_sd.backends.xla.xla_draft import XlaDraftHead

            if isinstance(backend, XlaBackend):
                return XlaDraftHead(program, backend)
    raise UnsupportedModel(f"the engine {backend.capabilities.name!r} has no draft head")


def create_on_onnxruntime(
    target: Capabilities,
    files: ModelFiles,
    program: DraftProgram,
    *,
    provider: str,
    precision: str,
    threads: int,
) -> DraftHead:
    """A head on ONNX Runtime for a target on whatever engine, of the model `files`. `provider` is
    one of `onnx.providers`, `precision` one of `onnx.products`.

    Raises `ConfigError` where the provider is absent, saying what to install, or does not start.
    """
    from mirror_sd.backends.onnx import providers

    found = providers.find(provider)
    from mirror_sd.backends.onnx.onnx_draft import OnnxDraftHead
    from mirror_sd.backends.onnx.products import precision_of
    from mirror_sd.uir import program as programs
    from mirror_sd.uir.precision_plan import PrecisionPlan

    weights = programs.load(files, PrecisionPlan.of("fp32")).weights
    return OnnxDraftHead(
        program,
        target,
        weights.load("embedding"),
        provider=found,
        precision=precision_of(precision),
        threads=threads,
    )
