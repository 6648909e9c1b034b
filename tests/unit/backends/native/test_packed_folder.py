"""Which packed files stay in the cache when another is made."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mirror_sd.backends.native import lowering, packed_file
from mirror_sd.model_store import ModelFiles
from mirror_sd.uir import program
from tests.unit.backends.native.models import INT8, PLAIN, write_directory
from tests.unit.backends.native.test_packed_file import (
    cache,
    created,
    logits,
    model,
    packed_files,
    unpacked,
    warnings_of,
)

__all__ = ["cache", "model"]  # fixtures


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="mirror_sd")
    return caplog


def test_another_model_file_takes_the_place_of_the_old_one(
    model: ModelFiles, cache: Path, told: pytest.LogCaptureFixture
) -> None:
    first = logits(model)
    [old] = packed_files(cache)
    time.sleep(0.01)
    write_directory(PLAIN, model.path, seed=8)
    second = logits(model)
    assert not np.array_equal(second, first)
    assert np.array_equal(second, unpacked(model))
    [new] = packed_files(cache)
    assert new != old
    assert f"removing {old}" in told.messages


def test_precisions_models_and_layouts_lie_side_by_side(
    model: ModelFiles, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_directory(PLAIN, tmp_path / "other", seed=8)
    for files in (model, other):
        for precision in ("int8", "bf16", "fp32"):
            created(files, precision)
    paths = packed_files(cache)
    assert len(paths) == 6
    expected = logits(model)
    assert packed_files(cache) == paths
    # The same weights packed by a later version replace the earlier ones.
    monkeypatch.setattr(packed_file, "LAYOUT_VERSION", packed_file.LAYOUT_VERSION + 1)
    assert np.array_equal(logits(model), expected)
    assert len(packed_files(cache)) == 6
    assert len(set(paths) & set(packed_files(cache))) == 5


def write_as_before(path: Path) -> None:
    """A file without the name of its model, as an earlier version left it."""
    save_file({"multipliers": np.ones(3, np.float32)}, path, {"format": "mirror-sd packed"})


def test_files_of_models_that_are_gone_go_with_the_next_one_that_is_packed(
    model: ModelFiles, cache: Path, tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    created(model)
    [kept] = packed_files(cache)
    gone = write_directory(PLAIN, tmp_path / "gone", seed=8)
    for precision in ("int8", "bf16"):
        created(gone, precision)
    gone.path.rename(tmp_path / "elsewhere")
    write_as_before(cache / "packed" / f"{'0' * 32}.safetensors")
    (cache / "packed" / "damaged.safetensors").write_bytes(b"\0" * 20)
    assert len(packed_files(cache)) == 5
    moved = replace(gone, path=tmp_path / "elsewhere")
    created(moved)
    assert packed_files(cache) == sorted(
        packed_file.path_for(files.path, lowering.layouts(program.load(files, INT8)))
        for files in (model, moved)
    )
    assert kept in packed_files(cache)
    assert warnings_of(told) == []


def test_a_model_that_cannot_be_looked_for_keeps_its_file(
    model: ModelFiles,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: pytest.LogCaptureFixture,
) -> None:
    created(model)
    other = write_directory(PLAIN, tmp_path / "other", seed=8)
    exists = Path.exists

    def refuse(path: Path) -> bool:
        if path == model.path:
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", refuse)
    created(other)
    assert len(packed_files(cache)) == 2
    assert warnings_of(told) == []
