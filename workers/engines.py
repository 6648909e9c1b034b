"""The engine that a pool's configuration names. The heavy imports happen inside the factories."""

from __future__ import annotations

from mirror_sd.config import Config
from mirror_sd.run_dir import RunDir
from workers.report import Engine


def create(config: Config, run: RunDir, device_class: str, threads: int | None) -> Engine:
    """Loads the model, where one is needed; raises `ConfigError` or `ModelError`."""
    factory = _emulated if config.pool(device_class).engine == "emulated" else _real
    return factory(config, run, device_class, threads)


def _emulated(config: Config, run: RunDir, device_class: str, threads: int | None) -> Engine:
    from workers.emulated import build

    return build(config, run, device_class)


def _real(config: Config, run: RunDir, device_class: str, threads: int | None) -> Engine:
    from mirror_sd.drafting.connection import connector
    from mirror_sd.engine import build

    return build(config, device_class, threads, connector(config, run, device_class))
