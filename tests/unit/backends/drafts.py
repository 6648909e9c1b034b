"""Random draft heads, and what mirror_sd/uir/draft_file.py says they compute, in plain numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mirror_sd.backends.protocol import DraftBatch, DraftHead, Float32, Int32
from mirror_sd.philox import gumbel
from mirror_sd.uir.draft_file import (
    MATRICES,
    VECTORS,
    DraftProgram,
    DraftSpec,
    Precision,
    dequantise,
    quantise,
)
from mirror_sd.uir.rope import plain_frequencies

# No size a multiple of a vector, a strip of outputs or a group of inputs.
ODD = DraftSpec(
    target="random",
    tokenizer="",
    vocab_size=75,
    hidden_size=52,
    intermediate_size=45,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    rope_theta=10000.0,
    rms_eps=1e-5,
    taps=(1, 2),
    draft_vocab_size=41,
    precision="fp32",
)


def random_draft(spec: DraftSpec = ODD, seed: int = 11) -> DraftProgram:
    random = np.random.default_rng(seed)
    weights: dict[str, Float32] = {}
    for name, shape in spec.shapes().items():
        if name in VECTORS:
            values = random.normal(1.0, 0.3, shape)
        else:
            values = random.normal(0.0, 1.5 / np.sqrt(shape[1]), shape)
        weights[name] = values.astype(np.float32)
        if spec.precision == "int8" and name in MATRICES:
            weights[name] = dequantise(*quantise(weights[name]))
    ids = random.permutation(spec.vocab_size)[: spec.draft_vocab_size]
    return DraftProgram(spec, np.sort(ids).astype(np.int32), weights)


def of_precision(precision: Precision, spec: DraftSpec = ODD) -> DraftProgram:
    return random_draft(replace(spec, precision=precision))


class PlainDraft:
    """embedding: [vocab, hidden] of the target."""

    def __init__(self, program: DraftProgram, embedding: Float32) -> None:
        self.spec, self.weights, self.ids = program.spec, program.weights, program.token_ids
        self.embedding = embedding

    def draft(
        self,
        token_ids: Int32,
        features: Float32,
        steps: int,
        *,
        floor: float = 0.0,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> tuple[list[int], list[float]]:
        """Of one sequence from its first token on; each step computes everything anew."""
        states = list(features @ self.weights["fuse_features"].T)
        tokens, drafted, probabilities = list(token_ids), [], []
        for _ in range(steps):
            output = self._layer(np.array(tokens), np.array(states))[-1]
            logits = self.weights["head"] @ self._norm("final_norm", output)
            scores = logits.astype(np.float64) / (temperature or 1.0)
            noise = gumbel(seed, len(tokens), self.ids.astype(np.int64)) if temperature else 0.0
            best = int((scores + noise).argmax())
            weights = np.exp(scores - scores.max())
            probability = float(weights[best] / weights.sum())
            if np.prod([*probabilities, probability]) < floor:
                break
            drafted.append(int(self.ids[best]))
            probabilities.append(probability)
            tokens.append(drafted[-1])
            states.append(output)
        return drafted, probabilities

    def _layer(self, tokens: Int32, states: Float32) -> Float32:
        spec = self.spec
        embedded = self._norm("embedding_norm", self.embedding[tokens])
        x = self._project("fuse_input", np.hstack([embedded, self._norm("feature_norm", states)]))
        h = self._norm("attention_norm", x)
        q = self._rotate(self._project("q", h).reshape(len(x), spec.num_heads, -1))
        k = self._rotate(self._project("k", h).reshape(len(x), spec.num_kv_heads, -1))
        v = self._project("v", h).reshape(len(x), spec.num_kv_heads, -1)
        shared = spec.num_heads // spec.num_kv_heads
        k, v = np.repeat(k, shared, axis=1), np.repeat(v, shared, axis=1)
        scores = np.einsum("nhd,thd->hnt", q, k) / np.sqrt(spec.head_dim)
        scores[:, np.triu(np.ones((len(x), len(x)), bool), 1)] = -np.inf
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        x = x + self._project("o", np.einsum("hnt,thd->nhd", scores, v).reshape(len(x), -1))
        h = self._norm("mlp_norm", x)
        gate = self._project("gate", h)
        gated = gate / (1 + np.exp(-gate)) * self._project("up", h)
        return np.asarray(x + self._project("down", gated))

    def _project(self, name: str, x: Float32) -> Float32:
        return np.asarray(x @ self.weights[name].T)

    def _norm(self, name: str, x: Float32) -> Float32:
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(mean_square + self.spec.rms_eps) * self.weights[name])

    def _rotate(self, x: Float32) -> Float32:
        angles = np.arange(len(x))[:, None, None] * plain_frequencies(
            self.spec.rope_theta, self.spec.head_dim
        )
        first, second = np.split(x, 2, axis=-1)
        cosines, sines = np.cos(angles), np.sin(angles)
        return np.concatenate(
            [first * cosines - second * sines, second * cosines + first * sines], axis=-1
        )


class Story:
    """One sequence: all its tokens, the features of the token before each, its block table."""

    def __init__(self, length: int, table: Sequence[int], spec: DraftSpec = ODD, seed: int = 0):
        random = np.random.default_rng(seed)
        self.ids = random.integers(0, spec.vocab_size, length).astype(np.int32)
        shape = (length, len(spec.taps) * spec.hidden_size)
        self.features = random.normal(0, 3, shape).astype(np.float32)
        self.features[0] = 0
        self.table = np.array(table, np.int32)


def draft_batch(
    parts: Sequence[tuple[Story, int, int]],
    steps: Sequence[int] | int = 4,
    *,
    floors: Sequence[float] | float = 0.0,
    temperatures: Sequence[float] | float = 0.0,
    seeds: Sequence[int] | int = 0,
) -> DraftBatch:
    """parts: (story, first token, end) of each sequence."""

    def spread(values: object, dtype: type) -> np.ndarray:
        return np.broadcast_to(np.array(values, dtype), len(parts)).copy()

    counts = [end - first for _, first, end in parts]
    return DraftBatch(
        token_ids=np.concatenate([s.ids[first:end] for s, first, end in parts]),
        positions=np.concatenate(
            [np.arange(first, end, dtype=np.int32) for _, first, end in parts]
        ),
        sequence_offsets=np.cumsum([0, *counts]).astype(np.int32),
        block_tables=tuple(s.table for s, _, _ in parts),
        features=np.concatenate([s.features[first:end] for s, first, end in parts]),
        steps=spread(steps, np.int32),
        floors=spread(floors, np.float32),
        temperatures=spread(temperatures, np.float32),
        seeds=spread(seeds, np.uint64),
    )


def check_drafts(head: DraftHead, plain: PlainDraft) -> None:
    """Drafts and chances of a ragged batch are those of plain numpy."""
    stories = [Story(20 + 3 * i, range(4 * i, 4 * i + 4), seed=i) for i in range(6)]
    steps, temperatures = [5, 0, 3, 5, 1, 4], [0.0, 0.0, 1.0, 0.4, 0.0, 2.0]
    head.draft(draft_batch([(s, 0, 9) for s in stories], 7))
    tokens, chances = head.draft(
        draft_batch(
            [(s, 9, len(s.ids)) for s in stories],
            steps,
            temperatures=temperatures,
            seeds=list(range(6)),
            floors=[0, 0, 0, 0.01, 0, 0],
        )
    )
    assert head.taps == ODD.taps
    for i, story in enumerate(stories):
        expected, probabilities = plain.draft(
            story.ids,
            story.features,
            steps[i],
            temperature=temperatures[i],
            seed=i,
            floor=0.01 if i == 3 else 0,
        )
        count = len(expected)
        assert tokens[i, :count].tolist() == expected
        assert np.allclose(chances[i, :count], probabilities, atol=1e-4)
        assert (tokens[i, count:] == -1).all() and not chances[i, count:].any()
