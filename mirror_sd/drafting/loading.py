"""The engine of a drafter as the configuration describes it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mirror_sd import model_store
from mirror_sd.config import Config, PoolConfig
from mirror_sd.config_drafters import DrafterConfig
from mirror_sd.drafting.draft_engine import DraftEngine
from mirror_sd.engine_backend import create_backend
from mirror_sd.errors import ConfigError
from mirror_sd.host_memory import HostMemory
from mirror_sd.model_store import ModelFiles
from mirror_sd.uir import draft_file, tokenizer_files


def load(config: Config, device_class: str, threads: int | None) -> tuple[DraftEngine, str]:
    """(engine, digest of the tokenizer). Raises `ConfigError` or `ModelError`, as where the
    drafter's tokenizer is not the target's."""
    settings = config.drafter(device_class)
    target = model_store.resolve(config.model.path)
    files = model_store.resolve(settings.model) if settings.model else target
    digest = tokenizer_digest(files)
    if files is not target and digest != tokenizer_digest(target):
        raise ConfigError(
            f"drafters.{device_class}.model is {settings.model!r}, whose tokenizer is not that of"
            f" {config.model.path!r}: a draft must have its target's tokens"
        )
    engine = DraftEngine(
        create_backend(
            _as_pool(config, device_class, settings), device_class, threads, section="drafters"
        ),
        kv_cache_mb=config.engine.kv_cache_mb,
        most_sessions=settings.sessions,
        host=HostMemory(),
    )
    engine.warm_up()
    return engine, digest


def _as_pool(config: Config, device_class: str, settings: DrafterConfig) -> Config:
    """The configuration of a stack whose pool of that class has the drafter's model and engine.
    The cache has the engine's own format: the workers' may be one that only theirs has."""
    pool = PoolConfig(engine=settings.engine, device=settings.device, precision=settings.precision)
    model = {"path": settings.model or config.model.path}
    return config.model_copy(
        update={
            "pools": {device_class: pool},
            "model": config.model.model_copy(update=model),
            "engine": config.engine.model_copy(update={"kv_precision": "auto"}),
        }
    )


def tokenizer_digest(files: ModelFiles) -> str:
    """Of the model's tokenizer.json."""
    with tempfile.TemporaryDirectory(prefix="mirror-sd-") as scratch:
        tokenizer_files.export(files, Path(scratch))
        return draft_file.tokenizer_digest(Path(scratch) / tokenizer_files.TOKENIZER)
