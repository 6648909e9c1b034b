"""The file of a draft head: what is written is read, and what is damaged is told, never more."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mirror_sd.errors import ModelError
from mirror_sd.uir import draft_file
from mirror_sd.uir.draft_file import DraftMismatch, DraftProgram, DraftSpec
from tests.random_draft import program_of

SPEC = DraftSpec(
    target="tiny",
    tokenizer="digest",
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    rope_theta=10_000.0,
    rms_eps=1e-5,
    taps=(1, 2),
    draft_vocab_size=20,
    precision="int8",
)
TARGET: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_layers": 2,
    "tokenizer": "digest",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("draft") / "whole.draft.safetensors"
    draft_file.write(path, program_of(SPEC))
    return path


@pytest.mark.parametrize(
    ("precision", "bound"), [("fp32", 0.0), ("fp16", 5e-4), ("bf16", 4e-3), ("int8", 1e-2)]
)
def test_what_is_written_is_read(tmp_path: Path, precision: Any, bound: float) -> None:
    spec = replace(SPEC, precision=precision)
    program = program_of(spec)
    path = tmp_path / "draft.safetensors"
    draft_file.write(path, program)
    found = draft_file.read(path)
    assert found.spec == spec == draft_file.read_spec(path)
    assert np.array_equal(found.token_ids, program.token_ids)
    for name, wanted in program.weights.items():
        largest = np.abs(wanted).max()
        assert np.abs(found.weights[name] - wanted).max() <= bound * largest, name
    assert list(tmp_path.iterdir()) == [path]


def test_int8_is_read_as_the_very_values_that_its_codes_stand_for(tmp_path: Path) -> None:
    path = tmp_path / "draft.safetensors"
    draft_file.write(path, program_of(SPEC))
    first = draft_file.read(path)
    draft_file.write(path, DraftProgram(SPEC, first.token_ids, first.weights))
    second = draft_file.read(path)
    for name in SPEC.shapes():
        np.testing.assert_allclose(second.weights[name], first.weights[name], rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer": "another"}, "its tokenizer is another one than the target's"),
        ({"vocab_size": 41}, "its vocabulary is 40, the target's is 41"),
        ({"hidden_size": 64}, "its hidden size is 32, the target's is 64"),
        ({"num_layers": 1}, "it wants layer 2 of a target that has 1"),
    ],
)
def test_a_draft_for_another_target_is_told_with_the_reason(
    changes: dict[str, Any], reason: str
) -> None:
    draft_file.check_target(Path("d"), SPEC, **TARGET)
    with pytest.raises(DraftMismatch, match=reason):
        draft_file.check_target(Path("d"), SPEC, **{**TARGET, **changes})


def test_tokenizers_are_told_apart_by_their_tokens_not_by_their_files(tmp_path: Path) -> None:
    def digest(vocabulary: dict[str, int], added: list[dict[str, Any]], **more: Any) -> str:
        path = tmp_path / "tokenizer.json"
        document = {"model": {"vocab": vocabulary}, "added_tokens": added, **more}
        path.write_text(json.dumps(document), encoding="utf-8")
        return draft_file.tokenizer_digest(path)

    end = {"id": 2, "content": "</s>"}
    plain = digest({"a": 0, "b": 1}, [end])
    assert digest({"b": 1, "a": 0}, [end], version="2") == plain
    assert digest({"a": 0, "b": 1, "</s>": 2}, []) == plain
    assert digest({"a": 1, "b": 0}, [end]) != plain
    assert digest({"a": 0, "b": 1}, [{"id": 2, "content": "<end>"}]) != plain


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"model": {"vocab": 3}}'])
def test_vocabulary_that_cannot_be_read_is_told(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(text)
    with pytest.raises(ModelError, match="cannot read the vocabulary"):
        draft_file.tokenizer_digest(path)


def test_missing_file_and_directory_are_told(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        for read in (draft_file.read, draft_file.read_spec):
            with pytest.raises(ModelError, match="cannot read the draft"):
                read(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.5, 0.999])
def test_file_cut_short_is_told(tmp_path: Path, whole: Path, share: float) -> None:
    content = whole.read_bytes()
    path = tmp_path / "cut.safetensors"
    path.write_bytes(content[: int(share * len(content))])
    for read in (draft_file.read, draft_file.read_spec):
        with pytest.raises(ModelError):
            read(path)


@pytest.mark.parametrize("damage", ["zeroed", "flipped"])
def test_weights_that_are_no_longer_those_written_are_told(
    tmp_path: Path, whole: Path, damage: str
) -> None:
    content = bytearray(whole.read_bytes())
    path = tmp_path / "damaged.safetensors"
    if damage == "zeroed":
        content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    else:
        content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"damaged\.safetensors is damaged: its tensors are not"):
        draft_file.read(path)


def test_equal_drafts_are_equal_files(tmp_path: Path, whole: Path) -> None:
    content = whole.read_bytes()
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    assert list(header["__metadata__"]) == ["mirror_sd_draft", "spec", "tensors"]
    again = tmp_path / "again.safetensors"
    draft_file.write(again, program_of(SPEC))
    assert again.read_bytes() == content


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("taps", []),
        ("taps", [2, 1]),
        ("taps", [0]),
        ("taps", 3),
        ("precision", "int3"),
        ("hidden_size", -1),
        ("hidden_size", 10**9),
        ("hidden_size", 32.0),
        ("hidden_size", None),
        ("num_kv_heads", 3),
        ("head_dim", 15),
        ("rope_theta", 0),
        ("rope_theta", "x"),
        ("rope_theta", 10**400),
        ("rope_theta", 1e-300),
        ("rms_eps", 10**400),
        ("rms_eps", float("nan")),
        ("tokenizer", None),
        ("another", 1),
    ],
)
def test_bad_spec_is_told(tmp_path: Path, whole: Path, key: str, value: Any) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(with_spec(whole.read_bytes(), lambda spec: spec | {key: value}))
    with pytest.raises(ModelError, match=r"bad\.safetensors"):
        draft_file.read(path)


@pytest.mark.parametrize("format_", ["BF16", "F8_E4M3"])
def test_numbers_of_a_format_that_is_not_a_draft_s_are_told(
    tmp_path: Path, whole: Path, format_: str
) -> None:
    content = whole.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    name = "q.scales" if format_ == "BF16" else "q.codes"
    header[name]["dtype"] = format_
    path = tmp_path / "bad.safetensors"
    path.write_bytes(framed(header) + content[8 + length :])
    with pytest.raises(ModelError, match="cannot read the numbers of the draft"):
        draft_file.read(path)
    pytest.importorskip("ml_dtypes")  # as JAX does: from here on numpy has these formats
    with pytest.raises(ModelError, match="cannot read the numbers of the draft"):
        draft_file.read(path)


def test_pipe_is_told_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ModelError, match="it is not a regular file"):
        draft_file.read_spec(path)


def test_spec_nested_without_end_is_told(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(with_spec_text(whole.read_bytes(), "[" * 100_000))
    with pytest.raises(ModelError, match="bad spec"):
        draft_file.read_spec(path)


@pytest.mark.parametrize("spec", [[], "text", 3, None, {}])
def test_spec_that_is_no_table_is_told(tmp_path: Path, whole: Path, spec: Any) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(with_spec(whole.read_bytes(), lambda _: spec))
    with pytest.raises(ModelError, match="bad spec"):
        draft_file.read_spec(path)


def test_weights_that_are_not_finite_and_ids_that_do_not_ascend_are_told(tmp_path: Path) -> None:
    path = tmp_path / "draft.safetensors"
    spec = replace(SPEC, precision="fp32")
    program = program_of(spec)
    broken = dict(program.weights)
    broken["q"] = broken["q"].copy()
    broken["q"][3, 4] = np.inf
    draft_file.write(path, replace(program, weights=broken))
    with pytest.raises(ModelError, match="q holds values that are not finite"):
        draft_file.read(path)
    for ids in (program.token_ids[::-1], program.token_ids + 30, program.token_ids[:-1]):
        draft_file.write(path, replace(program, token_ids=ids.copy()))
        with pytest.raises(ModelError, match="token_ids"):
            draft_file.read(path)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_flipped_bytes_give_a_draft_or_a_model_error_and_nothing_else(
    whole: Path, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(whole.read_bytes())
    (header,) = struct.unpack("<Q", content[:8])
    places = st.integers(0, 8 + header - 1) | st.integers(0, len(content) - 1)
    for place in data.draw(st.lists(places, min_size=1, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    path = tmp_path / "flipped.safetensors"
    path.write_bytes(content)
    try:
        found = draft_file.read(path)
    except ModelError:
        return
    assert {name: w.shape for name, w in found.weights.items()} == found.spec.shapes()
    assert all(np.isfinite(weights).all() for weights in found.weights.values())


def with_spec(content: bytes, change: Any) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    spec = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["spec"])
    return with_spec_text(content, json.dumps(change(spec)))


def with_spec_text(content: bytes, spec: str) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"]["spec"] = spec
    return framed(header) + content[8 + length :]


def framed(header: Any) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
