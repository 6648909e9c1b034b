"""A row's logits are the same bits in any batch, chunking and block layout (idea 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mirror_sd.backends import registry
from mirror_sd.backends.protocol import Backend, RaggedBatch
from mirror_sd.backends.torch_backend import TorchBackend
from mirror_sd.model_store import ModelFiles
from mirror_sd.uir import program
from mirror_sd.uir.precision_plan import PrecisionPlan

BLOCKS = 400


class Sequence:
    """Token ids and the logits that the back end gave each of them."""

    def __init__(self, ids: np.ndarray, blocks: Iterator[int], block_size: int) -> None:
        self.ids = ids.astype(np.int32)
        self.done = 0
        self.table = np.array([next(blocks) for _ in range(len(ids) // block_size + 1)], np.int32)
        self.logits: list[np.ndarray] = []


def step(backend: Backend, parts: list[tuple[Sequence, int]]) -> None:
    """Feed the next `count` tokens of each sequence in one batch, keeping all their logits."""
    offsets = np.cumsum([0, *(count for _, count in parts)]).astype(np.int32)
    logits = backend.forward(
        RaggedBatch(
            token_ids=np.concatenate([s.ids[s.done : s.done + n] for s, n in parts]),
            positions=np.concatenate(
                [np.arange(s.done, s.done + n, dtype=np.int32) for s, n in parts]
            ),
            sequence_offsets=offsets,
            block_tables=tuple(s.table for s, _ in parts),
            logit_rows=np.arange(offsets[-1], dtype=np.int32),
        )
    )
    for place, (sequence, count) in enumerate(parts):
        sequence.logits.extend(logits[offsets[place] : offsets[place + 1]].copy())
        sequence.done += count


def alone(backend: Backend, ids: np.ndarray, chunk: int, block_size: int) -> np.ndarray:
    sequence = Sequence(ids, iter(range(BLOCKS)), block_size)
    while sequence.done < len(ids):
        step(backend, [(sequence, min(chunk, len(ids) - sequence.done))])
    return np.array(sequence.logits)


def shuffled(backend: Backend, prompts: list[np.ndarray], seed: int, block_size: int) -> list[Any]:
    """All prompts through random ragged batches: some prefill, some decode, some verify."""
    random = np.random.default_rng(seed)
    blocks = iter(random.permutation(BLOCKS).tolist())
    sequences = [Sequence(ids, blocks, block_size) for ids in prompts]
    while unfinished := [s for s in sequences if s.done < len(s.ids)]:
        random.shuffle(unfinished)
        chosen = unfinished[: random.integers(1, len(unfinished) + 1)]
        counts = [int(random.choice([1, 1, 2, 5, 9, 33, 100])) for _ in chosen]
        pairs = zip(chosen, counts, strict=True)
        step(backend, [(s, min(n, len(s.ids) - s.done)) for s, n in pairs])
    return [np.array(s.logits) for s in sequences]


def check(backend: Backend, vocab: int, lengths: list[int], block_size: int, seed: int) -> None:
    if not backend.capabilities.bit_stable:
        pytest.skip("the self-test found torch's kernels not bit-stable on this CPU")
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, vocab, length) for length in lengths]
    backend.allocate_kv(BLOCKS, block_size)
    expected = [alone(backend, ids, len(ids), block_size) for ids in prompts]
    for ids, whole in zip(prompts, expected, strict=True):
        assert np.array_equal(alone(backend, ids, 7, block_size), whole)
    for attempt in range(2):
        for got, whole in zip(
            shuffled(backend, prompts, seed + attempt, block_size), expected, strict=True
        ):
            assert np.array_equal(got, whole)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rows_of_the_default_model_do_not_depend_on_their_batch(
    default_model: ModelFiles, precision: str
) -> None:
    backend = registry.create(
        "torch", default_model, device="cpu", precision=precision, threads=2, max_context=1024
    )
    check(backend, 49152, [80, 1, 30, 3], block_size=16, seed=11)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("block_size", [1, 5, 16, 48, 128])
def test_rows_of_a_small_model_do_not_depend_on_their_batch(
    tiny_model: Callable[..., Any], precision: str, block_size: int
) -> None:
    tiny = tiny_model("MistralConfig", sliding_window=70, max_position_embeddings=2048)
    backend = registry.create(
        "torch", tiny.files, device="cpu", precision=precision, threads=2, max_context=None
    )
    lengths = [90, 5, 130] if block_size == 1 else [600, 1, 90, 5, 300]
    check(backend, 160, lengths, block_size, seed=block_size)


def test_decoding_one_by_one_gives_the_bits_of_a_prefill(tiny_model: Callable[..., Any]) -> None:
    tiny = tiny_model("Qwen3Config", head_dim=16, max_position_embeddings=2048)
    for precision in ("fp32", "bf16"):
        backend = registry.create(
            "torch", tiny.files, device="cpu", precision=precision, threads=2, max_context=None
        )
        if not backend.capabilities.bit_stable:
            pytest.skip("the self-test found torch's kernels not bit-stable on this CPU")
        backend.allocate_kv(BLOCKS, 16)
        ids = np.random.default_rng(2).integers(0, 160, 530)
        assert np.array_equal(alone(backend, ids, 1, 16), alone(backend, ids, len(ids), 16))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_rows_of_static_plans_do_not_depend_on_their_batch(
    tiny_model: Callable[..., Any], precision: str
) -> None:
    tiny = tiny_model("MistralConfig", sliding_window=70, max_position_embeddings=2048)
    lowered = program.load(tiny.files, PrecisionPlan.of(precision))
    backend = TorchBackend(lowered, "cpu", precision, is_static=True)
    check(backend, 160, [600, 1, 90, 5, 300], 16, seed=3)
