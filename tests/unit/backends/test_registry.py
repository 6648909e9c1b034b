"""Choosing a back end by name, and the fallback for what our decoder does not know."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mirror_sd.backends import cpu_features, registry
from mirror_sd.backends.protocol import RaggedBatch
from mirror_sd.config import PoolConfig
from mirror_sd.errors import ConfigError, ModelError
from mirror_sd.model_store import ModelFiles


def create(engine: str, files: ModelFiles, **changes: Any) -> Any:
    settings = {"device": "cpu", "precision": "fp32", "threads": 2, "max_context": None}
    return registry.create(engine, files, **{**settings, **changes})


NOWHERE = ModelFiles("none", Path("/nonexistent"), "safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"engine": "tensorrt"},
            "engine 'tensorrt' is not one of auto, native, onnxruntime, reference",
        ),
        ({"precision": "int3"}, "precision 'int3' is not one of auto, fp32, bf16, fp16, int8"),
        ({"device": "cuda:77"}, "device 'cuda:77' cannot be used"),
        (
            {"device": "hpu"},
            "device 'hpu' cannot be used: .*; Gaudi needs the package habana_frameworks",
        ),
        ({"device": "abacus"}, "device 'abacus' cannot be used"),
    ],
)
def test_a_bad_setting_is_named(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create(changes.pop("engine", "torch"), NOWHERE, **changes)


def test_a_missing_model_is_a_model_error() -> None:
    for engine in ("torch", "transformers", "reference"):
        with pytest.raises(ModelError, match="/nonexistent"):
            create(engine, NOWHERE)


def test_auto_precision_follows_the_cpu(tiny_model: Callable[..., Any]) -> None:
    backend = create("torch", tiny_model("LlamaConfig").files, precision="auto")
    expected = "bf16" if cpu_features.has_bf16_products() else "fp32"
    assert backend.capabilities.precision == expected


@pytest.mark.parametrize(("engine", "expected"), [("onnxruntime", "int8"), ("xla", "bf16")])
def test_auto_precision_is_the_one_that_the_setting_tells_of(
    tiny_model: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    expected: str,
) -> None:
    monkeypatch.setenv("MIRROR_SD_CACHE", str(tmp_path))
    described = PoolConfig.model_fields["precision"].description or ""
    [told] = [part for part in re.split("[,;:] ", described) if re.search(rf"\b{engine}\b", part)]
    assert told.startswith(f"{expected} on ")
    backend = create(engine, tiny_model("LlamaConfig").files, precision="auto")
    assert backend.capabilities.precision == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx512_bf16 sse", True), ("amx_bf16", True), ("avx2 avx512f", False), (None, False)],
)
def test_bf16_is_read_off_the_cpu_flags(tmp_path: Path, flags: str | None, expected: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if flags is not None:
        cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbogomips\t: 1\n")
    assert cpu_features.has_bf16_products(cpuinfo) is expected


def test_an_unknown_architecture_runs_through_transformers_and_says_so(
    tiny_model: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    tiny = tiny_model("GPTNeoXConfig")
    with caplog.at_level(logging.WARNING):
        backend = create("torch", tiny.files)
    assert backend.capabilities.name == "transformers"
    assert "slow fallback" in backend.capabilities.detail
    assert any("'gpt_neox' is not supported" in line for line in caplog.messages)
    first, second = np.array([1, 2, 3, 4, 5], np.int32), np.array([9, 8], np.int32)
    backend.allocate_kv(6, 2)
    tables = (np.array([5, 0, 3, 1], np.int32), np.array([2], np.int32))
    backend.forward(
        RaggedBatch(
            token_ids=np.concatenate((first, second)),
            positions=np.array([0, 1, 2, 3, 4, 0, 1], np.int32),
            sequence_offsets=np.array([0, 5, 7], np.int32),
            block_tables=tables,
            logit_rows=np.zeros(0, np.int32),
        )
    )
    logits = backend.forward(
        RaggedBatch(
            token_ids=np.array([6, 7], np.int32),
            positions=np.array([5, 6], np.int32),
            sequence_offsets=np.array([0, 2], np.int32),
            block_tables=tables[:1],
            logit_rows=np.array([0, 1], np.int32),
        )
    )
    expected = tiny.logits(np.array([1, 2, 3, 4, 5, 6, 7]))[5:]
    np.testing.assert_allclose(logits, expected, atol=1e-4)
