"""Back ends by name. The heavy imports happen inside the factories."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from mirror_sd.backends.cpu_features import has_bf16_products
from mirror_sd.backends.protocol import Backend
from mirror_sd.errors import ConfigError, UnsupportedModel
from mirror_sd.model_store import ModelFiles

log = logging.getLogger(__name__)

# Of `_native.Decoder`.
_MOST_THREADS = 1024
PRECISIONS = ("auto", "fp32", "bf16", "fp16", "int8")


def create(
    engine: str,
    files: ModelFiles,
    *,
    device: str,
    precision: str,
    threads: int | None,
    max_context: int | None,
    kv: str = "auto",
) -> Backend:
    """Load a model into the named engine; takes up to seconds.

    engine: auto is native on the CPU, xla on a TPU, torch on other devices. device: a torch device,
    one of `xla.runtime.open_device`, or a provider of onnxruntime. precision: auto, fp32, bf16,
    fp16 (torch, onnxruntime) or int8 (native, onnxruntime). threads: None takes the cores this
    process may use. max_context can only lower the model's. kv: number format of keys and values;
    other than auto it needs the native engine. Raises `ConfigError` for a bad setting, `ModelError`
    for a bad model. Without the C++ part torch takes the place of native, and a model that our
    decoders do not know goes to `transformers`, both with a warning.
    """
    if engine == "auto":
        of_device = {"cpu": "native", "tpu": "xla"}
        engine = of_device.get(device.partition(":")[0], "torch")
    factory = _FACTORIES.get(engine)
    if factory is None:
        known = ", ".join(("auto", *sorted(_FACTORIES)))
        raise ConfigError(f"engine {engine!r} is not one of {known}")
    if precision not in PRECISIONS:
        raise ConfigError(f"precision {precision!r} is not one of {', '.join(PRECISIONS)}")
    return factory(files, Setting(device, precision, threads, max_context, kv))


@dataclass(frozen=True, slots=True)
class Setting:
    """What a factory gets besides the model; `precision` may be auto."""

    device: str
    precision: str
    threads: int | None
    max_context: int | None
    kv: str = "auto"


def _native(files: ModelFiles, setting: Setting) -> Backend:
    try:
        from mirror_sd.backends.native.native_backend import NativeBackend, chosen_isa
    except ImportError as error:
        log.warning(
            "the native engine is not built (%s); torch serves instead, slower. Install a C++"
            " compiler and install mirror-sd again",
            error,
        )
        return _torch(files, setting)
    from mirror_sd.uir import program
    from mirror_sd.uir.precision_plan import PrecisionPlan

    if setting.device != "cpu":
        raise ConfigError(f"the native engine computes on the device 'cpu', not {setting.device!r}")
    threads = setting.threads or len(os.sched_getaffinity(0))
    if threads > _MOST_THREADS:
        raise ConfigError(f"{threads} threads; the native engine takes at most {_MOST_THREADS}")
    if setting.precision == "fp16":
        raise ConfigError("precision 'fp16' is for accelerators; native has fp32, bf16 and int8")
    isa = chosen_isa()
    precision = "int8" if setting.precision == "auto" else setting.precision
    plan = PrecisionPlan.native(precision, setting.kv)
    try:
        lowered = program.load(files, plan, setting.max_context)
    except UnsupportedModel as error:
        return _unsupported(error, files, setting)
    try:
        return NativeBackend(lowered, threads=threads, isa=isa, source=files.path)
    except UnsupportedModel as error:
        log.warning("%s; torch serves instead, slower", error.message)
        return _torch(files, setting)


def _onnxruntime(files: ModelFiles, setting: Setting) -> Backend:
    if setting.kv not in ("auto", "fp32"):
        raise ConfigError(f"a KV cache of {setting.kv} needs the native engine")
    from mirror_sd.backends.onnx import providers

    provider = providers.find(setting.device)
    from mirror_sd.backends.onnx.onnx_backend import OnnxBackend
    from mirror_sd.backends.onnx.products import precision_of
    from mirror_sd.uir import program
    from mirror_sd.uir.precision_plan import PrecisionPlan

    lowered = program.load(files, PrecisionPlan.of("fp32"), setting.max_context)
    threads = setting.threads or len(os.sched_getaffinity(0))
    return OnnxBackend(lowered, provider, precision_of(setting.precision), threads)


def _prepare_torch(device: str, threads: int | None) -> None:
    import torch

    from mirror_sd.backends import torch_device

    if threads is not None:
        torch.set_num_threads(threads)
    torch_device.check(device, f"the device {device!r}")
    torch_device.prepare(device)


def _torch_precision(setting: Setting) -> str:
    """The precision for torch. Raises `ConfigError` for int8, which only native has."""
    if setting.kv != "auto":
        raise ConfigError(f"a KV cache of {setting.kv} needs the native engine")
    if setting.precision == "int8":
        raise ConfigError(
            "precision 'int8' needs the native engine; this one has fp32, bf16 and fp16"
        )
    if setting.precision != "auto":
        return setting.precision
    if setting.device.startswith("cpu"):
        return "bf16" if has_bf16_products() else "fp32"
    from mirror_sd.backends import torch_device

    torch_device.check(setting.device, f"the device {setting.device!r}")
    return torch_device.half_precision(setting.device)


def _torch(files: ModelFiles, setting: Setting) -> Backend:
    precision = _torch_precision(setting)  # before what takes seconds to import
    from mirror_sd.backends.torch_backend import TorchBackend
    from mirror_sd.uir import program
    from mirror_sd.uir.precision_plan import PrecisionPlan

    _prepare_torch(setting.device, setting.threads)
    try:
        lowered = program.load(files, PrecisionPlan.of(precision), setting.max_context)
    except UnsupportedModel as error:
        return _unsupported(error, files, setting)
    return TorchBackend(lowered, setting.device, precision)


def _unsupported(error: UnsupportedModel, files: ModelFiles, setting: Setting) -> Backend:
    log.warning("%s; serving it through transformers, without a KV cache: slow", error.message)
    return _transformers(files, setting)


def _transformers(files: ModelFiles, setting: Setting) -> Backend:
    precision = _torch_precision(setting)  # before what takes seconds to import
    from mirror_sd.backends.transformers_backend import TransformersBackend

    _prepare_torch(setting.device, setting.threads)
    return TransformersBackend(files, setting.device, precision, setting.max_context)


def _reference(files: ModelFiles, setting: Setting) -> Backend:
    from mirror_sd.backends.reference_backend import ReferenceBackend
    from mirror_sd.uir import program
    from mirror_sd.uir.precision_plan import PrecisionPlan

    if setting.precision != "fp32":
        log.info("the reference engine computes in fp32, whatever precision is asked")
    plan = PrecisionPlan.of("fp32")
    return ReferenceBackend(program.load(files, plan, setting.max_context))


def _xla(files: ModelFiles, setting: Setting) -> Backend:
    if setting.precision not in ("auto", "fp32", "bf16"):
        raise ConfigError(f"precision {setting.precision!r}: the xla engine has fp32 and bf16")
    precision = "bf16" if setting.precision == "auto" else setting.precision
    if setting.kv not in ("auto", "fp32", "bf16"):
        raise ConfigError(f"a KV cache of {setting.kv} needs the native engine")
    from mirror_sd.backends.xla import runtime

    threads = setting.threads or len(os.sched_getaffinity(0))
    device = runtime.open_device(setting.device, threads)
    from mirror_sd.backends.xla.xla_backend import XlaBackend
    from mirror_sd.uir import program
    from mirror_sd.uir.precision_plan import PrecisionPlan

    plan = PrecisionPlan.native(precision, setting.kv)
    try:
        lowered = program.load(files, plan, setting.max_context)
    except UnsupportedModel as error:
        return _unsupported(error, files, replace(setting, device="cpu", kv="auto"))
    return XlaBackend(lowered, device, precision)


_FACTORIES: dict[str, Callable[[ModelFiles, Setting], Backend]] = {
    "native": _native,
    "onnxruntime": _onnxruntime,
    "torch": _torch,
    "transformers": _transformers,
    "reference": _reference,
    "xla": _xla,
}
