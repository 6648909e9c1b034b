"""The back end that the configuration describes for a device class."""

from __future__ import annotations

import logging
import os

from mirror_sd.backends.protocol import Backend
from mirror_sd.config import Config, PoolConfig
from mirror_sd.errors import ConfigError

logger = logging.getLogger(__name__)


def create_backend(
    config: Config, device_class: str, threads: int | None = None, *, section: str = "pools"
) -> Backend:
    """The back end that the configuration describes for a class; loads the model. `section` is the
    one that messages name.

    Raises `ConfigError` or `ModelError`.
    """
    from mirror_sd import cuda_allocator, model_store, openmp
    from mirror_sd.backends import registry

    pool = config.pool(device_class)
    if device_class != "cpu":
        # Before torch is imported, which reads it then.
        os.environ.update(cuda_allocator.environment(pool.device, os.environ))
    device = _device(pool, device_class, section)
    threads = threads or pool.threads or len(os.sched_getaffinity(0))
    for name, value in openmp.environment(threads).items():
        os.environ.setdefault(name, value)  # a pool has set them for its workers
    # On the CPU too, where that is the device of a pool of TPUs.
    is_tpu = device_class == "tpu" and pool.engine == "auto"
    return registry.create(
        "xla" if is_tpu else pool.engine,
        model_store.resolve(config.model.path),
        device=device,
        precision=pool.precision,
        threads=threads,
        max_context=config.model.max_context,
        kv=config.engine.kv_precision,
    )


def _device(pool: PoolConfig, device_class: str, section: str) -> str:
    """The device of a pool; raises `ConfigError` where torch finds none of its class for `auto`."""
    if pool.device != "auto":
        if device_class != "cpu" and pool.device == "cpu":
            logger.warning(
                "class %s computes on the CPU: %s.%s.device is cpu",
                device_class,
                section,
                device_class,
            )
        return pool.device
    if device_class == "cpu":
        return "cpu"
    if pool.engine == "xla":
        return "auto"
    if device_class == "tpu" and pool.engine == "auto":
        return "tpu"
    if device_class == "gpu":
        import torch

        if torch.cuda.is_available():
            return "cuda"
        if torch.xpu.is_available():
            return "xpu"
    setting = f"{section}.{device_class}"
    emulated = f"{setting}.engine=emulated to emulate one, or " if section == "pools" else ""
    raise ConfigError(
        f"{setting}.device is auto, and there is no {device_class} here that torch can use;"
        f" set {emulated}{setting}.device=cpu to compute on the CPU"
    )
