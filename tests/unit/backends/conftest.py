"""Models for the back-end tests: the real default one, and tiny random ones of each family."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from mirror_sd import model_store, openmp
from mirror_sd.backends.protocol import Backend, RaggedBatch
from mirror_sd.errors import ModelError
from mirror_sd.model_store import ModelFiles
from mirror_sd.uir import tokenizer_files

# Before torch is imported: other tests may share the cores.
os.environ.update(openmp.environment(len(os.sched_getaffinity(0))))

DEFAULT = "smollm2-135m-instruct"
SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="session")
def default_model() -> ModelFiles:
    try:
        return model_store.resolve(DEFAULT)
    except ModelError:
        return model_store.pull(DEFAULT, print)


@pytest.fixture(scope="session")
def tokenizer(default_model: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    target = tmp_path_factory.mktemp("tokenizer")
    tokenizer_files.export(default_model, target)
    return Tokenizer.from_file(str(target / "tokenizer.json"))


@pytest.fixture(scope="session")
def transformers_model(default_model: ModelFiles) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(default_model.path.parent), gguf_file=default_model.path.name, dtype=torch.float32
    ).eval()


@dataclass
class TinyModel:
    """A random-weight model in a directory, and transformers' view of it in fp32."""

    files: ModelFiles
    model: Any

    def logits(self, ids: np.ndarray) -> np.ndarray:
        import torch

        with torch.inference_mode():
            batch = torch.from_numpy(ids.astype(np.int64))[None]
            return self.model(batch).logits[0].float().numpy()


@pytest.fixture(scope="session")
def tiny_model(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., TinyModel]:
    """Make a model of a transformers configuration class, with options over `SIZES`."""

    def make(config_class: str, **options: Any) -> TinyModel:
        import torch
        import transformers

        torch.manual_seed(5)
        config = getattr(transformers, config_class)(**{**SIZES, **options})
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms of 1 and biases of 0 would hide a mix-up
                offset = 0.0 if name.endswith("bias") else 1.0
                torch.nn.init.normal_(parameter, offset, 0.2)
        directory: Path = tmp_path_factory.mktemp("tiny")
        model.save_pretrained(directory)
        return TinyModel(ModelFiles("tiny", directory, "safetensors"), model)

    return make


def run_whole(backend: Backend, ids: np.ndarray, block_size: int = 16) -> np.ndarray:
    """Logits of every position of one sequence in one forward."""
    blocks = -(-len(ids) // block_size)
    backend.allocate_kv(blocks, block_size)
    return backend.forward(
        RaggedBatch(
            token_ids=ids.astype(np.int32),
            positions=np.arange(len(ids), dtype=np.int32),
            sequence_offsets=np.array([0, len(ids)], np.int32),
            block_tables=(np.random.default_rng(3).permutation(blocks).astype(np.int32),),
            logit_rows=np.arange(len(ids), dtype=np.int32),
        )
    )


@pytest.fixture(scope="session")
def whole() -> Callable[..., np.ndarray]:
    return run_whole
