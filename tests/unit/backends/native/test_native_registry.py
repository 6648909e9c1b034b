"""Where the native engine is chosen, what takes its place, and what its workers do not load."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mirror_sd.backends import registry
from mirror_sd.errors import ConfigError, ModelError
from mirror_sd.model_store import ModelFiles
from tests.unit.backends.native.batches import whole
from tests.unit.backends.native.models import PLAIN, reference, write_directory

ROOT = Path(__file__).resolve().parents[4]
IDS = np.arange(20, dtype=np.int32)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRROR_SD_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> ModelFiles:
    return write_directory(PLAIN, tmp_path / "plain")


def create(engine: str, files: ModelFiles, **changes: Any) -> Any:
    settings = {"device": "cpu", "precision": "auto", "threads": 2, "max_context": None}
    return registry.create(engine, files, **{**settings, **changes})


def run_python(code: str, model: ModelFiles) -> Any:
    """The JSON that the code prints last, and what it logs."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(model.path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("engine", ["auto", "native"])
@pytest.mark.parametrize(
    ("precision", "given"), [("auto", "int8"), ("int8", "int8"), ("bf16", "bf16"), ("fp32", "fp32")]
)
def test_the_cpu_is_served_by_the_native_engine(
    model: ModelFiles, engine: str, precision: str, given: str
) -> None:
    capabilities = create(engine, model, precision=precision).capabilities
    assert (capabilities.name, capabilities.precision) == ("native", given)
    assert (capabilities.device, capabilities.bit_stable) == ("cpu", True)
    assert (capabilities.vocab_size, capabilities.max_context) == (75, 4096)


def test_the_configuration_can_only_lower_the_context(model: ModelFiles) -> None:
    for asked, given in ((32, 32), (100_000, 4096), (None, 4096)):
        assert create("native", model, max_context=asked).capabilities.max_context == given


def test_without_a_number_of_threads_all_usable_cores_compute(model: ModelFiles) -> None:
    backend = create("native", model, threads=None)
    assert f"{len(os.sched_getaffinity(0))} threads" in backend.capabilities.detail


def test_another_device_is_refused() -> None:
    nowhere = ModelFiles("none", Path("/nonexistent"), "safetensors")
    with pytest.raises(ConfigError, match="the native engine computes on the device 'cpu', not"):
        create("native", nowhere, device="cuda")
    with pytest.raises(ModelError, match="/nonexistent"):
        create("native", nowhere)


def test_int8_is_the_native_engines_alone(model: ModelFiles) -> None:
    with pytest.raises(ConfigError, match="precision 'int8' needs the native engine"):
        create("torch", model, precision="int8")


def test_a_model_beyond_the_kernels_limits_is_served_by_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = replace(PLAIN, num_heads=34, num_kv_heads=1, head_dim=4)
    files = write_directory(spec, tmp_path / "wide")
    with caplog.at_level(logging.WARNING):
        backend = create("auto", files, precision="fp32")
    assert backend.capabilities.name == "torch"
    assert "34 query heads share a KV head; the native engine takes 32; torch serves" in caplog.text
    np.testing.assert_allclose(whole(backend, IDS), whole(reference(spec), IDS), atol=1e-4)
    with pytest.raises(ConfigError, match="precision 'int8' needs the native engine"):
        create("auto", files, precision="int8")


def test_without_the_extension_torch_serves_with_a_notice(model: ModelFiles) -> None:
    code = """
        import json, logging, sys
        sys.modules["mirror_sd._native"] = None  # an import of it fails
        logging.basicConfig(level=logging.WARNING)
        from mirror_sd import config
        from mirror_sd.engine import build
        from mirror_sd.errors import ConfigError
        found = []
        for pool in ({}, {"engine": "native", "precision": "fp32"}, {"precision": "int8"}):
            settings = [f"pools.cpu.{key}={value}" for key, value in pool.items()]
            settings += [f"model.path={sys.argv[1]}", "engine.kv_cache_mb=16"]
            try:
                engine = build(config.load(overrides=settings), "cpu", 1)
                found.append([engine.capabilities.name, engine.capabilities.isa])
            except ConfigError as error:
                found.append(str(error))
        print(json.dumps(found))
    """
    found, log = run_python(code, model)
    assert found[:2] == [["torch", ""]] * 2
    assert found[2].startswith("precision 'int8' needs the native engine")
    assert "the native engine is not built" in log
    assert "Install a C++ compiler and install mirror-sd again" in log
    assert "sampling in numpy, which is slower" in log


def test_a_native_worker_loads_neither_torch_nor_transformers(model: ModelFiles) -> None:
    """They would add a quarter of a gigabyte and seconds to each worker."""
    code = """
        import json, sys
        from pathlib import Path
        import workers.worker
        from mirror_sd import config
        from mirror_sd.engine import build
        from mirror_sd.messages import Chunk, Finished, SamplingParams, Submit
        settings = [f"model.path={sys.argv[1]}", "engine.kv_cache_mb=16"]
        engine = build(config.load(overrides=settings), "cpu", 2)
        repeated = (1, 2, 3, 4) * 8  # so that something is drafted
        for number, params in enumerate(
            (
                SamplingParams(max_tokens=20, seed=0, temperature=0.0),
                SamplingParams(max_tokens=20, seed=1, top_p=0.9, logprobs=2),
            )
        ):
            engine.add(
                Submit(request_id=str(number), model="plain", prompt=repeated, params=params)
            )
        tokens, ends = 0, []
        while engine.has_work:
            for output in engine.step():
                match output:
                    case Chunk():
                        tokens += len(output.tokens)
                    case Finished():
                        ends.append(output.reason)
        loaded = {name.partition(".")[0] for name in sys.modules}
        heavy = {"torch", "transformers", "tokenizers", "scipy", "pandas", "matplotlib", "gguf"}
        status = Path("/proc/self/status").read_text()
        peak_mb = int(status.split("VmHWM:")[1].split()[0]) / 1024
        name = engine.capabilities.name
        print(json.dumps([name, tokens, ends, sorted(loaded & heavy), peak_mb]))
    """
    (name, tokens, ends, heavy, peak_mb), _ = run_python(code, model)
    assert (name, tokens, ends) == ("native", 40, ["length", "length"])
    assert heavy == []
    assert peak_mb < 100
