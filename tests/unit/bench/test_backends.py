"""The reference table: its figures by arithmetic, its rows on a tiny model, what is not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models
from typer.testing import CliRunner

from mirror_sd.bench import backends, backends_command
from mirror_sd.bench.cli import app
from mirror_sd.errors import ModelError
from mirror_sd.uir import hf_config, hf_model
from mirror_sd.uir.model_spec import ModelSpec, expected_shapes

SPEC = ModelSpec(
    family="llama",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=1e4,
    rms_eps=1e-5,
    max_context=256,
    windows=(None, None),
)
PROMPTS = [[5, 9, 33, 7], [1, 2, 3], [40, 41, 42, 43, 44, 45, 46, 40, 41, 42]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is packed here does not go to the user's own cache."""
    monkeypatch.setenv("MIRROR_SD_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(hf_config.config_of(SPEC)))
    vocabulary = {chr(32 + i): i for i in range(95)} | {"<unk>": 95}
    Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>")).save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    random = np.random.default_rng(1)
    names = hf_model.stored_names(SPEC.num_layers)
    weights = {
        names[name]: (random.normal(size=shape) * 0.3).astype(np.float32)
        for name, shape in expected_shapes(SPEC).items()
    }
    save_file(weights, path / "model.safetensors")
    return path


def settings(model: Path) -> list[str]:
    return [f"model.path={model}", "engine.kv_cache_mb=8"]


def test_logits_are_compared_by_arithmetic() -> None:
    reference = np.log(np.array([[1 / 2, 1 / 4, 1 / 4], [1 / 4, 1 / 2, 1 / 4]], np.float32))
    turned = np.log(np.array([[1 / 4, 1 / 2, 1 / 4], [1 / 4, 1 / 2, 1 / 4]], np.float32))
    found = backends.compared(reference, turned)
    assert found["positions"] == 2 and found["top1"] == 0.5
    assert found["max_logit_error"] == pytest.approx(np.log(2), rel=1e-6)
    # (1/2 ln 2 - 1/4 ln 2) at the first position, nothing at the second.
    assert found["mean_kl"] == pytest.approx(np.log(2) / 8, rel=1e-6)
    with pytest.raises(ModelError, match="not finite"):
        backends.compared(reference, turned * np.nan)


@pytest.mark.parametrize(
    ("found", "equal", "agreed"),
    [
        ([[1, 2, 3, 4], [5]], 2, 1.0),
        ([[1, 2, 9, 4], [5]], 1, 3 / 5),
        ([[1, 2, 3], [6]], 0, 3 / 5),
        ([[1, 2, 3, 4, 7], [5]], 1, 1.0),
        ([[], []], 0, 0.0),
    ],
)
def test_answers_agree_up_to_the_first_other_token(
    found: list[list[int]], equal: int, agreed: float
) -> None:
    assert backends.agreement([[1, 2, 3, 4], [5]], found) == {
        "prompts": 2,
        "equal": equal,
        "agreed_tokens": agreed,
    }


def test_back_ends_are_held_to_the_reference(model: Path, tmp_path: Path) -> None:
    positions = backends.reference(str(tmp_path), PROMPTS, [], 12, 1, settings(model))
    assert positions == 36
    rows = {
        (engine, precision): backends.measure(
            str(tmp_path), engine, "cpu", precision, 1, settings(model)
        )
        for engine, precision in (
            ("native", "fp32"),
            ("native", "int8"),
            ("torch", "fp32"),
            ("torch", "fp16"),
        )
    }
    for (_, precision), row in rows.items():
        assert row["speculative_equal"] == row["company_equal"] == row["prompts"] == 3
        assert row["drafted"] > 0 and row["positions"] == 36
        if precision == "fp32":
            assert row["equal"] == 3 and row["agreed_tokens"] == row["top1"] == 1
            assert row["max_logit_error"] < 1e-3
        else:
            assert row["max_logit_error"] > 1e-3
    assert rows["native", "int8"]["mean_kl"] > rows["torch", "fp16"]["mean_kl"]
    table = backends_command.markdown(
        [{"engine": e, "device": "cpu", "precision": p} | row for (e, p), row in rows.items()]
    ).splitlines()
    assert len(table) == 2 + 4 and table[2].startswith("| native | cpu | fp32 |")
    assert all(line.count("|") == table[0].count("|") for line in table)


def test_what_is_not_there_says_why(model: Path, tmp_path: Path) -> None:
    backends.reference(str(tmp_path), PROMPTS[:1], [], 4, 1, settings(model))
    found = backends.measure(str(tmp_path), "torch", "cuda:99", "bf16", 1, settings(model))
    assert found["kind"] == "absent" and "'cuda:99' cannot be used" in found["reason"]
    found = backends.measure(str(tmp_path), "native", "cpu", "fp16", 1, settings(model))
    assert found["kind"] == "absent" and "native has fp32, bf16 and int8" in found["reason"]


def test_the_command_lists_what_broke_and_what_is_absent(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = tuple(backends.Entry("native", device, "fp32") for device in ("cpu", "abacus"))
    monkeypatch.setattr(backends_command, "LINEUP", entries)
    options: list[Any] = ["backends", "--engines", "native", "--prompts", "2", "--max-tokens", "4"]
    for item in settings(model):
        options += ["--set", item]
    result = CliRunner().invoke(app, options, catch_exceptions=False)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert any(line.startswith("| native | cpu | fp32 |") for line in lines)
    assert any(line.startswith("- native, abacus, fp32: absent: the native") for line in lines)
    dead = [sys.executable, "-c", "import sys; sys.exit('no such luck')"]
    monkeypatch.setattr(backends_command, "_COMMAND", dead)
    row = backends_command._row(entries[0], ".", 1, [])
    assert row["kind"] == "failed" and "no such luck" in row["reason"]
    assert "- native, cpu, fp32: failed: " in backends_command.markdown([row])
