"""The fallback: any causal language model that transformers can load. Slow, and it says so.

It keeps token ids in the "KV" slots, rebuilds each sequence from its block table and runs it whole,
alone and without a cache, so it fits the protocol with any architecture and no row can depend on
another sequence.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from mirror_sd.backends import batch_check
from mirror_sd.backends.protocol import Capabilities, Float32, Int32, RaggedBatch
from mirror_sd.backends.untapped import Untapped
from mirror_sd.errors import ModelError
from mirror_sd.model_store import ModelFiles

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length")
TOKEN_BYTES = 4


class TransformersBackend(Untapped):
    """Raises `ModelError` if transformers cannot load the model."""

    def __init__(
        self, files: ModelFiles, device: str, precision: str, max_context: int | None
    ) -> None:
        self._model = _load(files, DTYPES[precision]).to(device).eval()
        config = self._model.config.get_text_config()
        context = _context(config, files) if max_context is None else max_context
        self._device = device
        self._slots = np.zeros((0, 0), np.int32)
        self._capabilities = Capabilities(
            name="transformers",
            device=device,
            precision=precision,
            vocab_size=int(config.vocab_size),
            max_context=min(context, _context(config, files)),
            bit_stable=False,
            detail="slow fallback: every step runs the whole sequence again, without a KV cache",
        )
        log.warning("%s runs in the slow fallback through transformers, uncached", files.name)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def kv_bytes_per_block(self, block_size: int) -> int:
        return TOKEN_BYTES * block_size

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        batch_check.check_cache(num_blocks, block_size)
        self._slots = np.zeros((num_blocks, block_size), np.int32)

    def forward(self, batch: RaggedBatch) -> Float32:
        num_blocks, block_size = self._slots.shape
        batch_check.check(
            batch,
            vocab_size=self._capabilities.vocab_size,
            max_context=self._capabilities.max_context,
            num_blocks=num_blocks,
            block_size=block_size,
        )
        logits = np.empty((len(batch.logit_rows), self._capabilities.vocab_size), np.float32)
        tokens = [self._remember(batch, index) for index in range(len(batch.block_tables))]
        for index, sequence in enumerate(tokens):
            begin, end = batch.sequence_offsets[index], batch.sequence_offsets[index + 1]
            places = np.flatnonzero((batch.logit_rows >= begin) & (batch.logit_rows < end))
            if len(places):
                wanted = batch.positions[batch.logit_rows[places]]
                logits[places] = self._logits(sequence, wanted)
        return logits

    def _remember(self, batch: RaggedBatch, index: int) -> Int32:
        """Write the new ids of a sequence into its slots; return all its ids so far."""
        block_size = self._slots.shape[1]
        begin, end = batch.sequence_offsets[index], batch.sequence_offsets[index + 1]
        positions, table = batch.positions[begin:end], batch.block_tables[index]
        self._slots[table[positions // block_size], positions % block_size] = batch.token_ids[
            begin:end
        ]
        context = int(positions[-1]) + 1
        blocks = table[: -(-context // block_size)]
        return self._slots[blocks].reshape(-1)[:context]

    def _logits(self, tokens: Int32, positions: Int32) -> Float32:
        ids = torch.from_numpy(tokens.astype(np.int64))[None].to(self._device)
        with torch.inference_mode():
            every: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
            rows: Float32 = (
                every[torch.from_numpy(positions.astype(np.int64))].float().cpu().numpy()
            )
            return rows


def _load(files: ModelFiles, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    directory, options = files.path, {}
    if files.format == "gguf":
        directory, options = files.path.parent, {"gguf_file": files.path.name}
    try:
        return AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=dtype, local_files_only=True, trust_remote_code=False, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ModelError(f"transformers cannot load {files.path}: {reason}") from error


def _context(config: Any, files: ModelFiles) -> int:
    for key in CONTEXT_KEYS:
        value = getattr(config, key, None)
        if isinstance(value, int):
            return value
    raise ModelError(f"{files.path}: config.json does not say how long a context may be")
