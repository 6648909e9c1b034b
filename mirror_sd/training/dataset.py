"""What training reads: conversations, the target's features and its distributions, on disk.

One row for each token of every conversation, conversations end to end:

    tokens.npy     [T] int32
    features.npy   [T, F] the bits of bfloat16: the target's tapped features of the token
    ids.npy        [T, K] uint16, indexes into the draft vocabulary: the K likeliest next tokens
    shares.npy     [T, K] fp16, their probabilities, which add up to 1
    index.npz      offsets [C + 1], prompt_lengths [C], held_out [C], languages [C],
                   vocabulary [V]: the draft's own, ascending ids of the target
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mirror_sd.errors import ConfigError

CANDIDATES = 64
# Conversations of like length go together; this many are sorted at a time.
_WINDOW = 96
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Conversations padded to the longest, [B, L].

    features [B, L, F] bf16: of the token before each. labels [B, L]: the index in the draft
    vocabulary of the token after each, -1 where the draft does not have it. is_known [B, L]: rows
    with a next token. is_answer [B, L]: those whose next token is part of an answer. ids, shares:
    of the N known rows, in order.
    """

    token_ids: Tensor
    features: Tensor
    labels: Tensor
    is_known: Tensor
    is_answer: Tensor
    ids: Tensor
    shares: Tensor


class Dataset:
    """The files of one directory, memory-mapped. Raises `ConfigError` where they are broken."""

    def __init__(self, directory: Path) -> None:
        try:
            with (directory / "index.npz").open("rb") as file:
                index = np.load(file)
                self.offsets: Int64 = index["offsets"]
                self.prompt_lengths: Int64 = index["prompt_lengths"]
                self.held_out: NDArray[np.bool_] = index["held_out"]
                self.languages: NDArray[np.str_] = index["languages"]
                self.vocabulary: NDArray[np.int32] = index["vocabulary"]
            self._tokens, self._features, self._ids, self._shares = (
                np.load(directory / f"{name}.npy", mmap_mode="r")
                for name in ("tokens", "features", "ids", "shares")
            )
            self._check()
        except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
            raise ConfigError(
                f"the training data in {directory} is broken: {error!r}; without that directory"
                " --resume makes it anew of the answers"
            ) from error

    def _check(self) -> None:
        """Raises `ValueError` where the files do not belong together."""
        rows = int(self.offsets[-1])
        parts = (self._tokens, self._features, self._ids, self._shares)
        if any(len(part) != rows for part in parts):
            raise ValueError(f"not all of its files have {rows} rows")

    @property
    def lengths(self) -> Int64:
        return np.diff(self.offsets)

    @property
    def feature_size(self) -> int:
        return int(self._features.shape[1])

    def conversations(self, *, held_out: bool) -> list[int]:
        return np.flatnonzero(self.held_out == held_out).tolist()

    def answer_tokens(self, conversations: Sequence[int]) -> int:
        return int((self.lengths - self.prompt_lengths)[list(conversations)].sum())

    def tokens(self, conversation: int) -> NDArray[np.int32]:
        begin, end = self.offsets[conversation : conversation + 2]
        return np.asarray(self._tokens[begin:end])

    def sample_features(self, rows: int, seed: int) -> Tensor:
        """[<= rows, F] of tokens here and there, no first token of a conversation among them."""
        wanted = np.random.default_rng(seed).integers(len(self._tokens), size=rows)
        kept = np.setdiff1d(wanted, self.offsets)
        return _bf16(self._features[kept])

    def batch(self, conversations: Sequence[int]) -> Batch:
        lengths = self.lengths[list(conversations)]
        size, width = (len(conversations), int(lengths.max())), self._features.shape[1]
        tokens = np.zeros(size, np.int64)
        features = np.zeros((*size, width), np.uint16)
        labels = np.full(size, -1, np.int64)
        is_known, is_answer = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
        rows: list[Int64] = []
        for place, conversation in enumerate(conversations):
            begin, end = self.offsets[conversation : conversation + 2]
            length, prompt = end - begin, int(self.prompt_lengths[conversation])
            tokens[place, :length] = self._tokens[begin:end]
            features[place, 1:length] = self._features[begin : end - 1]
            labels[place, : length - 1] = self._label(tokens[place, 1:length])
            is_known[place, : length - 1] = True
            is_answer[place, prompt - 1 : length - 1] = True
            rows.append(np.arange(begin, end - 1))
        flat = np.concatenate(rows)
        return Batch(
            torch.from_numpy(tokens),
            _bf16(features),
            torch.from_numpy(labels),
            torch.from_numpy(is_known),
            torch.from_numpy(is_answer),
            torch.from_numpy(self._ids[flat].astype(np.int64)),
            torch.from_numpy(self._shares[flat].astype(np.float32)),
        )

    def _label(self, tokens: NDArray[np.int64]) -> Int64:
        place = np.searchsorted(self.vocabulary, tokens).clip(max=len(self.vocabulary) - 1)
        return np.where(self.vocabulary[place] == tokens, place, -1)

    def epochs(self, batch_tokens: int, seed: int) -> Iterator[list[int]]:
        """Batches of conversations to train on, without end; each epoch in another order."""
        epoch = 0
        while True:
            rng = random.Random(f"{seed}:{epoch}")
            order = self.conversations(held_out=False)
            rng.shuffle(order)
            batches = list(self.batches(order, batch_tokens))
            rng.shuffle(batches)
            yield from batches
            epoch += 1

    def batches(self, order: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
        """Conversations of like length, at most `batch_tokens` with the padding, or one of them."""
        lengths = self.lengths
        for start in range(0, len(order), _WINDOW):
            window = sorted(order[start : start + _WINDOW], key=lambda c: (int(lengths[c]), c))
            batch: list[int] = []
            for conversation in window:
                if batch and (len(batch) + 1) * int(lengths[conversation]) > batch_tokens:
                    yield batch
                    batch = []
                batch.append(conversation)
            if batch:
                yield batch


def _bf16(bits: NDArray[np.uint16]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16)
