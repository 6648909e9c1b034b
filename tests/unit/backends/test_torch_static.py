"""Plans of few shapes, as accelerators run them: here on the CPU, without graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mirror_sd import cuda_allocator
from mirror_sd.backends import torch_static, torch_transfer
from mirror_sd.backends.protocol import RaggedBatch
from mirror_sd.backends.torch_backend import TorchBackend
from mirror_sd.backends.torch_cache import empty_cache, geometry_of
from mirror_sd.backends.torch_linear import TILE_ROWS, PlainLinear, TiledLinear
from mirror_sd.backends.torch_static import StaticForward
from mirror_sd.backends.torch_static_plan import Shape, StaticPlanner, static_keys
from mirror_sd.bench.decode import greedy, run_engine
from mirror_sd.config import EngineConfig
from mirror_sd.config_speculation import SpeculationConfig
from mirror_sd.engine import Engine
from mirror_sd.uir import program
from mirror_sd.uir.precision_plan import PrecisionPlan

BLOCK_SIZE = 16


def backend(files: Any, precision: str = "fp32", *, is_static: bool = True) -> TorchBackend:
    lowered = program.load(files, PrecisionPlan.of(precision))
    made = TorchBackend(lowered, "cpu", precision, is_static=is_static)
    made.allocate_kv(60, BLOCK_SIZE)
    return made


def batch(parts: list[tuple[int, int]], seed: int = 0) -> RaggedBatch:
    """Sequences of (start, new tokens), each with its own blocks; all logits wanted."""
    random = np.random.default_rng(seed)
    blocks = iter(random.permutation(60).astype(np.int32))
    offsets = np.cumsum([0, *(count for _, count in parts)]).astype(np.int32)
    return RaggedBatch(
        token_ids=random.integers(0, 160, offsets[-1]).astype(np.int32),
        positions=np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in parts]),
        sequence_offsets=offsets,
        block_tables=tuple(
            np.array([next(blocks) for _ in range((s + n - 1) // BLOCK_SIZE + 1)], np.int32)
            for s, n in parts
        ),
        logit_rows=np.arange(offsets[-1], dtype=np.int32),
    )


RAGGED = [(0, 100), (0, 1), (250, 20), (40, 5), (255, 2)]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("MistralConfig", {"sliding_window": 40, "max_position_embeddings": 512}),
        ("Qwen3Config", {"head_dim": 16, "max_position_embeddings": 512}),
        ("LlamaConfig", {"num_key_value_heads": 4, "max_position_embeddings": 512}),
    ],
)
def test_static_plans_give_the_logits_and_states_of_ragged_ones(
    tiny_model: Callable[..., Any], family: str, options: dict[str, Any]
) -> None:
    tiny = tiny_model(family, **options)
    ragged, static = (backend(tiny.files, is_static=choice) for choice in (False, True))
    for seed, parts in enumerate([[(0, 3)], RAGGED, [(0, 1)] * 9]):
        for one in (ragged, static):
            one.tap((1, 3))
        expected = ragged.forward(batch(parts, seed))
        np.testing.assert_allclose(static.forward(batch(parts, seed)), expected, atol=2e-4)
        np.testing.assert_allclose(static.features, ragged.features, atol=2e-4)
    for one in (ragged, static):
        one.tap(())
    static.forward(batch([(0, 3)]))
    assert static.features.shape == (3, 0)


def test_padding_writes_to_no_block(tiny_model: Callable[..., Any]) -> None:
    static = backend(tiny_model("LlamaConfig").files)
    asked = batch([(0, 1), (3, 2)])
    static.forward(asked)
    cache = static._cache
    assert cache is not None
    written = cache[:, : 60 * BLOCK_SIZE].abs().sum(dim=(0, 2, 3)).nonzero().flatten().tolist()
    first, second = (int(table[0]) * BLOCK_SIZE for table in asked.block_tables)
    assert sorted(written) == sorted([first, second + 3, second + 4])


def test_a_load_has_few_shapes(tiny_model: Callable[..., Any]) -> None:
    decoder = backend(tiny_model("LlamaConfig").files).decoder
    planner = StaticPlanner(geometry_of(decoder, BLOCK_SIZE, torch.device("cpu")), 959)
    random = np.random.default_rng(1)
    shapes = set()
    for _ in range(300):  # 1 to 16 streams, some of them verifying a draft
        parts = [(int(random.integers(0, 40)), int(random.integers(1, 5)))] * int(
            random.integers(1, 17)
        )
        shape, indexes = planner.host(batch(parts))
        assert len(indexes) == len(planner.blank(shape))
        shapes.add(shape)
    assert len(shapes) == 5
    assert {shape.rows for shape in shapes} == {TILE_ROWS}
    # Decoding one token and verifying sixteen are one shape, and so one graph.
    assert planner.host(batch([(9, 1)]))[0] == planner.host(batch([(9, 16)]))[0]
    assert planner.host(batch([(9, 1)]))[0] == Shape(TILE_ROWS, ((1, 256),), TILE_ROWS)
    assert [static_keys(p) for p in (0, 255, 256, 5000)] == [256, 256, 512, 8192]


def test_a_step_replayed_on_other_indexes_of_its_shape_is_right(
    tiny_model: Callable[..., Any],
) -> None:
    """What a CUDA graph relies on: the step reads nothing of a batch but its index buffer. The
    step is traced once, as a graph would be captured, and the trace run on another batch."""
    tiny = tiny_model("MistralConfig", sliding_window=40, max_position_embeddings=512)
    direct = backend(tiny.files, "fp16")
    cpu = torch.device("cpu")
    decoder = direct.decoder
    cache = empty_cache(decoder, 61 * BLOCK_SIZE, cpu)
    forward = StaticForward(decoder, geometry_of(decoder, BLOCK_SIZE, cpu), cache)
    captured, replayed = batch([(0, 3), (7, 1)], seed=1), batch([(100, 9), (2, 5)], seed=2)
    shape, indexes = forward._planner.host(captured)
    other, changed = forward._planner.host(replayed)
    assert shape == other

    def step(values: torch.Tensor) -> torch.Tensor:
        forward._run(shape, values)
        return forward._logits[shape.logit_rows]

    with torch.no_grad():
        forward._run(shape, torch.from_numpy(indexes))  # the result buffers are there then
        graph = make_fx(step)(torch.from_numpy(indexes))
        cache.zero_()
        found = graph(torch.from_numpy(changed))[:14].numpy().copy()
    expected = direct.forward(replayed)
    assert np.array_equal(found, expected)
    assert not np.array_equal(found[:4], direct.forward(captured))


class Recorder(TorchDispatchMode):
    """Stands in for a CUDA graph: it notes what is called, on which tensors, and replays that."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, outputs))
        return outputs

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, outputs in self.calls:
                found = func(*args, **kwargs)
                for old, new in zip(tree_leaves(outputs), tree_leaves(found), strict=True):
                    if isinstance(old, torch.Tensor):
                        old.copy_(new)  # where it always lies; onto itself after a call in place


class Stream:
    def __init__(self, device: Any = None) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture
def cuda_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of `torch.cuda` that the code makes, answered on the CPU."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorder)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))


@pytest.mark.usefixtures("cuda_of_the_cpu")
def test_replayed_graphs_give_the_bits_of_direct_steps(tiny_model: Callable[..., Any]) -> None:
    tiny = tiny_model("MistralConfig", sliding_window=40, max_position_embeddings=512)
    direct, graphed = (backend(tiny.files, "fp16") for _ in range(2))
    static = graphed._static
    assert static is not None
    static._has_graphs = True
    graphed.tap((2,))
    direct.tap((2,))
    assert graphed.graph_captures == len(torch_static.WARM_SPANS)
    # Three streams from their prompts on; the second batch decodes what the first one read.
    loads = [[(0, 30), (0, 5), (0, 1)], [(30, 1), (5, 7), (1, 16)], [(31, 3), (12, 1), (17, 2)]]
    for parts in [*loads, RAGGED, [(0, 200), (0, 400)], *loads]:
        asked = batch(parts, seed=4)
        assert np.array_equal(graphed.forward(asked), direct.forward(asked))
        assert np.array_equal(graphed.features, direct.features)
    # Beyond the warm ones: of RAGGED, whose contexts need 256 and 512 keys. 600 rows are no graph.
    assert graphed.graph_captures == len(torch_static.WARM_SPANS) + 1
    graphed.tap(())
    direct.tap(())
    asked = batch(loads[0], seed=4)
    assert np.array_equal(graphed.forward(asked), direct.forward(asked))


@pytest.mark.usefixtures("cuda_of_the_cpu")
def test_a_capture_leaves_the_cache_alone_and_old_graphs_are_dropped(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_static, "MOST_GRAPHS", 2)
    graphed = backend(tiny_model("LlamaConfig").files)
    static, cache = graphed._static, graphed._cache
    assert static is not None and cache is not None
    static._has_graphs = True
    static.warm_up()
    assert not cache[:, : 60 * BLOCK_SIZE].any()
    assert graphed.graph_captures == len(torch_static.WARM_SPANS)
    assert [shape.groups[0][0] for shape in static._graphs] == [8, 16]


@pytest.mark.usefixtures("cuda_of_the_cpu")
def test_what_goes_through_page_locked_memory_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pageable(torch_transfer._Pinned):
        def take(self, length: int) -> torch.Tensor:
            return torch.empty(length, dtype=self._buffer.dtype)

    monkeypatch.setattr(torch_transfer, "_Pinned", Pageable)
    transfer = torch_transfer.StreamedTransfer(torch.device("cpu"))
    target = torch.zeros(5, dtype=torch.int64)
    transfer.upload(np.arange(5), target)
    assert target.tolist() == [0, 1, 2, 3, 4]
    one, other = torch.randn(3, 4), torch.randn(2, 2)
    found = transfer.download([one, other])
    assert np.array_equal(found[0], one.numpy()) and np.array_equal(found[1], other.numpy())


def test_speculation_on_static_plans_changes_no_token(tiny_model: Callable[..., Any]) -> None:
    tiny = tiny_model("LlamaConfig", max_position_embeddings=512)
    made = TorchBackend(
        program.load(tiny.files, PrecisionPlan.of("bf16")), "cpu", "bf16", is_static=True
    )
    engine = Engine(
        made,
        EngineConfig(kv_cache_mb=8),
        SpeculationConfig(min_tokens=3),
        model_name="tiny",
        device_class="gpu",
        slots=8,
    )
    random = np.random.default_rng(3)
    prompts = [tuple(random.integers(0, 160, n).tolist()) * 3 for n in (4, 9, 1)]
    plain = run_engine(engine, prompts, greedy(20, (), speculation=False), tag="plain")
    for streams in (1, 3):
        drafted = run_engine(
            engine, prompts, greedy(20, (), speculation=True), concurrency=streams, tag="drafted"
        )
        assert sum(usage.drafted_tokens for usage in drafted.usages) > 0
        assert drafted.tokens == plain.tokens


def test_tiles_give_the_rows_of_one_product() -> None:
    weight, bias = torch.randn(24, 32), torch.randn(24)
    x, factor = torch.randn(3 * TILE_ROWS, 32), torch.randn(3 * TILE_ROWS, 24)
    plain, tiled = PlainLinear(weight, bias), TiledLinear(weight, bias)
    torch.testing.assert_close(tiled(x), plain(x))
    torch.testing.assert_close(tiled.silu(x), plain.silu(x))
    torch.testing.assert_close(tiled.times(x, factor), plain.times(x, factor))
    alone = tiled(x[:TILE_ROWS])
    assert torch.equal(tiled(x)[:TILE_ROWS], alone)


def test_fp16_keeps_to_fp32_and_its_products_stay_finite(tiny_model: Callable[..., Any]) -> None:
    tiny = tiny_model("LlamaConfig")
    asked = batch([(0, 40)])
    expected = backend(tiny.files).forward(asked)
    for is_static in (False, True):
        half = backend(tiny.files, "fp16", is_static=is_static)
        assert half.capabilities.precision == "fp16"
        assert np.abs(half.forward(asked) - expected).max() < 0.02 * np.abs(expected).max()
        big = torch.tensor([[torch.inf, -torch.inf, 3.0]], dtype=torch.float16)
        assert half.decoder._finite(big).tolist() == [[65504.0, -65504.0, 3.0]]


@pytest.mark.parametrize(
    ("device", "present", "added"),
    [
        ("cuda", {}, True),
        ("cuda:1", {"PATH": "/bin"}, True),
        ("auto", {}, True),
        ("cpu", {}, False),
        ("xpu", {}, False),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, False),
        ("cuda", {"PYTORCH_ALLOC_CONF": ""}, False),
    ],
)
def test_cuda_workers_get_the_asynchronous_allocator_unless_one_is_chosen(
    device: str, present: dict[str, str], added: bool
) -> None:
    expected = {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"} if added else {}
    assert cuda_allocator.environment(device, present) == expected


def test_graphs_are_left_out_where_there_is_no_cuda(tiny_model: Callable[..., Any]) -> None:
    static = backend(tiny_model("LlamaConfig").files)
    static.forward(batch([(0, 3)]))
    assert static.graph_captures == 0
    assert torch_static.GRAPH_ROWS % TILE_ROWS == 0
