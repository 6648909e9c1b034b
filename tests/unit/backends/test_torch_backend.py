"""The torch back end on the default model, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from mirror_sd.backends import registry
from mirror_sd.backends.protocol import Backend, RaggedBatch
from mirror_sd.model_store import ModelFiles

LICENSE = Path(__file__).parents[3] / "LICENSE"
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "你好，请问退货需要多长时间？",
]


def created(files: ModelFiles, precision: str) -> Backend:
    return registry.create(
        "torch", files, device="cpu", precision=precision, threads=2, max_context=None
    )


def test_logits_of_512_positions_equal_those_of_transformers(
    default_model: ModelFiles,
    transformers_model: Any,
    tokenizer: Tokenizer,
    whole: Callable[..., np.ndarray],
) -> None:
    ids = np.array(tokenizer.encode(LICENSE.read_text(encoding="utf-8")).ids[:512])
    with torch.inference_mode():
        expected = transformers_model(torch.from_numpy(ids)[None]).logits[0].numpy()
    assert np.abs(whole(created(default_model, "fp32"), ids) - expected).max() < 1e-3
    bf16 = whole(created(default_model, "bf16"), ids)
    assert (bf16.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.95


def test_greedy_tokens_equal_those_of_transformers(
    default_model: ModelFiles, transformers_model: Any, tokenizer: Tokenizer
) -> None:
    backend = created(default_model, "fp32")
    backend.allocate_kv(8, 16)
    table = np.array([5, 2, 7, 0, 1, 3], np.int32)
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        answer = transformers_model.generate(
            torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )[0].tolist()
        sequence = list(ids)
        while len(sequence) < len(answer):
            start = 0 if len(sequence) == len(ids) else len(sequence) - 1
            tokens = np.array(sequence[start:], np.int32)
            logits = backend.forward(
                RaggedBatch(
                    token_ids=tokens,
                    positions=np.arange(start, len(sequence), dtype=np.int32),
                    sequence_offsets=np.array([0, len(tokens)], np.int32),
                    block_tables=(table,),
                    logit_rows=np.array([len(tokens) - 1], np.int32),
                )
            )
            sequence.append(int(logits[0].argmax()))
        assert sequence == answer


def test_sequences_may_share_the_blocks_of_a_prefix(tiny_model: Callable[..., Any]) -> None:
    tiny = tiny_model("LlamaConfig")
    backend = created(tiny.files, "fp32")
    backend.allocate_kv(4, 4)
    prefix = np.array([3, 1, 4, 1], np.int32)
    backend.forward(batch(prefix, start=0, table=[2]))
    tails = [np.array([5, 9], np.int32), np.array([26, 5], np.int32)]
    logits = backend.forward(
        RaggedBatch(
            token_ids=np.concatenate(tails),
            positions=np.array([4, 5, 4, 5], np.int32),
            sequence_offsets=np.array([0, 2, 4], np.int32),
            block_tables=(np.array([2, 0], np.int32), np.array([2, 3], np.int32)),
            logit_rows=np.array([1, 3], np.int32),
        )
    )
    for row, tail in zip(logits, tails, strict=True):
        expected = tiny.logits(np.concatenate((prefix, tail)))[-1]
        np.testing.assert_allclose(row, expected, atol=2e-4)


def test_a_batch_without_wanted_rows_only_writes(tiny_model: Callable[..., Any]) -> None:
    tiny = tiny_model("LlamaConfig")
    backend = created(tiny.files, "fp32")
    backend.allocate_kv(2, 4)
    first = replace(batch(np.array([7, 8], np.int32), 0, [1]), logit_rows=np.zeros(0, np.int32))
    assert backend.forward(first).shape == (0, 160)
    row = backend.forward(batch(np.array([9], np.int32), 2, [1]))[-1]
    np.testing.assert_allclose(row, tiny.logits(np.array([7, 8, 9]))[-1], atol=2e-4)


def test_block_bytes_are_those_of_keys_and_values(tiny_model: Callable[..., Any]) -> None:
    tiny = tiny_model("LlamaConfig")
    # 3 layers, keys and values, 2 heads of 16
    assert created(tiny.files, "fp32").kv_bytes_per_block(16) == 3 * 2 * 2 * 16 * 4 * 16
    assert created(tiny.files, "bf16").kv_bytes_per_block(1) == 3 * 2 * 2 * 16 * 2


def test_the_configuration_can_only_lower_the_context(tiny_model: Callable[..., Any]) -> None:
    files = tiny_model("LlamaConfig").files
    for asked, given in ((32, 32), (100_000, 128), (None, 128)):
        backend = registry.create(
            "torch", files, device="cpu", precision="fp32", threads=2, max_context=asked
        )
        assert backend.capabilities.max_context == given


def batch(ids: np.ndarray, start: int, table: list[int]) -> RaggedBatch:
    return RaggedBatch(
        token_ids=ids,
        positions=np.arange(start, start + len(ids), dtype=np.int32),
        sequence_offsets=np.array([0, len(ids)], np.int32),
        block_tables=(np.array(table, np.int32),),
        logit_rows=np.arange(len(ids), dtype=np.int32),
    )


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


GOOD = batch(ints(1, 2, 3), 3, [0, 1])
BAD = {
    "a token id beyond the vocabulary": ({"token_ids": ints(1, 160, 3)}, "token id 160"),
    "a negative token id": ({"token_ids": ints(1, -1, 3)}, "token id -1"),
    "too few positions": ({"positions": ints(3, 4)}, "3 token ids with 2 positions"),
    "a position beyond the context": ({"positions": ints(126, 127, 128)}, "position 128"),
    "a gap in the positions": ({"positions": ints(3, 5, 6)}, "consecutive"),
    "offsets that miss a token": ({"sequence_offsets": ints(0, 2)}, "offsets"),
    "an empty sequence": (
        {"sequence_offsets": ints(0, 0, 3), "block_tables": GOOD.block_tables * 2},
        "must have a token",
    ),
    "a table too many": ({"block_tables": GOOD.block_tables * 2}, "2 offsets for 2"),
    "a short table": ({"block_tables": (ints(0),)}, "block table 0 has 1 blocks, needs 2"),
    "a block that is not there": ({"block_tables": (ints(0, 4),)}, "block of table 0 4"),
    "a row that is not there": ({"logit_rows": ints(0, 3)}, "logit row 3"),
    "rows that do not ascend": ({"logit_rows": ints(1, 1)}, "ascend"),
    "no token": (
        {"token_ids": ints(), "positions": ints(), "sequence_offsets": ints(0, 0)},
        "0 token ids",
    ),
}


@pytest.mark.parametrize("engine", ["torch", "reference", "transformers"])
def test_a_bad_batch_is_refused_and_the_next_one_works(
    tiny_model: Callable[..., Any], engine: str
) -> None:
    tiny = tiny_model("LlamaConfig")
    backend = registry.create(
        engine, tiny.files, device="cpu", precision="fp32", threads=2, max_context=None
    )
    with pytest.raises(ValueError, match="allocate_kv"):
        backend.forward(GOOD)
    with pytest.raises(ValueError, match="cannot allocate"):
        backend.allocate_kv(0, 4)
    backend.allocate_kv(4, 4)
    backend.forward(batch(ints(4, 5, 6), 0, [0]))
    for name, (change, message) in BAD.items():
        with pytest.raises(ValueError, match=message):
            backend.forward(replace(GOOD, **change))
            pytest.fail(name)
    expected = tiny.logits(np.array([4, 5, 6, 1, 2, 3]))[3:]
    np.testing.assert_allclose(backend.forward(GOOD), expected, atol=2e-4)
