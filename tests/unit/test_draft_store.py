"""Which draft a worker takes, what is refused at the start, and what only costs speed."""

from __future__ import annotations

import logging
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from mirror_sd import draft_store, drafts, model_store, telemetry
from mirror_sd.config import Config, load
from mirror_sd.errors import ModelError, SetupError, UnsupportedModel
from mirror_sd.model_store import ModelFiles
from mirror_sd.supervisor import foreground
from mirror_sd.uir import draft_file, tokenizer_files
from mirror_sd.uir.draft_file import DraftMismatch, DraftProgram
from tests.random_draft import program_of, spec_for

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def model() -> ModelFiles:
    try:
        return model_store.resolve(DEFAULT)
    except ModelError:
        return model_store.pull(DEFAULT, print)


@pytest.fixture(scope="module")
def fitting(model: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("draft")
    path = scratch / "fitting.draft.safetensors"
    draft_file.write(path, program_of(spec_for(model, scratch / "tokenizer")))
    return path


@pytest.fixture(scope="module")
def foreign(model: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("draft")
    path = scratch / "foreign.draft.safetensors"
    spec = spec_for(model, scratch / "tokenizer", tokenizer="0" * 64, target="another")
    draft_file.write(path, program_of(spec))
    return path


@pytest.fixture
def torn(fitting: Path, tmp_path: Path) -> Path:
    path = tmp_path / "torn.draft.safetensors"
    path.write_bytes(fitting.read_bytes()[:-1000])
    return path


def configured(draft: Path | str, *more: str) -> Config:
    settings = (f"speculation.draft={draft}", "speculation.drafter=auto", *more)
    return load(overrides=list(settings), environ={})


def gauge(device_class: str) -> float | None:
    [family] = telemetry.DRAFT_HEAD.collect()
    values = {s.labels["class"]: s.value for s in family.samples}
    return values.get(device_class)


def test_draft_that_fits_is_opened_and_counted(model: ModelFiles, fitting: Path) -> None:
    head = draft_store.open_head(configured(fitting), model, "cpu", lambda program: program)
    assert isinstance(head, DraftProgram)
    assert head.spec.target == DEFAULT
    assert gauge("cpu") == 1


def test_draft_for_another_tokenizer_is_refused_with_the_reason(
    model: ModelFiles, foreign: Path
) -> None:
    reason = "made for 'another', does not fit: its tokenizer is another one than the target's"
    with pytest.raises(DraftMismatch, match=reason):
        draft_store.open_head(configured(foreign), model, "cpu", lambda program: program)


def test_draft_for_another_tokenizer_is_refused_before_anything_starts(
    model: ModelFiles, foreign: Path, tmp_path: Path
) -> None:
    from mirror_sd.run_dir import RunDir

    with pytest.raises(SetupError, match="its tokenizer is another one"):
        foreground.lay_out_tokenizer(configured(foreign), RunDir(tmp_path))
    for setting in ("speculation.enabled=false", "speculation.drafter=lookup"):
        foreground.lay_out_tokenizer(configured(foreign, setting), RunDir(tmp_path))


@pytest.mark.parametrize("kind", ["missing", "torn", "directory"])
def test_draft_that_cannot_be_read_costs_a_warning_and_the_head(
    model: ModelFiles, torn: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = {"missing": tmp_path / "none", "torn": torn, "directory": tmp_path}[kind]
    with caplog.at_level(logging.WARNING):
        assert draft_store.open_head(configured(path), model, "gpu", lambda p: p) is None
    assert gauge("gpu") == 0
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert str(path) in caplog.text and "lookup and history" in caplog.text
    caplog.clear()
    tokenizer_files.export(model, tmp_path)
    draft_store.check(configured(path), model, tmp_path / tokenizer_files.TOKENIZER)
    assert str(path) in caplog.text


def test_path_in_the_home_of_nobody_is_told_as_a_missing_file(
    model: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured("~no-such-user/my.draft.safetensors")
    assert draft_store.open_head(config, model, "gpu", lambda p: p) is None
    assert "~no-such-user" in caplog.text and "lookup and history" in caplog.text


def test_back_end_without_draft_heads_goes_on_without(
    model: ModelFiles, fitting: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lower(program: DraftProgram) -> DraftProgram:
        raise UnsupportedModel("no hidden states here")

    assert draft_store.open_head(configured(fitting), model, "tpu", lower) is None
    assert gauge("tpu") == 0
    assert "no hidden states here" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        ("speculation.draft=none",),
        ("speculation.enabled=false",),
        ("speculation.drafter=lookup",),
        ("speculation.drafter=history",),
    ],
)
def test_no_head_is_looked_for_where_none_is_wanted(
    model: ModelFiles, foreign: Path, settings: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(foreign, *settings)
    assert draft_store.find(config, model, "cpu") is None
    assert draft_store.open_head(config, model, "cpu", lambda p: p) is None
    assert not caplog.records


def test_head_alone_where_none_ships_is_told(caplog: pytest.LogCaptureFixture) -> None:
    other = ModelFiles("no-such-model", Path("none.gguf"), "gguf")
    quiet = configured("auto")
    assert draft_store.open_head(quiet, other, "cpu", lambda p: p) is None
    assert not caplog.records
    alone = configured("auto", "speculation.drafter=head")
    assert draft_store.open_head(alone, other, "cpu", lambda p: p) is None
    assert "no draft ships for no-such-model" in caplog.text


def test_shipped_draft_of_another_model_with_the_same_name_is_left_out_not_refused(
    model: ModelFiles,
    foreign: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(drafts, "find", lambda name, device_class: foreign)
    assert draft_store.open_head(configured("auto"), model, "cpu", lambda p: p) is None
    assert gauge("cpu") == 0
    tokenizer_files.export(model, tmp_path)
    draft_store.check(configured("auto"), model, tmp_path / tokenizer_files.TOKENIZER)
    assert caplog.text.count("its tokenizer is another one") == 2


def test_class_takes_the_shipped_draft_of_its_own_precision_else_any(tmp_path: Path) -> None:
    for name in ("a.int8", "a.fp16", "b.int8", "a.b.int8"):
        (tmp_path / f"{name}{drafts.SUFFIX}").touch()

    def found(model: str, device_class: str) -> str | None:
        path = drafts.find(model, device_class, directory=tmp_path)
        return path and path.name.removesuffix(drafts.SUFFIX)

    assert found("a", "cpu") == "a.int8"
    assert found("a", "gpu") == "a.fp16"
    assert found("a", "tpu") in ("a.int8", "a.fp16")
    assert found("b", "gpu") == "b.int8"
    assert found("a.b", "cpu") == "a.b.int8"
    for other in ("c", "*", "[ab]", "../a", ""):
        assert found(other, "cpu") is None


def test_what_ships_is_small_and_has_a_card() -> None:
    assert drafts.find("smollm2-135m-instruct", "cpu") is not None
    for path in drafts.HERE.glob(f"*{drafts.SUFFIX}"):
        assert path.stat().st_size <= 20 * 2**20, path.name
        spec = draft_file.read_spec(path)
        assert path.name == f"{spec.target}.{spec.precision}{drafts.SUFFIX}"
        assert (drafts.HERE / f"{spec.target}.md").is_file()


def test_files_beside_the_code_go_into_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["mirror_sd"]
    for folder in ("drafts", "training/prompts"):
        for path in (ROOT / "mirror_sd" / folder).iterdir():
            name = f"{folder}/{path.name}"
            is_code = path.suffix == ".py" or path.name == "__pycache__"
            assert is_code or any(fnmatch(name, pattern) for pattern in patterns), name
