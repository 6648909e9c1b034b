"""The default model, and small GGUF files written by the gguf package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from mirror_sd import model_store
from mirror_sd.errors import ModelError
from mirror_sd.model_store import ModelFiles

DEFAULT = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def default_model() -> ModelFiles:
    try:
        return model_store.resolve(DEFAULT)
    except ModelError:
        return model_store.pull(DEFAULT, print)


class TinyGguf:
    """A one-layer model of the llama architecture, open to changes before it is written.

    Hidden 64, two query heads of 32 over one KV head, vocabulary of 40.
    """

    def __init__(self, architecture: str = "llama") -> None:
        random = np.random.default_rng(4)
        self.architecture = architecture
        self.fields: dict[str, Any] = {
            "block_count": 1,
            "context_length": 256,
            "embedding_length": 64,
            "feed_forward_length": 96,
            "attention.head_count": 2,
            "attention.head_count_kv": 1,
            "rope.freq_base": 10000.0,
            "attention.layer_norm_rms_epsilon": 1e-5,
        }
        shapes = {
            "token_embd.weight": (40, 64),
            "blk.0.attn_norm.weight": (64,),
            "blk.0.attn_q.weight": (64, 64),
            "blk.0.attn_k.weight": (32, 64),
            "blk.0.attn_v.weight": (32, 64),
            "blk.0.attn_output.weight": (64, 64),
            "blk.0.ffn_norm.weight": (64,),
            "blk.0.ffn_gate.weight": (96, 64),
            "blk.0.ffn_up.weight": (96, 64),
            "blk.0.ffn_down.weight": (64, 96),
            "output_norm.weight": (64,),
        }
        self.tensors = {
            name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()
        }
        self.kinds: dict[str, gguf.GGMLQuantizationType] = {}
        self.tokenizer: Callable[[gguf.GGUFWriter], None] = lambda writer: None

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.fields.items():
            name = f"{self.architecture}.{key}"
            if isinstance(value, str):
                writer.add_string(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            else:
                writer.add_uint32(name, value)
        self.tokenizer(writer)
        for name, values in self.tensors.items():
            kind = self.kinds.get(name)
            if kind is None:
                writer.add_tensor(name, values)
            else:
                writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


@pytest.fixture
def tiny_gguf() -> type[TinyGguf]:
    return TinyGguf
