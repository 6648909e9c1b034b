"""Draft heads by the back end of their target. The heavy imports happen inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mirror_sd.backends.protocol import Backend, DraftHead
from mirror_sd.errors import UnsupportedModel

if TYPE_CHECKING:
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
    raise UnsupportedModel(f"the engine {backend.capabilities.name!r} has no draft head")
