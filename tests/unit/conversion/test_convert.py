"""A converted model is read back as what its format can hold; its report says what that costs."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models
from typer.testing import CliRunner

from mirror_sd import model_store
from mirror_sd.conversion import cli, directory, source
from mirror_sd.errors import ModelError, UnsupportedModel
from mirror_sd.model_store import ModelFiles
from mirror_sd.uir import bfloat16, hf_config, hf_model, program, stored_format, tokenizer_files
from mirror_sd.uir.model_spec import ModelSpec, RopeScaling, expected_shapes
from mirror_sd.uir.precision_plan import PrecisionPlan
from mirror_sd.uir.stored_format import Float32, StoredFormat

FP32 = PrecisionPlan.of("fp32")
SPEC = ModelSpec(
    family="qwen2",
    vocab_size=90,
    hidden_size=48,
    intermediate_size=72,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    rope_theta=5e5,
    rms_eps=1e-6,
    max_context=256,
    windows=(None, None),
    qkv_bias=True,
)


@pytest.fixture
def model(tmp_path: Path) -> ModelFiles:
    """A random model in a directory, in fp32, with a tokenizer of single characters."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(hf_config.config_of(SPEC) | {"eos_token_id": 3}))
    (path / "chat_template.jinja").write_text("{{ messages }}")
    vocabulary = {chr(32 + i): i for i in range(90)}
    Tokenizer(models.WordLevel(vocabulary, unk_token=" ")).save(str(path / "tokenizer.json"))
    save_file(random_weights(), path / "model.safetensors")
    return model_store.resolve(str(path))


def random_weights(seed: int = 1) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    names = hf_model.stored_names(SPEC.num_layers)
    return {
        names[name]: random.normal(scale=0.1, size=shape).astype(np.float32)
        for name, shape in expected_shapes(SPEC).items()
    }


def convert(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)


def rounded(form: StoredFormat, values: Float32) -> Float32:
    """What a reader of the encoded matrix is to get."""
    encoded = form.encode("matrix", values)
    if form.dtype == "int8":
        codes, scales = encoded
        return stored_format.dequantise(codes, scales, form.group)
    return bfloat16.widened(encoded[0]) if form.dtype == "bf16" else encoded[0].astype(np.float32)


@pytest.mark.parametrize(
    ("options", "form"),
    [
        (["--precision", "fp32"], StoredFormat("fp32")),
        (["--precision", "bf16"], StoredFormat("bf16")),
        (["--precision", "fp16"], StoredFormat("fp16")),
        (["--precision", "int8", "--scales", "channel"], StoredFormat("int8")),
        (["--precision", "int8", "--group", "32"], StoredFormat("int8", 32)),
        (["--precision", "int8", "--group", "65536"], StoredFormat("int8", 65536)),
    ],
)
def test_weights_come_back_rounded_to_the_format_and_vectors_unchanged(
    model: ModelFiles, tmp_path: Path, options: list[str], form: StoredFormat
) -> None:
    out = tmp_path / "out"
    result = convert(str(model.path), str(out), *options, "--json")
    assert result.exit_code == 0
    converted = program.load(model_store.resolve(str(out)), FP32)
    original = program.load(model, FP32)
    assert converted.spec == original.spec == SPEC
    for name, shape in expected_shapes(SPEC).items():
        values = original.weights.load(name)
        expected = rounded(form, values) if len(shape) == 2 else values
        assert np.array_equal(converted.weights.load(name), expected), name
    assert json.loads(result.stdout.splitlines()[-1])["bytes"] > 0
    for files in (model, model_store.resolve(str(out))):
        tokenizer_files.export(files, tmp_path / f"facts-{files.name}")
    facts = [json.loads((tmp_path / f"facts-{n}/model.json").read_text()) for n in ("model", "out")]
    assert facts[1] == {**facts[0], "name": "out"}
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_gguf_becomes_a_directory_of_the_same_model(tmp_path: Path) -> None:
    try:
        files = model_store.resolve("smollm2-135m-instruct")
    except ModelError:
        files = model_store.pull("smollm2-135m-instruct", print)
    original = source.load(files, None)
    directory.write(original, files, tmp_path / "out", StoredFormat("fp16"), lambda line: None)
    written = model_store.resolve(str(tmp_path / "out"))
    converted = program.load(written, FP32)
    assert converted.spec == original.spec
    # Its 4-bit levels are not fp16 numbers; queries are stored interleaved there.
    for name in ("layers.3.q", "layers.29.k", "embedding"):
        values = original.weights.load(name)
        assert np.abs(converted.weights.load(name) - values).max() < 1e-3 * np.abs(values).max()
    for place, of in (("a", files), ("b", written)):
        tokenizer_files.export(of, tmp_path / place)
    facts, again = (json.loads((tmp_path / p / "model.json").read_text()) for p in ("a", "b"))
    assert again == {**facts, "name": "out"}
    for name in (tokenizer_files.TOKENIZER, tokenizer_files.TEMPLATE):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@given(
    outputs=st.integers(1, 5),
    inputs=st.integers(1, 70),
    group=st.sampled_from([None, 1, 16, 32, 100]),
    seed=st.integers(0, 1000),
)
def test_int8_is_within_half_a_step_of_its_group(
    outputs: int, inputs: int, group: int | None, seed: int
) -> None:
    random = np.random.default_rng(seed)
    matrix = (random.normal(size=(outputs, inputs)) * 10.0 ** random.integers(-4, 4)).astype("f4")
    matrix[random.random(matrix.shape) < 0.2] = 0
    codes, scales = stored_format.quantise(matrix, group)
    found = stored_format.dequantise(codes, scales, group)
    step = np.repeat(scales, group or inputs, axis=1)[:, :inputs]
    assert (np.abs(found - matrix) <= 0.5001 * step).all()
    assert np.array_equal(found == 0, np.abs(matrix) < 0.5 * step) or (step == 0).any()


def test_a_group_longer_than_a_row_takes_no_more_memory_than_the_row() -> None:
    matrix = np.random.default_rng(1).normal(size=(500, 64)).astype("f4")
    tracemalloc.start()
    codes, scales = stored_format.quantise(matrix, 65536)
    found = stored_format.dequantise(codes, scales, 65536)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * matrix.nbytes
    assert np.array_equal(found, stored_format.dequantise(*stored_format.quantise(matrix, 64), 64))


def test_a_directory_may_be_called_what_a_registered_model_is(
    model: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = convert(str(model.path), "smollm2-135m-instruct", "--report", "--json")
    facts = json.loads(result.stdout.splitlines()[-1])
    assert facts["path"] == str(tmp_path / "smollm2-135m-instruct") and facts["layers"]


def test_the_report_orders_the_formats_by_their_error(model: ModelFiles, tmp_path: Path) -> None:
    reports = []
    for name, options in {
        "channel": ["--precision", "int8", "--scales", "channel"],
        "group": ["--precision", "int8"],
        "bf16": ["--precision", "bf16"],
        "fp16": ["--precision", "fp16"],
        "fp32": ["--precision", "fp32"],
    }.items():
        result = convert(str(model.path), str(tmp_path / name), *options, "--report", "--json")
        reports.append(json.loads(result.stdout.splitlines()[-1]))
    for report in reports:
        assert [row["layer"] for row in report["layers"]] == ["embedding", "0", "1", "head"]
        assert [row["states"] is None for row in report["layers"]] == [True, False, False, True]
    for one, other in pairwise(reports):
        for row, better in zip(one["layers"], other["layers"], strict=True):
            assert row["weights"] > better["weights"]
            assert row["states"] is None or row["states"] > better["states"]
        assert one["outputs"]["mean_kl"] > other["outputs"]["mean_kl"]
    assert reports[-1]["layers"][0]["weights"] == reports[-1]["outputs"]["max_logit_error"] == 0
    shown = convert(str(model.path), str(tmp_path / "shown"), "--report").stdout
    assert "states" in shown.splitlines()[0] and "% of the best tokens equal" in shown


@pytest.mark.parametrize("prefix", ["", "ema.", "shadow."])
@pytest.mark.parametrize("in_one_file", [True, False])
def test_averaged_weights_take_the_place_of_the_last_ones(
    model: ModelFiles, tmp_path: Path, prefix: str, in_one_file: bool
) -> None:
    averaged = {prefix + name: values for name, values in random_weights(seed=9).items()}
    if in_one_file:  # beside the last step's, which a prefix tells apart
        averaged = {**random_weights(seed=2), **averaged}
    save_file(averaged, tmp_path / "ema.safetensors")
    loaded = source.load(model, tmp_path / "ema.safetensors")
    for name, theirs in hf_model.stored_names(SPEC.num_layers).items():
        if name in expected_shapes(SPEC):
            assert np.array_equal(loaded.weights.load(name), averaged[prefix + theirs])


def test_averaged_weights_that_lack_a_tensor_are_refused(model: ModelFiles, tmp_path: Path) -> None:
    averaged = {f"ema.{name}": values for name, values in random_weights().items()}
    missing = "ema.model.layers.1.mlp.up_proj.weight"
    del averaged[missing]
    save_file(averaged, tmp_path / "ema.safetensors")
    with pytest.raises(ModelError, match=f"no tensor {missing}"):
        source.load(model, tmp_path / "ema.safetensors")
    averaged[missing] = np.zeros((3, 3), np.float32)
    save_file(averaged, tmp_path / "ema.safetensors")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight has shape"):
        source.load(model, tmp_path / "ema.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no \*\.safetensors file with averaged weights"):
        source.load(model, tmp_path / "empty")


def test_what_cannot_be_written_leaves_nothing(model: ModelFiles, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is there already"):
        convert(str(model.path), str(tmp_path))
    weights = random_weights()
    weights["lm_head.weight"][0, 0] = 1e6
    save_file(weights, model.path / "model.safetensors")
    for precision, message in (("fp16", "beyond fp16's 65504"), ("bf16", None)):
        out = tmp_path / precision
        if message is None:
            assert convert(str(model.path), str(out), "--precision", precision).exit_code == 0
            continue
        for path in (out, out / "deep" / "deeper"):
            with pytest.raises(ModelError, match=f"head .*{message}"):
                convert(str(model.path), str(path), "--precision", precision)
            assert not out.exists()
        assert not list(tmp_path.glob(".convert-*"))
    weights["lm_head.weight"][0, 0] = np.nan
    save_file(weights, model.path / "model.safetensors")
    with pytest.raises(ModelError, match="not finite"):
        convert(str(model.path), str(tmp_path / "nan"))
    for options in (["--precision", "int4"], ["--scales", "row"], ["--group", "0"]):
        assert convert(str(model.path), str(tmp_path / "x"), *options).exit_code == 2


def test_a_full_disk_leaves_no_folders(
    model: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ModelError, match="the weights need"):
        convert(str(model.path), str(tmp_path / "mine" / "deep" / "deeper" / "out"))
    assert not list((tmp_path / "mine").iterdir())


def test_codes_that_do_not_fit_their_scales_are_refused(model: ModelFiles, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(str(model.path), str(out), "--precision", "int8", "--group", "32")
    config = json.loads((out / "config.json").read_text())
    changes: list[tuple[Any, type[ModelError], str]] = [
        (16, ModelError, "no scales of shape"),
        ("many", ModelError, "group_size is 'many', not a number"),
        (0, ModelError, "group_size is 0"),
    ]
    for size, kind, message in changes:
        config["quantization_config"]["group_size"] = size
        (out / "config.json").write_text(json.dumps(config))
        with pytest.raises(kind, match=message):
            program.load(model_store.resolve(str(out)), FP32)
    config["quantization_config"] = {"quant_method": "gptq", "bits": 8}
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="quantised safetensors"):
        program.load(model_store.resolve(str(out)), FP32)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling("linear", factor=2.0),
        RopeScaling("llama3", factor=8.0, original_context=64, low_freq_factor=2.0),
        RopeScaling("yarn", factor=4.0, original_context=64, mscale=0.7, truncate=False),
        RopeScaling("factors", factors=(1.0, 2.0, 4.0, 4.0, 4.0, 4.0)),
    ],
)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"output_bias": True, "qkv_bias": True, "tied_embeddings": True}),
        ("mistral", {"qkv_bias": False, "windows": (70, 70)}),
        ("qwen2", {"windows": (None, 70)}),
        ("qwen3", {"qkv_bias": False, "qk_norm": True, "head_dim": 128}),
    ],
)
def test_a_spec_is_read_back_from_its_config(
    tmp_path: Path, scaling: RopeScaling | None, family: Any, options: dict[str, Any]
) -> None:
    spec = replace(SPEC, family=family, rope_scaling=scaling, **options)
    (tmp_path / "config.json").write_text(json.dumps(hf_config.config_of(spec)))
    assert hf_model.read_spec(tmp_path) == spec
