"""Instruction sets: what their results share, and which one is chosen."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mirror_sd import _native
from mirror_sd.backends.native.native_backend import chosen_isa
from mirror_sd.backends.protocol import Float32
from mirror_sd.errors import ConfigError
from tests.unit.backends.native.batches import whole
from tests.unit.backends.native.models import ODD, PLAIN, PLANS, native, write_directory

ROOT = Path(__file__).resolve().parents[4]
IDS = np.random.default_rng(0).integers(0, ODD.vocab_size, 300).astype(np.int32)
ISAS = _native.available_isas()
X86 = [isa for isa in ISAS if isa != "portable"]
# The products of bf16 and of integers are exact, and every set adds them in the same order. Only
# fp32 products differ: without FMA the portable set rounds twice. In int8 that turns a few codes.
PORTABLE_BOUNDS = {"fp32": 3e-6, "bf16": 1e-3, "int8": 0.03}
KV = ["fp32", "bf16", "int8"]


@functools.cache
def logits_of(isa: str, plan: str, kv: str) -> Float32:
    return whole(native(ODD, replace(PLANS[plan], kv=kv), isa=isa), IDS).copy()


@pytest.mark.skipif(len(X86) < 2, reason="this machine or build has one set of x86 instructions")
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("plan", PLANS)
def test_all_sets_with_fma_give_the_same_bits(plan: str, kv: str) -> None:
    expected = logits_of(X86[0], plan, kv)
    for isa in X86[1:]:
        assert np.array_equal(logits_of(isa, plan, kv), expected), isa


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("plan", PLANS)
def test_the_portable_set_is_near_the_others(plan: str, kv: str) -> None:
    expected, got = logits_of(ISAS[0], plan, kv), logits_of("portable", plan, kv)
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    coarsest = max(kv, PLANS[plan].weights, key=list(PORTABLE_BOUNDS).index)
    assert error < PORTABLE_BOUNDS[coarsest]


def test_the_portable_set_is_always_there_and_the_last_choice() -> None:
    assert ISAS[-1] == "portable"
    assert len(set(ISAS)) == len(ISAS)


@pytest.mark.parametrize("isa", ISAS)
def test_the_variable_names_the_set(isa: str) -> None:
    assert chosen_isa({"MIRROR_SD_ISA": isa}) == isa


@pytest.mark.parametrize("environ", [{}, {"MIRROR_SD_ISA": ""}])
def test_without_the_variable_the_best_set_is_taken(environ: dict[str, str]) -> None:
    assert chosen_isa(environ) == ISAS[0]


@pytest.mark.parametrize("name", ["sse2", "AVX2", "avx512,avx2", " portable"])
def test_an_unknown_set_is_a_config_error_that_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen_isa({"MIRROR_SD_ISA": name})
    assert f"MIRROR_SD_ISA={name!r} is not one of {', '.join(ISAS)}" in str(caught.value)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_directory(PLAIN, tmp_path_factory.mktemp("models") / "plain").path


def run_with(isa: str, model: Path, cache: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(model)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=os.environ | {"MIRROR_SD_ISA": isa, "MIRROR_SD_CACHE": str(cache)},
    )


@pytest.mark.parametrize("isa", ISAS)
def test_a_worker_tells_the_set_in_its_log_its_capabilities_and_its_metrics(
    model: Path, tmp_path: Path, isa: str
) -> None:
    code = """
        import json, logging, sys
        from prometheus_client import REGISTRY
        from mirror_sd import config
        from mirror_sd.engine import build
        from workers.report import Gauges
        logging.basicConfig(level=logging.INFO)
        engine = build(config.load(overrides=[f"model.path={sys.argv[1]}"]), "cpu", 2)
        Gauges("cpu", engine.capabilities)
        [info] = [
            sample.labels
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name == "mirror_worker_engine_info"
        ]
        print(json.dumps([engine.capabilities.isa, info]))
    """
    done = run_with(isa, model, tmp_path, code)
    assert done.returncode == 0, done.stderr
    capability, labels = json.loads(done.stdout)
    assert capability == isa
    assert labels == {
        "class": "cpu",
        "engine": "native",
        "precision": "int8",
        "isa": isa,
        "bit_stable": "true",
    }
    assert f"native engine: {isa}, 2 threads, weights int8" in done.stderr


def test_a_worker_with_an_unknown_set_ends_with_one_sentence(model: Path, tmp_path: Path) -> None:
    code = """
        import sys
        from mirror_sd import config
        from mirror_sd.engine import build
        from mirror_sd.errors import ConfigError
        try:
            build(config.load(overrides=[f"model.path={sys.argv[1]}"]), "cpu", 2)
        except ConfigError as error:
            print(error)
    """
    done = run_with("sse9", model, tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("MIRROR_SD_ISA='sse9' is not one of ")
    assert "portable" in done.stdout
