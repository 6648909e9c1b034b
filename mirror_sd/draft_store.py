"""Which draft head a worker drafts with, and whether it fits the model.

A draft made for another target is refused with the reason, before anything is started and again by
each worker; it would be right about nothing. A file that cannot be read only costs speed: the
worker says so, sets `mirror_worker_draft_head` to 0 and drafts from what it has otherwise.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mirror_sd import drafts, telemetry
from mirror_sd.config import Config
from mirror_sd.errors import ModelError, UnsupportedModel
from mirror_sd.model_store import ModelFiles
from mirror_sd.uir import draft_file, program, tokenizer_files
from mirror_sd.uir.draft_file import DraftMismatch, DraftProgram, DraftSpec

Head = TypeVar("Head")

_log = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"


def find(config: Config, files: ModelFiles, device_class: str) -> Path | None:
    """The file that the settings name, which need not be there; None if no head is wanted, or none
    ships for the model."""
    speculation = config.speculation
    if not speculation.enabled or speculation.drafter not in ("auto", "head"):
        return None
    if speculation.draft == NONE:
        return None
    if speculation.draft == AUTO:
        return drafts.find(files.name, device_class)
    path = Path(speculation.draft)
    try:
        return path.expanduser()
    except RuntimeError:  # the home of a user who is not there: told as a missing file is
        return path


def check(config: Config, files: ModelFiles, tokenizer_json: Path) -> None:
    """What can be known of the drafts before anything is started, by their headers alone.

    Raises `DraftMismatch` if the file that the settings name was made for another target; warns of
    what else is wrong, and the worker goes on without it.
    """
    real = [name for name, pool in config.pools.items() if pool.engine != "emulated"]
    found = {path for name in real if (path := find(config, files, name)) is not None}
    for path in sorted(found):
        try:
            _check_target(path, draft_file.read_spec(path), files, tokenizer_json)
        except UnsupportedModel:
            return  # runs on transformers, of whose models our own files say nothing
        except ModelError as error:
            if _is_refused(error, config):
                raise
            _log.warning("%s; drafts come from lookup and history", error.message)


def open_head(
    config: Config, files: ModelFiles, device_class: str, lower: Callable[[DraftProgram], Head]
) -> Head | None:
    """The draft head of a worker: `lower` makes it of the program for the worker's back end.

    None where none is wanted, or the draft cannot be used; then a warning has said why. Raises
    `DraftMismatch` if the file that the settings name was made for another target.
    """
    path = find(config, files, device_class)
    if path is None:
        if config.speculation.drafter == "head" and config.speculation.draft != NONE:
            _report_loss(device_class, f"no draft ships for {files.name}")
        return None
    try:
        head = lower(load(path, files))
    except ModelError as error:
        if _is_refused(error, config):
            raise
        _report_loss(device_class, error.message)
        return None
    telemetry.DRAFT_HEAD.labels(device_class).set(1)
    _log.info("drafting with %s", path)
    return head


def load(path: Path, files: ModelFiles) -> DraftProgram:
    """Raises `ModelError`: `DraftMismatch` if it was made for another target than `files`."""
    loaded = draft_file.read(path)
    with tempfile.TemporaryDirectory(prefix="mirror-sd-") as scratch:
        tokenizer_files.export(files, Path(scratch))
        _check_target(path, loaded.spec, files, Path(scratch) / tokenizer_files.TOKENIZER)
    return loaded


def _check_target(path: Path, spec: DraftSpec, files: ModelFiles, tokenizer_json: Path) -> None:
    target = program.read_spec(files)
    draft_file.check_target(
        path,
        spec,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        tokenizer=draft_file.tokenizer_digest(tokenizer_json),
    )


def _is_refused(error: ModelError, config: Config) -> bool:
    # One that ships is found by the model's name, which may be that of another model.
    return isinstance(error, DraftMismatch) and config.speculation.draft != AUTO


def _report_loss(device_class: str, reason: str) -> None:
    telemetry.DRAFT_HEAD.labels(device_class).set(0)
    _log.warning("%s; drafts come from lookup and history", reason)
