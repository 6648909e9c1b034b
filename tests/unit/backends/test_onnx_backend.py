"""The ONNX Runtime back end beside plain numpy."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from mirror_sd.backends import registry
from mirror_sd.backends.onnx import decoder_graph, providers
from mirror_sd.backends.onnx.graph import FLOAT, GraphBuilder
from mirror_sd.backends.onnx.onnx_backend import OnnxBackend
from mirror_sd.backends.onnx.products import Precision, Products
from mirror_sd.backends.onnx.providers import PROVIDERS, Provider
from mirror_sd.backends.onnx.session import GraphSession
from mirror_sd.backends.protocol import Float32
from mirror_sd.errors import ConfigError, ModelError
from mirror_sd.model_store import ModelFiles
from mirror_sd.uir.model_spec import ModelSpec
from tests.unit.backends.native.batches import Run, advance, alone, batch_of, ints, whole
from tests.unit.backends.native.models import FP32, ODD, PLAIN, program_of, reference
from tests.unit.backends.test_bit_stability import check

CPU = PROVIDERS["cpu"]
IDS = np.random.default_rng(4).integers(0, 75, 90).astype(np.int32)
WINDOWED = replace(ODD, windows=(None, 30), num_heads=2)


def form_of(name: str) -> Provider:
    """The graph that a provider gets, computed on the CPU."""
    return replace(PROVIDERS[name], chain=CPU.chain, memory="cpu")


def onnx_backend(
    spec: ModelSpec, precision: Precision = "fp32", provider: Provider = CPU, threads: int = 2
) -> OnnxBackend:
    return OnnxBackend(program_of(spec, FP32), provider, precision, threads)


def truth(spec: ModelSpec) -> Float32:
    return whole(reference(spec), IDS)


@pytest.mark.parametrize("spec", [PLAIN, ODD, WINDOWED], ids=["plain", "odd", "windowed"])
def test_fp32_logits_equal_those_of_plain_numpy(spec: ModelSpec) -> None:
    assert np.abs(whole(onnx_backend(spec), IDS) - truth(spec)).max() < 1e-4


@pytest.mark.parametrize("provider", ["cpu", "cuda", "trt", "openvino"])
@pytest.mark.parametrize(("precision", "most"), [("fp16", 0.02), ("bf16", 0.2), ("int8", 1.0)])
def test_narrow_weights_cost_what_they_round(
    precision: Precision, most: float, provider: str
) -> None:
    expected = truth(ODD)
    difference = whole(onnx_backend(ODD, precision, form_of(provider)), IDS) - expected
    # Of logits of the order of 6; that it is not 0 shows that the weights were rounded at all.
    assert 1e-4 < np.abs(difference).max() < most
    assert difference.std() < 0.05 * expected.std()


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_do_not_depend_on_their_batch(precision: Precision, threads: int) -> None:
    backend = onnx_backend(ODD, precision, threads=threads)
    assert backend.capabilities.bit_stable
    check(backend, 75, [600, 1, 90, 5, 300], block_size=16, seed=3)


def test_sequences_may_share_the_blocks_of_a_prefix() -> None:
    backend = onnx_backend(PLAIN)
    backend.allocate_kv(4, 4)
    advance(backend, [(Run(IDS[:4], ints(2)), 4)])
    runs = [Run(np.concatenate([IDS[:4], t]), ints(2, i)) for i, t in ((0, IDS[7:9]), (3, IDS[:2]))]
    for run in runs:
        run.done = 4
    logits = backend.forward(batch_of([(run, 2) for run in runs], ints(1, 3)))
    for row, run in zip(logits, runs, strict=True):
        assert np.abs(row - whole(reference(PLAIN), run.ids)[-1]).max() < 1e-4


def test_a_batch_without_wanted_rows_only_writes() -> None:
    backend = onnx_backend(PLAIN)
    backend.allocate_kv(2, 16)
    run = Run(IDS[:9], ints(1))
    assert backend.forward(batch_of([(run, 8)], ints())).shape == (0, 75)
    run.done = 8
    last = backend.forward(batch_of([(run, 1)]))[0]
    assert np.abs(last - whole(reference(PLAIN), IDS[:9])[-1]).max() < 1e-4


def test_a_bad_batch_is_refused_and_the_cache_untouched() -> None:
    backend = onnx_backend(PLAIN)
    with pytest.raises(ValueError, match="allocate_kv"):
        backend.forward(batch_of([(Run(IDS, ints(0)), 1)]))
    backend.allocate_kv(6, 16)
    run = Run(IDS, np.arange(6, dtype=np.int32))
    advance(backend, [(run, 80)])
    for bad in ({"token_ids": ints(75)}, {"positions": ints(4096)}, {"block_tables": (ints(6),)}):
        with pytest.raises(ValueError):
            backend.forward(replace(batch_of([(run, 1)]), **bad))
    advance(backend, [(run, 10)])
    assert np.array_equal(np.array(run.logits), alone(onnx_allocated(6), IDS, run.table, 80))


def onnx_allocated(blocks: int) -> OnnxBackend:
    backend = onnx_backend(PLAIN)
    backend.allocate_kv(blocks, 16)
    return backend


def test_features_are_the_residual_stream_after_the_tapped_layers() -> None:
    ours, plain = onnx_backend(ODD), reference(ODD)
    untapped = whole(ours, IDS)
    for backend in (ours, plain):
        backend.tap((1, 2))
        logits = whole(backend, IDS)
        assert backend.features.shape == (len(IDS), 2 * ODD.hidden_size)
        if backend is ours:
            assert np.array_equal(logits, untapped)
    assert np.abs(ours.features - plain.features).max() < 1e-4
    ours.tap(())
    assert np.array_equal(whole(ours, IDS), untapped) and ours.features.size == 0
    with pytest.raises(ValueError, match="ascend"):
        ours.tap((0,))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("provider", sorted(PROVIDERS))
def test_the_graphs_of_all_providers_are_valid_onnx(
    precision: Precision, provider: str, tmp_path: Path
) -> None:
    products = Products(precision, PROVIDERS[provider])
    model = decoder_graph.export(program_of(ODD, FP32), products).model()
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "weights").touch()
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
    kinds = {node.op_type for node in model.graph.node}
    assert ("MatMulNBits" in kinds) == (precision == "int8" and provider in ("cpu", "cuda"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cuda", "onnxruntime-gpu"),
        ("trt", "onnxruntime-gpu tensorrt"),
        ("openvino", "onnxruntime-openvino"),
    ],
)
def test_a_provider_that_is_absent_fails_with_what_to_install(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'.*has only CPUExecutionProvider.*{says}"):
        providers.check(PROVIDERS[name], ["CPUExecutionProvider"])
    providers.check(PROVIDERS[name], PROVIDERS[name].chain)


def test_a_missing_package_fails_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[edge\]'"):
        providers.find("cpu")


@pytest.mark.filterwarnings("ignore:Specified provider 'TensorrtExecutionProvider':UserWarning")
def test_a_provider_that_cannot_start_is_named_with_the_reason() -> None:
    broken = replace(CPU, name="trt", chain=("TensorrtExecutionProvider",))
    graph = GraphBuilder("broken")
    graph.output("y", graph.op("NoSuchOperator", graph.input("x", ["T"])), ["T"])
    with pytest.raises(ConfigError, match=r"cannot start on 'trt': .*NoSuchOperator"):
        GraphSession(graph, broken, 1)
    sound = GraphBuilder("sound")
    sound.output("y", sound.op("Neg", sound.input("x", ["T"], FLOAT)), ["T"])
    # ONNX Runtime warns, and would go on without the provider.
    with pytest.raises(ConfigError, match="TensorrtExecutionProvider cannot start here"):
        GraphSession(sound, broken, 1)


def test_the_registry_makes_it_of_a_model_or_says_why_not(default_model: ModelFiles) -> None:
    def created(device: str = "cpu", precision: str = "int8", kv: str = "auto") -> object:
        return registry.create(
            "onnxruntime",
            default_model,
            device=device,
            precision=precision,
            threads=2,
            max_context=512,
            kv=kv,
        )

    for wrong in ({"device": "npu"}, {"precision": "int4"}, {"kv": "int8"}):
        with pytest.raises((ConfigError, ModelError)):
            created(**wrong)
