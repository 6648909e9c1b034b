"""Packed weights on disk, so that a later start maps them instead of packing again.

A safetensors file: one U8 tensor for each matrix, in the order of execution, each at a multiple of
64 bytes, `multipliers`, F32 in the same order, and `checksum`, the CRC-32 of all before it. Its
metadata name the model that it was made of. A new file of a model and its number formats takes the
place of the one before, and removes those whose models are no longer there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import psutil
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from mirror_sd.backends.native.lowering import MatrixLayout
from mirror_sd.model_store import cache_dir

Bytes = NDArray[np.uint8]
log = logging.getLogger(__name__)

# Part of a file's name: raised when the same weights are packed or described differently.
LAYOUT_VERSION = 4
_SOURCE = "source"
_ALIGNMENT = 4096
_COPY_IF_TIMES = 3
_LOCK_TIMEOUT_S = 900.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Matrices by position in the list of layouts. `data` are views of one array or map."""

    data: list[Bytes]
    multipliers: list[float]


def path_for(source: Path, layouts: Sequence[MatrixLayout]) -> Path:
    """Where the packed weights of a model file (or directory) lie: `<what>-<which>.safetensors`.

    The first part follows from the model's path and the number formats, the second one from the
    contents too.
    """
    formats = sorted({item.format for item in layouts})
    parts = [str(LAYOUT_VERSION)]
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    for file in files:
        status = file.stat()
        parts.append(f"{file.name} {status.st_size} {status.st_mtime_ns}")
    parts += [f"{item.name} {item.outputs} {item.inputs} {item.format}" for item in layouts]
    name = f"{_digest([str(source.absolute()), *formats])}-{_digest(parts)}.safetensors"
    return cache_dir() / "packed" / name


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def load_or_pack(
    source: Path, layouts: Sequence[MatrixLayout], pack: Callable[[MatrixLayout, Bytes], float]
) -> PackedWeights:
    """The weights of the model `source` from its file; if they are not there, packs them, in memory
    if the disk refuses.

    Of several processes one packs and the others wait for it.
    """
    path = path_for(source, layouts)
    weights = _read(path, source, layouts)
    if weights is not None:
        return weights
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            weights = _read(path, source, layouts)
            if weights is None:
                _write(path, source, layouts, pack)
                _remove_others(path)
    except OSError as error:
        log.warning("the packed weights are not cached: %s", error)
    weights = weights or _read(path, source, layouts)
    return weights if weights is not None else pack_in_memory(layouts, pack)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One writer at a time; the lock dies with its process. Raises `TimeoutError`."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process writes into {folder}") from error
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _remove_others(path: Path) -> None:
    """Under the lock: what `path` takes the place of, what was made of models that are gone, and
    what writers that were killed left."""
    what = path.name.partition("-")[0]
    for other in (*path.parent.glob("*.safetensors"), *path.parent.glob(".new-*")):
        if other == path:
            continue
        is_old = not other.name.endswith(".safetensors") or other.name.startswith(f"{what}-")
        if is_old or not _has_source(other):
            log.info("removing %s", other)
            other.unlink(missing_ok=True)


def _has_source(path: Path) -> bool:
    """Whether the model that `path` was made of is there, as far as this process may see."""
    try:
        with safe_open(path, "np") as file:
            source = (file.metadata() or {}).get(_SOURCE)
        return source is not None and Path(source).exists()
    except (FileNotFoundError, SafetensorError):
        return False
    except OSError:
        return True


def _header(
    layouts: Sequence[MatrixLayout], source: Path | None = None
) -> tuple[bytes, list[int], int]:
    """(length and header, offset of each matrix and of the multipliers, size of the file)."""
    metadata = {"format": "mirror-sd packed"}
    if source is not None:
        metadata[_SOURCE] = str(source.absolute())
    entries: dict[str, object] = {"__metadata__": metadata}
    offsets, at = [], 0
    for layout in layouts:
        end = at + layout.packed_bytes
        entries[layout.name] = {"dtype": "U8", "shape": [end - at], "data_offsets": [at, end]}
        offsets.append(at)
        at = end
    end = at + 4 * len(layouts)
    entries["multipliers"] = {"dtype": "F32", "shape": [len(layouts)], "data_offsets": [at, end]}
    offsets.append(at)
    entries["checksum"] = {"dtype": "U32", "shape": [1], "data_offsets": [end, end + 4]}
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    start = 8 + len(text)
    offsets = [start + offset for offset in offsets]
    return len(text).to_bytes(8, "little") + text, offsets, start + end + 4


def _write(
    path: Path,
    source: Path,
    layouts: Sequence[MatrixLayout],
    pack: Callable[[MatrixLayout, Bytes], float],
) -> None:
    header, offsets, size = _header(layouts, source)
    descriptor, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    scratch = Path(name)
    try:
        with os.fdopen(descriptor, "r+b") as file:
            # Taken up at once: a full disk must be an error here, not a bus error in the map.
            os.posix_fallocate(file.fileno(), 0, size)
            file.write(header)
            file.flush()
            view = np.memmap(file, np.uint8, "r+", shape=(size,))
            multipliers = _pack_all(layouts, view, offsets, pack)
            view[offsets[-1] : -4] = np.array(multipliers, "<f4").view(np.uint8)
            view[-4:] = np.array([_checksum(view, len(header))], "<u4").view(np.uint8)
            view.flush()
        scratch.rename(path)
    finally:
        with suppress(FileNotFoundError):
            scratch.unlink()


def _checksum(memory: Bytes, start: int) -> int:
    return zlib.crc32(memory[start:-4].data)


def _pack_all(
    layouts: Sequence[MatrixLayout],
    memory: Bytes,
    offsets: Sequence[int],
    pack: Callable[[MatrixLayout, Bytes], float],
) -> list[float]:
    return [
        pack(layout, memory[offset : offset + layout.packed_bytes])
        for layout, offset in zip(layouts, offsets, strict=False)
    ]


def _read(path: Path, source: Path, layouts: Sequence[MatrixLayout]) -> PackedWeights | None:
    header, offsets, size = _header(layouts, source)
    try:
        with path.open("rb") as file:
            is_sound = os.fstat(file.fileno()).st_size == size and file.read(len(header)) == header
            memory = _load(file, size) if is_sound else None
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("cannot read the packed weights: %s", error)
        return None
    if memory is None or _checksum(memory, len(header)) != memory[-4:].view("<u4")[0]:
        log.warning("%s is not what it should be; it is made again", path)
        return None
    multipliers = memory[offsets[-1] : -4].view("<f4").tolist()
    return PackedWeights(_views(memory, layouts, offsets), multipliers)


def _load(file: BinaryIO, size: int) -> Bytes:
    """A copy in huge pages, which a file's map cannot have; a map where memory is short.

    A forward touches every page of the weights: with 4 KB pages it took 15-25 % longer.
    """
    if psutil.virtual_memory().available < _COPY_IF_TIMES * size:
        log.info("memory is short: the weights stay mapped from their file, which is slower")
        return np.memmap(file, np.uint8, "r", shape=(size,))
    memory = _empty(size)
    file.seek(0)
    if file.readinto(memory.data) != size:  # type: ignore[attr-defined]
        raise OSError(f"{file.name} became shorter while it was read")
    return memory


def _empty(size: int) -> Bytes:
    """Aligned like the file. numpy asks for huge pages for arrays of this size."""
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % _ALIGNMENT :][:size]


def pack_in_memory(
    layouts: Sequence[MatrixLayout], pack: Callable[[MatrixLayout, Bytes], float]
) -> PackedWeights:
    _, offsets, size = _header(layouts)
    memory = _empty(size)
    multipliers = _pack_all(layouts, memory, offsets, pack)
    return PackedWeights(_views(memory, layouts, offsets), multipliers)


def _views(memory: Bytes, layouts: Sequence[MatrixLayout], offsets: Sequence[int]) -> list[Bytes]:
    return [
        np.asarray(memory[offset : offset + layout.packed_bytes])
        for layout, offset in zip(layouts, offsets, strict=False)
    ]
