"""Packed weights on disk: made once, mapped or copied later, never trusted blindly."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mirror_sd import _native
from mirror_sd.backends import registry
from mirror_sd.backends.native import lowering, packed_file
from mirror_sd.backends.native.native_backend import NativeBackend
from mirror_sd.backends.protocol import Float32
from mirror_sd.model_store import ModelFiles
from mirror_sd.uir import program
from tests.unit.backends.native.batches import whole
from tests.unit.backends.native.models import BF16, INT8, PLAIN, write_directory

ROOT = Path(__file__).resolve().parents[4]
IDS = np.arange(50, dtype=np.int32)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIRROR_SD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> ModelFiles:
    return write_directory(PLAIN, tmp_path / "plain")


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    caplog.set_level(logging.INFO, logger="mirror_sd")
    yield caplog


def warnings_of(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno >= logging.WARNING]


def created(files: ModelFiles, precision: str = "int8") -> NativeBackend:
    backend = registry.create(
        "native", files, device="cpu", precision=precision, threads=2, max_context=None
    )
    assert isinstance(backend, NativeBackend)
    return backend


def logits(files: ModelFiles, precision: str = "int8") -> Float32:
    return whole(created(files, precision), IDS).copy()


def unpacked(files: ModelFiles) -> Float32:
    """The logits of weights that were never in a file."""
    loaded = program.load(files, INT8)
    backend = NativeBackend(loaded, threads=1, isa=_native.available_isas()[0])
    return whole(backend, IDS).copy()


def packed_files(cache: Path) -> list[Path]:
    """All that lies in the cache, so that nothing stray can be there either."""
    return sorted(path for path in cache.rglob("*") if path.is_file())


def test_a_second_load_takes_the_file_and_gives_the_same_bits(
    model: ModelFiles, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = logits(model)
    [path] = packed_files(cache)
    before = path.stat()

    def refuse(*_: object) -> float:
        raise AssertionError("packed again")

    monkeypatch.setattr(lowering, "pack", refuse)
    assert np.array_equal(logits(model), first)
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_the_file_holds_what_is_packed_in_memory(model: ModelFiles, cache: Path) -> None:
    expected = unpacked(model)
    assert not cache.exists()
    assert np.array_equal(logits(model), expected)
    assert np.array_equal(logits(model), expected)


def test_the_file_is_a_safetensors_file_of_aligned_tensors(model: ModelFiles, cache: Path) -> None:
    created(model)
    [path] = packed_files(cache)
    tensors = load_file(path)
    layouts = lowering.layouts(program.load(model, INT8))
    assert {name: len(tensors[name]) for name in tensors if tensors[name].dtype == np.uint8} == {
        item.name: item.packed_bytes for item in layouts
    }
    assert tensors["multipliers"].shape == (len(layouts),)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for item in layouts:
        assert (8 + length + header[item.name]["data_offsets"][0]) % 64 == 0


def test_weights_stay_mapped_where_memory_is_short(
    model: ModelFiles, cache: Path, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    expected = logits(model)
    monkeypatch.setattr(packed_file, "_COPY_IF_TIMES", 10**12)
    backend = created(model)
    [path] = packed_files(cache)
    assert str(path) in Path("/proc/self/maps").read_text()
    assert any("memory is short" in line for line in told.messages)
    assert np.array_equal(whole(backend, IDS), expected)


def test_weights_are_copied_where_there_is_memory(model: ModelFiles, cache: Path) -> None:
    created(model)
    backend = created(model)
    [path] = packed_files(cache)
    assert str(path) not in Path("/proc/self/maps").read_text()
    del backend


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def cut_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def lengthened(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0" * 4096)


def garbled(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


DAMAGE = {
    "cut short": cut_short,
    "cut to nothing": cut_to_nothing,
    "lengthened": lengthened,
    "garbled in its length": lambda path: garbled(path, 0),
    "garbled in its header": lambda path: garbled(path, 40),
    "garbled in a weight": lambda path: garbled(path, path.stat().st_size // 2),
    "garbled in a multiplier": lambda path: garbled(path, -9),
    "garbled in its checksum": lambda path: garbled(path, -1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_again(
    model: ModelFiles, cache: Path, told: pytest.LogCaptureFixture, damage: str
) -> None:
    expected = logits(model)
    [path] = packed_files(cache)
    whole_file = path.read_bytes()
    DAMAGE[damage](path)
    told.clear()
    assert np.array_equal(logits(model), expected)
    assert [path] == packed_files(cache)
    assert path.read_bytes() == whole_file
    assert any("is not what it should be; it is made again" in line for line in warnings_of(told))
    told.clear()
    assert np.array_equal(logits(model), expected)
    assert warnings_of(told) == []


def test_a_file_that_is_in_use_may_be_damaged_and_made_again(
    model: ModelFiles, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_file, "_COPY_IF_TIMES", 10**12)
    created(model)
    running = created(model)
    expected = whole(running, IDS).copy()
    [path] = packed_files(cache)
    # As another process would replace it: the old file lives on as long as it is mapped.
    fresh = path.with_name("fresh")
    fresh.write_bytes(b"x")
    fresh.rename(path)
    assert np.array_equal(logits(model), expected)
    assert np.array_equal(whole(running, IDS), expected)


NO_PLACES = {
    "a file in its place": lambda cache: cache.write_text("not a directory"),
    "a file in place of its folder": lambda cache: (cache.mkdir(), (cache / "packed").touch()),
    "a link to nowhere": lambda cache: cache.symlink_to("/proc/none/at/all"),
}


@pytest.mark.parametrize("place", NO_PLACES)
def test_without_a_cache_weights_are_packed_in_memory_with_a_warning(
    model: ModelFiles, cache: Path, told: pytest.LogCaptureFixture, place: str
) -> None:
    NO_PLACES[place](cache)
    assert np.array_equal(logits(model), unpacked(model))
    assert any("the packed weights are not cached: " in line for line in warnings_of(told))


def test_a_read_only_cache_still_serves_what_it_has(
    model: ModelFiles, cache: Path, told: pytest.LogCaptureFixture
) -> None:
    expected = logits(model)
    for path in packed_files(cache):
        path.chmod(0o400)
        path.parent.chmod(0o500)
    try:
        told.clear()
        assert np.array_equal(logits(model), expected)
        assert warnings_of(told) == []
    finally:
        (cache / "packed").chmod(0o700)


def run_python(code: str, model: ModelFiles, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(model.path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


LOAD = """
    import hashlib, logging, sys
    from pathlib import Path
    from mirror_sd.model_store import ModelFiles
    from tests.unit.backends.native.test_packed_file import logits
    logging.basicConfig(level=logging.WARNING)
    files = ModelFiles("plain", Path(sys.argv[1]), "safetensors")
"""
PRINT_DIGEST = "\n    print(hashlib.sha256(logits(files).tobytes()).hexdigest())"


def digest(values: Float32) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()


def test_a_full_disk_means_weights_in_memory_and_no_stray_file(
    model: ModelFiles, cache: Path
) -> None:
    limit = """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    """
    process = run_python(LOAD + limit + PRINT_DIGEST, model)
    out, err = process.communicate(timeout=60)
    assert out.strip() == digest(unpacked(model)), err
    assert "the packed weights are not cached: [Errno 27] File too large" in err
    assert packed_files(cache) == []


def test_processes_that_load_at_once_pack_once_and_are_all_right(
    model: ModelFiles, cache: Path
) -> None:
    count = """
    from mirror_sd.backends.native import lowering
    import time
    pack, packed = lowering.pack, []
    def counted(*arguments):
        packed.append(1)
        time.sleep(0.01)
        return pack(*arguments)
    lowering.pack = counted
    """
    code = LOAD + count + PRINT_DIGEST + "\n    print(len(packed))"
    processes = [run_python(code, model) for _ in range(3)]
    results = [process.communicate(timeout=100) for process in processes]
    digests, counts = zip(*(out.split() for out, _ in results), strict=True)
    assert set(digests) == {digest(unpacked(model))}, results
    matrices = len(lowering.layouts(program.load(model, INT8)))
    assert sorted(counts) == ["0", "0", str(matrices)]
    assert len(packed_files(cache)) == 1


def test_a_writer_that_was_killed_leaves_nothing_for_long(model: ModelFiles, cache: Path) -> None:
    slow = """
    from mirror_sd.backends.native import lowering
    import time
    def stop(*arguments):
        print("packing", flush=True)
        time.sleep(60)
    lowering.pack = stop
    """
    process = run_python(LOAD + slow + PRINT_DIGEST, model)
    assert process.stdout is not None
    assert process.stdout.readline() == "packing\n"
    process.kill()
    process.communicate(timeout=20)
    [stray] = packed_files(cache)
    assert stray.name.startswith(".new-")
    assert np.array_equal(logits(model), unpacked(model))
    [path] = packed_files(cache)
    assert path.suffix == ".safetensors"


def test_a_writer_that_takes_too_long_is_not_waited_for(
    model: ModelFiles,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(packed_file, "_LOCK_TIMEOUT_S", 0.2)
    expected = unpacked(model)
    (cache / "packed").mkdir(parents=True)
    with packed_file._locked(cache / "packed"):
        assert np.array_equal(logits(model), expected)
    assert any("not cached: another process writes into" in line for line in warnings_of(told))
    assert packed_files(cache) == []


def test_the_name_follows_the_plan_of_each_matrix(model: ModelFiles) -> None:
    plans = [INT8, BF16, replace(INT8, wide=frozenset({"qkv"})), replace(INT8, head="bf16")]
    names = {
        packed_file.path_for(model.path, lowering.layouts(program.load(model, plan)))
        for plan in plans
    }
    assert len(names) == len(plans)


def test_a_later_load_peaks_at_little_more_than_the_weights(
    model: ModelFiles, tmp_path: Path
) -> None:
    """34 MB of weights: the file is read into place, and the model's own file is hardly touched."""
    big = replace(PLAIN, hidden_size=1024, intermediate_size=2048, vocab_size=8192)
    files = write_directory(big, tmp_path / "big")
    weight_bytes = created(files).weight_bytes
    measured = """
    def peak_kb():
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0])
    logits(ModelFiles("plain", Path(sys.argv[2]), "safetensors"))  # all is imported
    before = peak_kb()
    logits(files)
    print(peak_kb() - before)
    """
    out, err = run_python(LOAD + measured, files, str(model.path)).communicate(timeout=60)
    assert int(out) * 1024 < 1.2 * weight_bytes + 8 * 2**20, err
