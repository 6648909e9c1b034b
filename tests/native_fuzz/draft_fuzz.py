"""Random draft heads and batches, right and wrong, and forwards of their targets: a draft fills its
tokens and probabilities, or raises TypeError or ValueError.
`python -m tests.native_fuzz.draft_fuzz SECONDS [SEED]`"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

if __name__ == "__main__":
    from tests.native_fuzz import sanitized  # noqa: F401
from mirror_sd import _native
from tests.native_fuzz.arrays import floats, misshapen
from tests.native_fuzz.decoder_fuzz import FORMATS, ODD, PROMISED, Fuzz, Shape, main

ODD_FLOATS = (0.0, 1e-30, 1e-6, 0.3, 1.0, 50.0, 1e38, np.inf, np.nan, -1.0)


class DraftFuzz(Fuzz):
    """The target is sometimes left without weights: then the head must be refused."""

    def open_draft(self) -> tuple[_native.Decoder, _native.DraftHead, Shape, Shape]:
        target, of = self.open()
        rng, shape = self.rng, Shape.draw(self.rng)
        shape.vocab, shape.hidden, shape.max_context = of.vocab, of.hidden, of.max_context
        count = int(rng.integers(1, of.vocab + 1))
        self.ids = np.sort(rng.permutation(of.vocab)[:count]).astype(np.int32)
        if self.chance(0.02):
            self.ids[rng.integers(count)] = int(rng.choice(ODD[:-1]))
        self.width = int(rng.integers(1, 4)) * of.hidden
        head = _native.DraftHead(
            target,
            feature_size=self.size(self.width),
            token_ids=self.ids if self.chance(0.98) else misshapen(rng, self.ids),
            intermediate_size=self.size(shape.inner),
            heads=self.size(shape.heads),
            kv_heads=self.size(shape.kv_heads),
            head_dim=self.size(shape.head_dim),
            rms_eps=1e-5,
            frequencies=rng.random(shape.head_dim // 2 + self.chance(0.01)).astype(np.float32),
            cache=str(rng.choice(("bf16", "fp32", "int8"))),
        )
        self.fill_draft(head, shape)
        return target, head, of, shape

    def fill_draft(self, head: _native.DraftHead, shape: Shape) -> None:
        padded = shape.inner + -shape.inner % 64
        query, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        hidden = shape.hidden
        matrices = {
            "fuse_features": (hidden, self.width),
            "fuse_input": (hidden, 2 * (hidden + -hidden % 64)),
            "qkv": (query + 2 * keys, hidden),
            "output": (hidden, query),
            "gate_up": (2 * padded, hidden),
            "down": (hidden, shape.inner),
            "head": (len(self.ids), hidden),
        }
        for role, (outputs, inputs) in matrices.items():
            self.set_draft_matrix(head, role, outputs, inputs)
        for name in ("embedding_norm", "feature_norm", "attention_norm", "mlp_norm", "final_norm"):
            size = hidden + self.chance(0.003)
            head.set_vector(name, self.rng.normal(1, 0.3, size).astype(np.float32))
        if self.chance(0.98):
            head.seal()

    def set_draft_matrix(
        self, head: _native.DraftHead, role: str, outputs: int, inputs: int
    ) -> None:
        form = str(self.rng.choice(FORMATS))
        outputs += self.chance(0.003)
        weights = self.rng.normal(0, 0.3, (outputs, inputs)).astype(np.float32)
        packed = np.zeros(_native.packed_bytes(form, outputs, inputs), np.uint8)
        multiplier = _native.pack(weights, form, 1, packed)
        if self.chance(0.01):
            packed = misshapen(self.rng, packed)
        head.set_matrix(role, packed, outputs, inputs, multiplier, form)

    def draft_batch(self, of: Shape, blocks: int, block_size: int) -> list[Any]:
        """What `draft` takes; drafted positions may lie beyond tables and context."""
        rng = self.rng
        ids, positions, offsets, tables, *_ = self.batch(of, blocks, block_size)
        sequences = len(tables)
        most = int(rng.choice([0, 1, 2, 9, 40]))
        steps = rng.integers(0, most + 1, sequences).astype(np.int32)
        if self.chance(0.7):  # no more than there is room for
            lasts = positions[offsets[1:] - 1]
            room = np.array([len(table) * block_size for table in tables])
            steps = np.minimum(steps, np.minimum(room, of.max_context) - lasts).astype(np.int32)
        features = rng.normal(0, 3, (len(ids), self.width)).astype(np.float32)
        if self.chance(0.2):
            features = floats(rng, *features.shape)
        shape = sequences, most + int(rng.integers(0, 2))
        return [
            *(ids, positions, offsets, tables, features, steps),
            rng.choice((0.0, 0.0, 0.1, np.nan, -1.0), sequences).astype(np.float32),
            rng.choice(ODD_FLOATS, sequences).astype(np.float32),
            rng.integers(0, 2**64, sequences, dtype=np.uint64),
            np.full(shape, -7, np.int32),
            np.full(shape, -7, np.float32),
        ]

    def spoil_draft(self, batch: list[Any]) -> None:
        """One mistake, of value or of type."""
        at = int(self.rng.integers(len(batch)))
        if at < 4:
            unused = np.zeros(1, np.int32)  # of a forward's arguments, for `spoil`
            head = [*batch[:4], unused, unused]
            self.spoil(head)
            batch[:4] = head[:4]
        elif at == 5 and self.chance(0.6):
            batch[5][self.rng.integers(len(batch[5]))] = int(self.rng.choice([*ODD[:-1], 500]))
        else:
            batch[at] = misshapen(self.rng, batch[at])

    def check(self, batch: list[Any]) -> None:
        steps, tokens, chances = batch[5], batch[9], batch[10]
        for row, most in enumerate(steps):
            count = int((tokens[row] >= 0).sum())
            assert count <= most and np.isin(tokens[row, :count], self.ids).all()
            assert ((chances[row, :count] >= 0) & (chances[row, :count] <= 1.0001)).all()
            assert (tokens[row, count:] == -1).all() and not chances[row, count:].any()

    def run(self, ends: Counter[str]) -> None:
        target, head, of, shape = self.open_draft()
        blocks = int(self.rng.integers(1, 30))
        block_size = int(self.rng.choice([1, 4, 16, 17, 64]))
        if self.chance(0.97):
            head.kv_bytes_per_block(self.size(block_size))
            head.allocate_kv(blocks, block_size)
            target.allocate_kv(blocks, block_size)
        for _ in range(12):
            try:
                if self.chance(0.02):
                    self.set_draft_matrix(head, "down", shape.hidden + 1, shape.inner)
                if self.chance(0.1):
                    target.forward(*self.batch(of, blocks, block_size))
                batch = self.draft_batch(of, blocks, block_size)
                if self.chance(0.5):
                    self.spoil_draft(batch)
                head.draft(*batch)
                self.check(batch)
                ends["draft"] += 1
            except PROMISED as error:
                ends[type(error).__name__] += 1


if __name__ == "__main__":
    main(DraftFuzz, "draft")
