"""Reads the conversations through the target once more and keeps what a draft learns from.

One forward with the layers tapped gives the features of all tokens and, from the last layer's, the
target's distribution over the draft vocabulary.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from mirror_sd.backends.protocol import Backend, RaggedBatch
from mirror_sd.errors import UnsupportedModel
from mirror_sd.training.answers import Answer
from mirror_sd.training.dataset import CANDIDATES
from mirror_sd.uir.program import Program

_TOKENS_AT_ONCE = 512
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class TargetHead:
    """The end of the target: logits = matrix @ (norm * rms_normed(last layer))."""

    embedding: Tensor
    norm: Tensor
    matrix: Tensor
    rms_eps: float

    @classmethod
    def of(cls, program: Program) -> TargetHead:
        def load(name: str) -> Tensor:
            return torch.tensor(program.weights.load(name))

        embedding = load("embedding")
        matrix = embedding if program.spec.tied_embeddings else load("head")
        return cls(embedding, load("final_norm"), matrix, program.spec.rms_eps)

    def normed(self, last_layer: Tensor) -> Tensor:
        """[T, hidden] as the head reads it."""
        return functional.rms_norm(
            last_layer.float(), last_layer.shape[-1:], self.norm, self.rms_eps
        )


def default_taps(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and the last layer."""
    return tuple(sorted({max(num_layers // 3, 1), max(2 * num_layers // 3, 1), num_layers}))


def draft_vocabulary(
    answers: Sequence[Answer], size: int, vocab_size: int, stop: Sequence[int]
) -> NDArray[np.int32]:
    """The tokens that the target's answers use most, ascending; filled up with the lowest ids,
    which a tokenizer learnt first. The stop tokens are always among them."""
    counts = Counter(
        token
        for answer in answers
        if not answer.is_held_out
        for token in answer.tokens[answer.prompt_length :]
    )
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    wanted = dict.fromkeys([*stop, *ranked, *range(vocab_size)])
    return np.sort(np.fromiter(wanted, np.int32)[: min(size, vocab_size)])


def record(
    backend: Backend,
    head: TargetHead,
    answers: Sequence[Answer],
    vocabulary: NDArray[np.int32],
    taps: tuple[int, ...],
    directory: Path,
    *,
    num_blocks: int,
    block_size: int,
    advance: Advance,
) -> None:
    """Write the files of `dataset`. Raises `UnsupportedModel` where the layers cannot be tapped."""
    facts = backend.capabilities
    if not facts.num_layers:
        raise UnsupportedModel(f"the back end {facts.name} does not give hidden states")
    hidden, layers = facts.hidden_size, sorted({*taps, facts.num_layers})
    offsets = np.cumsum([0, *(len(answer.tokens) for answer in answers)])
    total = int(offsets[-1])
    candidates = min(CANDIDATES, len(vocabulary))
    np.save(
        directory / "tokens.npy", np.concatenate([np.array(a.tokens, np.int32) for a in answers])
    )
    features = _file(directory / "features.npy", np.uint16, (total, len(taps) * hidden))
    ids = _file(directory / "ids.npy", np.uint16, (total, candidates))
    shares = _file(directory / "shares.npy", np.float16, (total, candidates))
    columns = np.concatenate([layers.index(tap) * hidden + np.arange(hidden) for tap in taps])
    rows = head.matrix[torch.from_numpy(vocabulary.astype(np.int64))].bfloat16()
    backend.tap(layers)
    try:
        for batch, begin in _batches(answers, num_blocks, block_size):
            backend.forward(batch)
            tapped = torch.from_numpy(backend.features)
            place = slice(begin, begin + len(batch.token_ids))
            features[place] = _bits(tapped[:, torch.from_numpy(columns)])
            ids[place], shares[place] = _likeliest(
                head.normed(tapped[:, -hidden:]), rows, candidates
            )
            advance(len(batch.token_ids))
    finally:
        backend.tap(())
    for array in (features, ids, shares):
        array.flush()
    # Last: its presence says that the others are whole.
    np.savez(
        directory / "index.npz",
        offsets=offsets,
        prompt_lengths=np.array([answer.prompt_length for answer in answers]),
        held_out=np.array([answer.is_held_out for answer in answers]),
        languages=np.array([answer.lang for answer in answers]),
        vocabulary=vocabulary,
    )


def _file(path: Path, dtype: Any, shape: tuple[int, ...]) -> Any:
    array = open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    # Room for all of it now: a mapped file that finds none later ends the process by a signal.
    with path.open("r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
    return array


def _bits(values: Tensor) -> NDArray[np.uint16]:
    return values.bfloat16().view(torch.int16).numpy().view(np.uint16)


def _likeliest(
    normed: Tensor, rows: Tensor, candidates: int
) -> tuple[NDArray[np.uint16], NDArray[np.float16]]:
    logits = functional.linear(normed.bfloat16(), rows).float()
    best = logits.topk(candidates, dim=1)
    return (
        best.indices.numpy().astype(np.uint16),
        best.values.softmax(dim=1).numpy().astype(np.float16),
    )


def _batches(
    answers: Sequence[Answer], num_blocks: int, block_size: int
) -> Iterator[tuple[RaggedBatch, int]]:
    """(forward, index of its first row): whole conversations, one after the other."""
    pending: list[Answer] = []
    begin = tokens = 0
    for answer in answers:
        length = len(answer.tokens)
        if pending and tokens + length > _TOKENS_AT_ONCE:
            yield _ragged(pending, num_blocks, block_size), begin
            begin, tokens, pending = begin + tokens, 0, []
        pending.append(answer)
        tokens += length
    if pending:
        yield _ragged(pending, num_blocks, block_size), begin


def _ragged(answers: Sequence[Answer], num_blocks: int, block_size: int) -> RaggedBatch:
    lengths = [len(answer.tokens) for answer in answers]
    blocks = [-(-length // block_size) for length in lengths]
    if sum(blocks) > num_blocks:
        raise UnsupportedModel(
            f"conversations of {sum(lengths)} tokens do not fit into the KV cache; raise"
            " engine.kv_cache_mb"
        )
    first = np.cumsum([0, *blocks])
    return RaggedBatch(
        token_ids=np.concatenate([np.array(answer.tokens, np.int32) for answer in answers]),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        sequence_offsets=np.cumsum([0, *lengths]).astype(np.int32),
        block_tables=tuple(np.arange(a, b, dtype=np.int32) for a, b in pairwise(first)),
        logit_rows=np.array([sum(lengths) - 1], np.int32),
    )
