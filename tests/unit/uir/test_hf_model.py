"""Hugging Face directories: every way the weights can lie, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mirror_sd.errors import ModelError, UnsupportedModel
from mirror_sd.model_store import ModelFiles
from mirror_sd.uir import hf_model, program, safetensors_file
from mirror_sd.uir.model_spec import RopeScaling
from mirror_sd.uir.precision_plan import PrecisionPlan

PLAN = PrecisionPlan.of("fp32")
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
SHAPES = {
    "model.embed_tokens.weight": (40, 64),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.self_attn.k_proj.weight": (32, 64),
    "model.layers.0.self_attn.v_proj.weight": (32, 64),
    "model.layers.0.self_attn.o_proj.weight": (64, 64),
    "model.layers.0.post_attention_layernorm.weight": (64,),
    "model.layers.0.mlp.gate_proj.weight": (96, 64),
    "model.layers.0.mlp.up_proj.weight": (96, 64),
    "model.layers.0.mlp.down_proj.weight": (64, 96),
    "model.norm.weight": (64,),
}


def tensors(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    random = np.random.default_rng(8)
    return {name: random.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def write(directory: Path, config: dict[str, Any], values: dict[str, np.ndarray]) -> ModelFiles:
    (directory / "config.json").write_text(json.dumps(config))
    save_file(values, directory / "model.safetensors")
    return ModelFiles("tiny", directory, "safetensors")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_weights_come_back_in_float32(tmp_path: Path, dtype: Any) -> None:
    values = tensors(dtype)
    loaded = program.load(write(tmp_path, CONFIG, values), PLAN)
    got = loaded.weights.load("layers.0.down")
    assert got.dtype == np.float32
    expected = values["model.layers.0.mlp.down_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(got, expected)


def test_bfloat16_becomes_float32(tmp_path: Path) -> None:
    bits = np.array([[0x3F80, 0xC000, 0x0000], [0x7F7F, 0x0001, 0x3DCC]], "<u2")
    header = {"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}
    text = json.dumps(header).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bits.tobytes())
    got = safetensors_file.read(path)["a"].read()
    np.testing.assert_array_equal(got, (bits.astype("<u4") << 16).view("<f4"))
    assert got[0].tolist() == [1.0, -2.0, 0.0]


def test_shards_are_joined_by_their_index(tmp_path: Path) -> None:
    values = tensors()
    names = sorted(values)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    halves = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    for file, part in halves.items():
        save_file({name: values[name] for name in part}, tmp_path / file)
    index = {name: file for file, part in halves.items() for name in part}
    (tmp_path / hf_model.INDEX).write_text(json.dumps({"weight_map": index}))
    files = ModelFiles("tiny", tmp_path, "safetensors")
    loaded = program.load(files, PLAN)
    np.testing.assert_array_equal(loaded.weights.load("final_norm"), values["model.norm.weight"])
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ModelError, match=r"cannot read the weights .*two\.safetensors"):
        program.load(files, PLAN)


def test_the_spec_follows_config_json(tmp_path: Path) -> None:
    def spec(**changes: Any) -> Any:
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
        return hf_model.read_spec(tmp_path)

    assert spec().rope_theta == 10000.0
    assert spec(rope_theta=5e5).rope_theta == 5e5
    assert spec(rope_parameters={"rope_type": "default", "rope_theta": 7e5}).rope_theta == 7e5
    old = spec(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    assert (old.rope_theta, old.rope_scaling) == (5e5, RopeScaling("linear", factor=2.0))
    assert spec(head_dim=None).head_dim == 32
    assert spec(model_type="qwen3").head_dim == 128
    assert spec(model_type="qwen2").qkv_bias
    assert spec(model_type="mistral", sliding_window=77).windows == (77,)
    assert spec(model_type="mistral", sliding_window=None).windows == (None,)
    assert spec(model_type="qwen2", sliding_window=77).windows == (None,)
    both = {"num_hidden_layers": 2, "sliding_window": 9, "use_sliding_window": True}
    kinds = ["full_attention", "sliding_attention"]
    assert spec(model_type="qwen2", layer_types=kinds, **both).windows == (None, 9)
    assert spec(model_type="qwen2", max_window_layers=1, **both).windows == (None, 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma3"}, "'gemma3' is not supported"),
        ({"model_type": None}, "None is not supported"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"mlp_bias": True}, "biases in the MLP"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
    ],
)
def test_what_our_decoder_lacks_is_unsupported(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        program.load(write(tmp_path, {**CONFIG, **change}, tensors()), PLAN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_attention_heads": "two"}, "num_attention_heads is 'two'"),
        ({"num_attention_heads": 0}, "num_heads must be positive"),
        ({"num_key_value_heads": 3}, "cannot share 3 KV heads"),
        (
            {"vocab_size": 41},
            r"model.embed_tokens.weight has shape \[40, 64\], expected \[41, 64\]",
        ),
        ({"num_hidden_layers": 2}, "layers.1.attention_norm is missing"),
        ({"tie_word_embeddings": False}, "the tensor for head is missing"),
        ({"rope_scaling": [1]}, "rope parameters"),
        ({"rope_scaling": {"type": "linear"}}, "factor is None"),
    ],
)
def test_a_bad_configuration_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        program.load(write(tmp_path, {**CONFIG, **change}, tensors()), PLAN)


def test_a_cut_or_foreign_weight_file_is_a_model_error(tmp_path: Path) -> None:
    files = write(tmp_path, CONFIG, tensors())
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 4, 8, 100, 1000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            program.load(files, PLAN)
    for junk in (b"\xff" * 64, (12).to_bytes(8, "little") + b'["not a map"' + bytes(20)):
        path.write_bytes(junk)
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            program.load(files, PLAN)


def test_a_configuration_that_is_not_json_is_named(tmp_path: Path) -> None:
    files = write(tmp_path, CONFIG, tensors())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        program.load(files, PLAN)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json does not hold a JSON object"):
        program.load(files, PLAN)
