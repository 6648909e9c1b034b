"""Execution providers of ONNX Runtime by the names that `--draft-engine` has for them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from mirror_sd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Provider:
    """`chain`: in order of preference; what the first cannot compute falls to the next.
    `has_block_products`: whether it has `MatMulNBits`, the product with int8 blocks of weights.
    `multiplies_halves`: whether fp16 is a format of its products, not only of stored weights.
    `memory`: where its caches lie."""

    name: str
    chain: tuple[str, ...]
    install: str
    has_block_products: bool = False
    multiplies_halves: bool = False
    memory: str = "cpu"


_CPU = "CPUExecutionProvider"
_CUDA = "CUDAExecutionProvider"
PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("cpu", (_CPU,), "pip install -e '.[edge]' in the clone", has_block_products=True),
        Provider(
            "cuda",
            (_CUDA, _CPU),
            "pip uninstall onnxruntime, then pip install onnxruntime-gpu, beside CUDA and cuDNN",
            has_block_products=True,
            multiplies_halves=True,
            memory="cuda",
        ),
        Provider(
            "trt",
            ("TensorrtExecutionProvider", _CUDA, _CPU),
            "pip uninstall onnxruntime, then pip install onnxruntime-gpu tensorrt, beside CUDA",
            multiplies_halves=True,
            memory="cuda",
        ),
        Provider(
            "openvino",
            ("OpenVINOExecutionProvider", _CPU),
            "pip uninstall onnxruntime, then pip install onnxruntime-openvino",
        ),
    )
}


def find(name: str) -> Provider:
    """The provider, which is there. Raises `ConfigError` that says what to install."""
    provider = PROVIDERS.get(name)
    if provider is None:
        raise ConfigError(f"onnxruntime runs on {', '.join(PROVIDERS)}, not on {name!r}")
    runtime = runtime_module()
    check(provider, runtime.get_available_providers())
    return provider


def check(provider: Provider, available: Collection[str]) -> None:
    """Raises `ConfigError` where this ONNX Runtime was built without the provider."""
    if provider.chain[0] not in available:
        raise ConfigError(
            f"{provider.name!r} needs the {provider.chain[0]} of ONNX Runtime, and the one"
            f" installed has only {', '.join(sorted(available))}; {provider.install}"
        )


def runtime_module() -> Any:
    """`onnxruntime`, imported. Raises `ConfigError` where it, or `onnx`, is missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime
    except ImportError as error:
        raise ConfigError(
            f"ONNX Runtime is not installed ({error}); {PROVIDERS['cpu'].install}"
        ) from error
    return onnxruntime
