"""Back ends by name. The heavy imports happen inside the factories."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mirror_sd.backends.cpu_features import has_bf16_products
from mirror_sd.backends.protocol import Backend
from mirror_sd.errors import ConfigError, UnsupportedModel
from mirror_sd.model_store import ModelFiles

log = logging.getLogger(__name__)


def create(
    engine: str,
    files: ModelFiles,
    *,
    device: str,
    precision: str,
    threads: int | None,
    max_context: int | None,
) -> Backend:
    """Load a model into the named engine; takes seconds.

    device: a torch device. precision: auto, fp32 or bf16. threads: None leaves torch's own number.
    max_context can only lower the model's. Raises `ConfigError` for a bad setting, `ModelError`
    for a bad model. A model that our decoder does not know goes to `transformers` with a warning.
    """
    factory = _FACTORIES.get(engine)
    if factory is None:
        raise ConfigError(f"engine {engine!r} is not one of {', '.join(sorted(_FACTORIES))}")
    if precision not in ("auto", "fp32", "bf16"):
        raise ConfigError(f"precision {precision!r} is not one of auto, fp32, bf16")
    _prepare_torch(device, threads)
    if precision == "auto":
        precision = _best_precision(device)
    return factory(files, device, precision, max_context)


def _prepare_torch(device: str, threads: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"the device {device!r} cannot be used: {reason}") from error


def _best_precision(device: str) -> str:
    if device.startswith("cpu"):
        return "bf16" if has_bf16_products() else "fp32"
    return "bf16"


def _torch(files: ModelFiles, device: str, precision: str, max_context: int | None) -> Backend:
    from mirror_sd.backends.torch_backend import TorchBackend
    from mirror_sd.uir import program
    from mirror_sd.uir.precision_plan import PrecisionPlan

    try:
        lowered = program.load(files, PrecisionPlan.of(precision), max_context)
    except UnsupportedModel as error:
        log.warning("%s; serving it through transformers, without a KV cache: slow", error.message)
        return _transformers(files, device, precision, max_context)
    return TorchBackend(lowered, device, precision)


def _transformers(
    files: ModelFiles, device: str, precision: str, max_context: int | None
) -> Backend:
    from mirror_sd.backends.transformers_backend import TransformersBackend

    return TransformersBackend(files, device, precision, max_context)


def _reference(files: ModelFiles, device: str, precision: str, max_context: int | None) -> Backend:
    from mirror_sd.backends.reference_backend import ReferenceBackend
    from mirror_sd.uir import program
    from mirror_sd.uir.precision_plan import PrecisionPlan

    if precision != "fp32":
        log.info("the reference engine computes in fp32, whatever precision is asked")
    return ReferenceBackend(program.load(files, PrecisionPlan.of("fp32"), max_context))


_Factory = Callable[[ModelFiles, str, str, int | None], Backend]
_FACTORIES: dict[str, _Factory] = {
    "torch": _torch,
    "transformers": _transformers,
    "reference": _reference,
}
