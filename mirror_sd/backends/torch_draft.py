"""The draft head in torch: in fp32, one sequence at a time where attention is concerned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from mirror_sd.backends import batch_check, draft_fit
from mirror_sd.backends.protocol import DraftBatch, Float32, Int32
from mirror_sd.backends.torch_backend import TorchBackend
from mirror_sd.philox import GREEDY_BELOW, gumbel
from mirror_sd.uir.draft_file import DraftProgram
from mirror_sd.uir.rope import plain_frequencies

# Candidates of a draw: the noise of the others hardly ever reaches them.
_CANDIDATES = 512


@dataclass(frozen=True, slots=True)
class _Rows:
    """Tokens of one pass. indexes: [rows] those that are drafted from; sequences: [rows] of which
    sequence each is."""

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    indexes: list[int]
    sequences: list[int]


class TorchDraftHead:
    """`draft` raises `ValueError` on a bad batch and leaves the cache as it was. The constructor
    raises `UnsupportedModel` for a draft that does not fit the target."""

    def __init__(self, program: DraftProgram, target: TorchBackend) -> None:
        spec, of = program.spec, target.capabilities
        draft_fit.check(spec, of)
        self._spec = spec
        self._target = target.decoder
        self._device = target.device
        self._max_context = of.max_context
        self._token_ids = program.token_ids.astype(np.int64)
        self._weights = {
            name: torch.from_numpy(np.array(values, np.float32)).to(self._device)
            for name, values in program.weights.items()
        }
        frequencies = plain_frequencies(spec.rope_theta, spec.head_dim)
        self._frequencies = torch.from_numpy(frequencies).to(self._device)
        self._num_blocks = self._block_size = 0
        self._cache = torch.empty(0)

    @property
    def taps(self) -> tuple[int, ...]:
        return self._spec.taps

    def kv_bytes_per_block(self, block_size: int) -> int:
        return 2 * 4 * self._spec.num_kv_heads * self._spec.head_dim * block_size

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"cannot allocate {num_blocks} blocks of {block_size} tokens")
        shape = (2, num_blocks * block_size, self._spec.num_kv_heads, self._spec.head_dim)
        self._cache = torch.zeros(shape, device=self._device)
        self._num_blocks, self._block_size = num_blocks, block_size

    def draft(self, batch: DraftBatch) -> tuple[Int32, Float32]:
        batch_check.check_draft(
            batch,
            vocab_size=self._spec.vocab_size,
            max_context=self._max_context,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            feature_size=len(self._spec.taps) * self._spec.hidden_size,
        )
        shape = len(batch.block_tables), int(batch.steps.max())
        tokens, probabilities = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
        products = np.ones(shape[0], np.float32)
        rows = self._first_rows(batch)
        with torch.inference_mode():
            features = torch.from_numpy(np.array(batch.features, np.float32)).to(self._device)
            states = functional.linear(features, self._weights["fuse_features"])
            for depth in range(shape[1] + 1):
                outputs = self._layer(batch, rows, states)
                onward = []
                for row, choice in enumerate(self._choices(batch, rows, outputs)):
                    sequence = rows.sequences[row]
                    if choice is None or not (
                        products[sequence] * choice[1] >= batch.floors[sequence]
                    ):
                        continue
                    products[sequence] *= choice[1]
                    tokens[sequence, depth], probabilities[sequence, depth] = choice
                    if depth + 1 < batch.steps[sequence]:
                        onward.append(row)
                if not onward:
                    break
                rows = self._next_rows(batch, rows, onward, tokens[:, depth])
                states = outputs[onward]
        return tokens, probabilities

    def _first_rows(self, batch: DraftBatch) -> _Rows:
        ends = batch.sequence_offsets[1:]
        drafting = [i for i, steps in enumerate(batch.steps) if steps > 0]
        of_row = np.repeat(np.arange(len(ends)), np.diff(batch.sequence_offsets))
        positions = batch.positions.astype(np.int64)
        slots = [
            self._slots(batch.block_tables[i], positions[of_row == i]) for i in range(len(ends))
        ]
        return _Rows(
            token_ids=batch.token_ids.astype(np.int64),
            positions=positions,
            slots=np.concatenate(slots),
            indexes=[int(ends[i]) - 1 for i in drafting],
            sequences=drafting,
        )

    def _next_rows(
        self, batch: DraftBatch, rows: _Rows, onward: list[int], drafted: Int32
    ) -> _Rows:
        sequences = [rows.sequences[row] for row in onward]
        positions = rows.positions[[rows.indexes[row] for row in onward]] + 1
        slots = [
            self._slots(batch.block_tables[sequence], positions[i : i + 1])
            for i, sequence in enumerate(sequences)
        ]
        return _Rows(
            token_ids=drafted[sequences].astype(np.int64),
            positions=positions,
            slots=np.concatenate(slots),
            indexes=list(range(len(onward))),
            sequences=sequences,
        )

    def _slots(self, table: Int32, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        blocks = table[positions // self._block_size].astype(np.int64)
        return blocks * self._block_size + positions % self._block_size

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self._weights[name]
        return functional.rms_norm(x, (x.shape[-1],), weight, self._spec.rms_eps)

    def _project(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self._weights[name])

    def _layer(self, batch: DraftBatch, rows: _Rows, states: Tensor) -> Tensor:
        """The layer's outputs [len(rows.indexes), hidden]; keys and values of all rows."""
        spec = self._spec
        embedded = self._target.embed(torch.from_numpy(rows.token_ids).to(self._device))
        inputs = (self._norm("embedding_norm", embedded), self._norm("feature_norm", states))
        x = self._project("fuse_input", torch.cat(inputs, dim=1))
        h = self._norm("attention_norm", x)
        angles = torch.from_numpy(rows.positions).to(self._device).float()[:, None]
        angles = (angles * self._frequencies)[:, None]
        keys = self._rotated(
            self._project("k", h).view(-1, spec.num_kv_heads, spec.head_dim), angles
        )
        values = self._project("v", h).view(-1, spec.num_kv_heads, spec.head_dim)
        slots = torch.from_numpy(rows.slots).to(self._device)
        self._cache[0].index_copy_(0, slots, keys)
        self._cache[1].index_copy_(0, slots, values)
        x, h, angles = x[rows.indexes], h[rows.indexes], angles[rows.indexes]
        queries = self._project("q", h).view(-1, spec.num_heads, spec.head_dim)
        queries = self._rotated(queries, angles)
        mixed = [
            self._attend(queries[row], batch.block_tables[sequence], rows.positions[index])
            for row, (index, sequence) in enumerate(zip(rows.indexes, rows.sequences, strict=True))
        ]
        if not mixed:
            return x
        x = x + self._project("o", torch.stack(mixed))
        h = self._norm("mlp_norm", x)
        gated = functional.silu(self._project("gate", h)) * self._project("up", h)
        return x + self._project("down", gated)

    def _rotated(self, heads: Tensor, angles: Tensor) -> Tensor:
        first, second = heads.chunk(2, dim=-1)
        cosines, sines = angles.cos(), angles.sin()
        turned = (first * cosines - second * sines, second * cosines + first * sines)
        return torch.cat(turned, dim=-1)

    def _attend(self, queries: Tensor, table: Int32, position: int) -> Tensor:
        """[heads * head_dim] of one token."""
        places = np.arange(int(position) + 1, dtype=np.int64)
        slots = torch.from_numpy(self._slots(table, places)).to(self._device)
        keys, values = self._cache.index_select(1, slots).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            queries[None, :, None], keys[None], values[None], enable_gqa=True
        )
        return mixed.reshape(-1)

    def _choices(
        self, batch: DraftBatch, rows: _Rows, outputs: Tensor
    ) -> list[tuple[int, float] | None]:
        """A token and its probability from each row; none from logits that are no numbers."""
        if not rows.indexes:
            return []
        logits = self._project("head", self._norm("final_norm", outputs)).cpu().numpy()
        choices: list[tuple[int, float] | None] = []
        for row, (index, sequence) in enumerate(zip(rows.indexes, rows.sequences, strict=True)):
            if not np.isfinite(logits[row].max()):
                choices.append(None)
                continue
            temperature = float(batch.temperatures[sequence])
            is_greedy = not temperature >= GREEDY_BELOW or not np.isfinite(temperature)
            scores = logits[row].astype(np.float64) / (1.0 if is_greedy else temperature)
            best = int(scores.argmax())
            if not is_greedy:
                best = self._drawn(
                    scores, int(batch.seeds[sequence]), int(rows.positions[index]) + 1
                )
            weights = np.exp(scores - scores.max())
            choices.append((int(self._token_ids[best]), float(weights[best] / weights.sum())))
        return choices

    def _drawn(self, scores: NDArray[np.float64], seed: int, position: int) -> int:
        count = min(_CANDIDATES, len(scores))
        candidates = np.argpartition(-scores, count - 1)[:count]
        candidates.sort()
        noise = gumbel(seed, position, self._token_ids[candidates])
        return int(candidates[(scores[candidates] + noise).argmax()])
