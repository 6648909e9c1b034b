"""A head and a data set small enough to train in a second."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from mirror_sd.training.dataset import Dataset
from mirror_sd.training.draft_model import DraftModel
from mirror_sd.uir.draft_file import DraftSpec, Precision

VOCABULARY, HIDDEN, DRAFT_VOCABULARY, CANDIDATES = 96, 64, 40, 8


def spec(precision: Precision = "fp32") -> DraftSpec:
    return DraftSpec(
        target="tiny",
        tokenizer="0" * 64,
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=80,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=10000.0,
        rms_eps=1e-5,
        taps=(1, 2),
        draft_vocab_size=DRAFT_VOCABULARY,
        precision=precision,
    )


def model(seed: int = 0) -> DraftModel:
    """Random weights, and a feature scale that is not all ones and leaves one feature out."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(2 * HIDDEN, generator=generator) + 0.5
    scale[3] = 0.0
    made = DraftModel(spec(), torch.randn(VOCABULARY, HIDDEN, generator=generator), scale)
    with torch.no_grad():
        for _, parameter in made.named_parameters():
            wide = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(wide + 1.0 if parameter.dim() == 1 else wide)
    return made


def dataset(directory: Path, conversations: int = 24, seed: int = 0) -> Dataset:
    """Answers in which each token follows from the one before, so that there is much to learn."""
    rng = np.random.default_rng(seed)
    vocabulary = np.sort(rng.choice(VOCABULARY, DRAFT_VOCABULARY, replace=False)).astype(np.int32)
    lengths = rng.integers(10, 24, size=conversations)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    places = np.zeros(total, np.int64)
    for begin, end in pairwise(offsets):
        places[begin] = rng.integers(DRAFT_VOCABULARY)
        for row in range(begin + 1, end):
            places[row] = (3 * places[row - 1] + 1) % DRAFT_VOCABULARY
    ids = rng.integers(DRAFT_VOCABULARY, size=(total, CANDIDATES)).astype(np.uint16)
    ids[:-1, 0] = places[1:]
    shares = np.full((total, CANDIDATES), 0.2 / (CANDIDATES - 1), np.float16)
    shares[:, 0] = 0.8
    features = torch.randn(total, 2 * HIDDEN, generator=torch.Generator().manual_seed(seed))
    bits = features.bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.save(directory / "tokens.npy", vocabulary[places])
    np.save(directory / "features.npy", bits)
    np.save(directory / "ids.npy", ids)
    np.save(directory / "shares.npy", shares)
    np.savez(
        directory / "index.npz",
        offsets=offsets,
        prompt_lengths=np.full(conversations, 4),
        held_out=np.arange(conversations) % 5 == 0,
        languages=np.array(["en", "zh"] * conversations)[:conversations],
        vocabulary=vocabulary,
    )
    return Dataset(directory)
