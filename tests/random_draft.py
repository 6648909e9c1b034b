"""Draft heads with random weights: right about nothing, so that what they may not change shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mirror_sd.model_store import ModelFiles
from mirror_sd.uir import draft_file, program, tokenizer_files
from mirror_sd.uir.draft_file import VECTORS, DraftProgram, DraftSpec


def spec_for(files: ModelFiles, scratch: Path, **changes: Any) -> DraftSpec:
    """A spec that fits the model; its tokenizer is laid out in `scratch`."""
    tokenizer_files.export(files, scratch)
    target = program.read_spec(files)
    fitting: dict[str, Any] = {
        "target": files.name,
        "tokenizer": draft_file.tokenizer_digest(scratch / tokenizer_files.TOKENIZER),
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 2 * target.hidden_size,
        "num_heads": target.num_heads,
        "num_kv_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rope_theta": 10_000.0,
        "rms_eps": 1e-5,
        "taps": (target.num_layers,),
        "draft_vocab_size": min(512, target.vocab_size),
        "precision": "int8",
    }
    return DraftSpec(**{**fitting, **changes})


def program_of(spec: DraftSpec, seed: int = 5, certainty: float = 1.0) -> DraftProgram:
    """Its logits have a deviation of `certainty`: at 1 no token is likely, at 12 one is."""
    random = np.random.default_rng(seed)
    weights = {
        name: (
            np.ones(shape, np.float32)
            if name in VECTORS
            else random.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
        )
        for name, shape in spec.shapes().items()
    }
    weights["head"] = weights["head"] * np.float32(certainty)
    step = spec.vocab_size // spec.draft_vocab_size
    return DraftProgram(spec, np.arange(spec.draft_vocab_size, dtype=np.int32) * step, weights)
