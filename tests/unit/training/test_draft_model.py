"""The head in torch against the file's own description of it, written out in numpy."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from mirror_sd.training.draft_model import DraftModel
from mirror_sd.training.evaluation import Acceptance
from tests.unit.training import tiny

Array = NDArray[np.float64]


class NumpyHead:
    """`uir.draft_file`, token by token: keys and values are kept as drafting keeps them."""

    def __init__(self, model: DraftModel) -> None:
        with torch.no_grad():
            self.w = {k: v.double().numpy() for k, v in model.weights("fp32").items()}
        self.embedding = model.embedding.double().numpy()
        self.spec = model.spec
        self.keys: list[Array] = []
        self.values: list[Array] = []

    def norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean() + self.spec.rms_eps) * self.w[name]

    def turned(self, x: Array, position: int) -> Array:
        half = self.spec.head_dim // 2
        angles = position * self.spec.rope_theta ** -(np.arange(half) / half)
        a, b = x[:, :half], x[:, half:]
        c, s = np.cos(angles), np.sin(angles)
        return np.concatenate([a * c - b * s, b * c + a * s], axis=1)

    def step(self, token: int, feature: Array, position: int) -> Array:
        """The layer's output for a token; what lies at `position` and after is overwritten."""
        w, spec = self.w, self.spec
        normed = self.norm(self.embedding[token], "embedding_norm")
        both = np.concatenate([normed, self.norm(feature, "feature_norm")])
        x = w["fuse_input"] @ both
        h = self.norm(x, "attention_norm")
        q, k, v = ((w[n] @ h).reshape(-1, spec.head_dim) for n in ("q", "k", "v"))
        self.keys[position:] = [self.turned(k, position)]
        self.values[position:] = [v]
        q = self.turned(q, position)
        mixed = []
        for head in range(spec.num_heads):
            group = head // (spec.num_heads // spec.num_kv_heads)
            keys = np.array([key[group] for key in self.keys])
            values = np.array([value[group] for value in self.values])
            scores = keys @ q[head] / np.sqrt(spec.head_dim)
            weights = np.exp(scores - scores.max())
            mixed.append(weights / weights.sum() @ values)
        x = x + w["o"] @ np.concatenate(mixed)
        h = self.norm(x, "mlp_norm")
        gate = w["gate"] @ h
        return x + w["down"] @ (gate / (1 + np.exp(-gate)) * (w["up"] @ h))


def test_each_unrolled_step_is_what_drafting_token_by_token_gives() -> None:
    model = tiny.model()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(tiny.VOCABULARY, (2, 9), generator=generator)
    features = torch.randn(2, 9, 2 * tiny.HIDDEN, generator=generator)
    features[:, 0] = 0.0
    with torch.no_grad():
        states = list(model.unroll(model.weights("fp32"), tokens, features, steps=4))
    for sequence in range(2):
        ids = tokens[sequence].tolist()
        for last in range(len(ids)):
            head = NumpyHead(model)
            state = np.zeros(tiny.HIDDEN)
            for position in range(last + 1):
                known = features[sequence, position].double().numpy()
                state = head.step(ids[position], head.w["fuse_features"] @ known, position)
            for step in range(min(4, len(ids) - last)):
                if step:
                    state = head.step(ids[last + step], state, last + step)
                found = states[step][sequence, last + step].numpy()
                np.testing.assert_allclose(found, state, rtol=2e-4, atol=2e-4)


def test_padding_after_a_sequence_does_not_change_it() -> None:
    model = tiny.model()
    tokens = torch.randint(tiny.VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(2))
    features = torch.randn(1, 12, 2 * tiny.HIDDEN)
    with torch.no_grad():
        weights = model.weights("fp32")
        whole = list(model.unroll(weights, tokens, features, 3))
        short = list(model.unroll(weights, tokens[:, :7], features[:, :7], 3))
    for a, b in zip(whole, short, strict=True):
        torch.testing.assert_close(a[:, :7], b, rtol=1e-4, atol=1e-4)


def test_a_feature_of_scale_zero_is_left_out() -> None:
    weights = tiny.model().weights("int8")
    assert (weights["fuse_features"][:, 3] == 0).all()
    assert (weights["fuse_features"][:, 4] != 0).any()


def test_a_chain_counts_up_to_its_first_wrong_token_and_the_next_begins_after_it() -> None:
    # Rows: the token at a place, by the draft whose chain began 0, 1, 2 tokens earlier.
    ranks = np.array(
        [
            [0, 0, 1, 0, 0, 0],
            [9, 0, 0, 0, 1, 0],
            [9, 9, 0, 0, 0, 0],
        ],
        np.int8,
    )
    found = Acceptance(3)
    found.walk(ranks)
    # From 0: three right (0, 1, 2), then the target's own at 3; from 4: two right, the end.
    assert (found.rounds, found.tokens) == (2, 6)
    assert found.reached.tolist() == [2, 2, 1]
    assert found.accepted.tolist() == [2, 2, 1]
    assert found.row()["tokens_per_verify"] == 3.0
