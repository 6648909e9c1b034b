"""GGUF files: what is written comes back, what is damaged is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from mirror_sd.errors import ModelError, UnsupportedModel
from mirror_sd.model_store import ModelFiles
from mirror_sd.uir import gguf_model, program
from mirror_sd.uir.model_spec import RopeScaling
from mirror_sd.uir.precision_plan import PrecisionPlan

PLAN = PrecisionPlan.of("fp32")
Kind = gguf.GGMLQuantizationType


def files(path: Path) -> ModelFiles:
    return ModelFiles("tiny", path, "gguf")


def test_the_spec_is_read_from_the_metadata(tiny_gguf: Any, tmp_path: Path) -> None:
    spec, _ = gguf_model.read(tiny_gguf().write(tmp_path / "a.gguf"))
    assert (spec.family, spec.vocab_size, spec.hidden_size, spec.head_dim) == ("llama", 40, 64, 32)
    assert (spec.num_heads, spec.num_kv_heads, spec.num_layers) == (2, 1, 1)
    assert (spec.max_context, spec.rope_theta, spec.tied_embeddings) == (256, 10000.0, True)
    assert spec.rms_eps == pytest.approx(1e-5)
    assert spec.rope_scaling is None


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.BF16])
def test_stored_tensors_come_back_dequantised(tiny_gguf: Any, tmp_path: Path, kind: Any) -> None:
    tiny = tiny_gguf()
    tiny.kinds = {"blk.0.ffn_down.weight": kind}
    loaded = program.load(files(tiny.write(tmp_path / "a.gguf")), PLAN)
    written = tiny.tensors["blk.0.ffn_down.weight"]
    expected = gguf.quants.dequantize(gguf.quants.quantize(written, kind), kind)
    got = loaded.weights.load("layers.0.down")
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected.reshape(64, 96))
    assert np.abs(got - written).max() < 0.5


def test_the_rotary_interleaving_of_llama_files_is_undone(tiny_gguf: Any, tmp_path: Path) -> None:
    for architecture, interleaved in (("llama", True), ("qwen2", False)):
        tiny = tiny_gguf(architecture)
        loaded = program.load(files(tiny.write(tmp_path / f"{architecture}.gguf")), PLAN)
        for name, role, heads in (("attn_q", "q", 2), ("attn_k", "k", 1)):
            stored = tiny.tensors[f"blk.0.{name}.weight"]
            expected = stored
            if interleaved:  # the converter's permutation, backwards
                order = np.arange(heads * 32).reshape(heads, 16, 2).swapaxes(1, 2).reshape(-1)
                expected = stored[order]
            np.testing.assert_array_equal(loaded.weights.load(f"layers.0.{role}"), expected)


def test_qwen_options_follow_from_the_tensors(tiny_gguf: Any, tmp_path: Path) -> None:
    qwen2, qwen3 = tiny_gguf("qwen2"), tiny_gguf("qwen3")
    for name, size in (("attn_q", 64), ("attn_k", 32), ("attn_v", 32)):
        qwen2.tensors[f"blk.0.{name}.bias"] = np.ones(size, np.float32)
    for name in ("attn_q_norm", "attn_k_norm"):
        qwen3.tensors[f"blk.0.{name}.weight"] = np.ones(32, np.float32)
    qwen3.tensors["output.weight"] = np.ones((40, 64), np.float32)
    spec = program.load(files(qwen2.write(tmp_path / "2.gguf")), PLAN).spec
    assert (spec.family, spec.qkv_bias, spec.qk_norm) == ("qwen2", True, False)
    spec = program.load(files(qwen3.write(tmp_path / "3.gguf")), PLAN).spec
    assert (spec.family, spec.qkv_bias, spec.qk_norm) == ("qwen3", False, True)
    assert not spec.tied_embeddings


def test_rope_scaling_is_read(tiny_gguf: Any, tmp_path: Path) -> None:
    linear, yarn, factors = tiny_gguf(), tiny_gguf(), tiny_gguf()
    linear.fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    yarn.fields |= {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0,
        "rope.scaling.original_context_length": 64,
    }
    factors.tensors["rope_freqs.weight"] = np.arange(1, 17, dtype=np.float32)
    got = [
        program.read_spec(files(tiny.write(tmp_path / f"{name}.gguf"))).rope_scaling
        for name, tiny in (("l", linear), ("y", yarn), ("f", factors))
    ]
    assert got == [
        RopeScaling("linear", factor=4.0),
        RopeScaling("yarn", factor=8.0, original_context=64),
        RopeScaling("factors", factors=tuple(float(factor) for factor in range(1, 17))),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_count": 8}, "mixtures of experts"),
        ({"rope.dimension_count": 16}, "rope.dimension_count differs"),
        ({"rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
    ],
)
def test_what_our_decoder_lacks_is_unsupported(
    tiny_gguf: Any, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    tiny = tiny_gguf()
    tiny.fields |= change
    with pytest.raises(UnsupportedModel, match=message):
        gguf_model.read(tiny.write(tmp_path / "a.gguf"))


def test_another_architecture_is_unsupported(tiny_gguf: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'gemma3' is not supported"):
        gguf_model.read(tiny_gguf("gemma3").write(tmp_path / "a.gguf"))


def test_a_missing_tensor_is_named(tiny_gguf: Any, tmp_path: Path) -> None:
    tiny = tiny_gguf()
    del tiny.tensors["blk.0.ffn_up.weight"]
    with pytest.raises(ModelError, match=r"a\.gguf: the tensor for layers\.0\.up is missing"):
        program.load(files(tiny.write(tmp_path / "a.gguf")), PLAN)


def test_a_tensor_of_a_wrong_shape_is_named(tiny_gguf: Any, tmp_path: Path) -> None:
    tiny = tiny_gguf()
    tiny.tensors["blk.0.attn_k.weight"] = np.zeros((64, 64), np.float32)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_k\.weight has shape \[64, 64\]"):
        program.load(files(tiny.write(tmp_path / "a.gguf")), PLAN)


@pytest.mark.parametrize("key", ["attention.head_count", "context_length", "embedding_length"])
def test_a_missing_field_is_named(tiny_gguf: Any, tmp_path: Path, key: str) -> None:
    tiny = tiny_gguf()
    del tiny.fields[key]
    with pytest.raises(ModelError, match=f"llama.{key} is None"):
        gguf_model.read(tiny.write(tmp_path / "a.gguf"))


@pytest.mark.parametrize(
    "change", [{"attention.head_count": 0}, {"attention.head_count_kv": 3}, {"block_count": 0}]
)
def test_impossible_dimensions_are_refused(
    tiny_gguf: Any, tmp_path: Path, change: dict[str, int]
) -> None:
    tiny = tiny_gguf()
    tiny.fields |= change
    with pytest.raises(ModelError):
        gguf_model.read(tiny.write(tmp_path / "a.gguf"))


def test_a_file_cut_anywhere_is_a_model_error(tiny_gguf: Any, tmp_path: Path) -> None:
    whole = tiny_gguf().write(tmp_path / "a.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 1500, 7), len(whole) // 2, len(whole) - 64]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            program.load(files(cut), PLAN)


def test_random_damage_never_raises_anything_else(tiny_gguf: Any, tmp_path: Path) -> None:
    whole = tiny_gguf().write(tmp_path / "a.gguf").read_bytes()
    random = np.random.default_rng(6)
    damaged = tmp_path / "damaged.gguf"
    for _ in range(200):
        content = bytearray(whole)
        for place in random.integers(0, 1400, 6):
            content[place] = random.integers(0, 256)
        damaged.write_bytes(content)
        try:
            loaded = program.load(files(damaged), PLAN)
        except ModelError:
            continue
        for name in loaded.weights.tensors:
            loaded.weights.load(name)


def test_other_files_are_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ModelError, match="is not a GGUF file"):
        gguf_model.read(path)
    path.write_bytes(b"GGUF\x63\x00\x00\x00" + bytes(64))
    with pytest.raises(ModelError, match="version 99"):
        gguf_model.read(path)
    with pytest.raises(ModelError, match=r"cannot read the model file .*none\.gguf"):
        gguf_model.read(tmp_path / "none.gguf")
