"""JAX made ready: its threads, its device, its cache of compiled programs, and what it compiles."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

from mirror_sd import telemetry
from mirror_sd.errors import ConfigError
from mirror_sd.model_store import cache_dir

log = logging.getLogger(__name__)

INSTALL = "pip install -e '.[tpu]' in the clone; on a TPU host also 'jax[tpu]'"
_COMPILED = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Counts every program that XLA compiles, or reads from its cache, in this process."""

    def __init__(self) -> None:
        self.count = 0
        self._is_listening = False

    def listen(self, jax: Any) -> None:
        if not self._is_listening:
            jax.monitoring.register_event_duration_secs_listener(self._observe)
            self._is_listening = True

    def _observe(self, event: str, duration_s: float, **_: Any) -> None:
        if event == _COMPILED:
            self.count += 1
            telemetry.XLA_COMPILATIONS.inc()


_compilations = Compilations()


def compilations() -> int:
    """Programs compiled in this process so far."""
    return _compilations.count


def open_device(device: str, threads: int) -> Any:
    """The JAX device of a name: auto, cpu, tpu or cuda, with `:N` for another than the first.

    threads: of XLA on a CPU; what was made first in the process stays. Raises `ConfigError` where
    JAX or the device is missing.
    """
    platform, _, number = device.partition(":")
    if platform not in ("auto", "cpu", "tpu", "cuda") or not (number or "0").isdecimal():
        raise ConfigError(f"the xla engine's device is auto, cpu, tpu or cuda, not {device!r}")
    # Read when XLA makes its client; more threads than cores would wait for one another.
    os.environ["NPROC"] = str(threads)
    try:
        import jax
    except ImportError as error:
        raise ConfigError(f"the xla engine needs JAX, which is not here: {INSTALL}") from error
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    _keep_programs(jax)
    _compilations.listen(jax)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of platforms that are not there
            found = jax.devices() if platform == "auto" else jax.devices(platform)
        return found[int(number or 0)]
    except (RuntimeError, IndexError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"JAX cannot use the device {device!r}: {reason} ({INSTALL})") from error


def _keep_programs(jax: Any) -> None:
    """Compiled programs are kept on disk, so that only the first start compiles them."""
    folder = cache_dir() / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("compiled programs are not kept: %s: %s", folder, error.strerror or error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
