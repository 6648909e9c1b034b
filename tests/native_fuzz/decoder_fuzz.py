"""Random decoders and batches, right and wrong: each forward fills finite logits or raises
TypeError or ValueError. `python -m tests.native_fuzz.decoder_fuzz SECONDS [SEED]`"""

from __future__ import annotations

import faulthandler
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

if __name__ == "__main__":
    from tests.native_fuzz import sanitized  # noqa: F401
from mirror_sd import _native
from tests.native_fuzz.arrays import misshapen

PROMISED = (TypeError, ValueError)
ODD = (0, -1, 1, 2**24, 2**24 + 1, 2**31 - 1, -(2**31), 2**31)
FORMATS = ("int8", "int16", "rotated", "bf16", "fp32")


@dataclass
class Shape:
    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int

    @staticmethod
    def draw(rng: np.random.Generator) -> Shape:
        kv_heads = int(rng.integers(1, 4))
        return Shape(
            vocab=int(rng.integers(1, 200)),
            hidden=int(rng.integers(1, 100)),
            inner=int(rng.integers(1, 100)),
            layers=int(rng.integers(1, 4)),
            heads=kv_heads * int(rng.integers(1, 5)),
            kv_heads=kv_heads,
            head_dim=2 * int(rng.integers(1, 40)),
            max_context=int(rng.integers(1, 400)),
        )

    def matrices(self) -> list[tuple[str, int, int, int]]:
        padded = self.inner + -self.inner % 64
        query = self.heads * self.head_dim
        listed = [("embedding", -1, self.vocab, self.hidden), ("head", -1, self.vocab, self.hidden)]
        for layer in range(self.layers):
            listed += [
                ("qkv", layer, query + 2 * self.kv_heads * self.head_dim, self.hidden),
                ("output", layer, self.hidden, query),
                ("gate_up", layer, 2 * padded, self.hidden),
                ("down", layer, self.hidden, self.inner),
            ]
        return listed

    def vectors(self, rng: np.random.Generator) -> list[tuple[str, int, int]]:
        listed = [("final_norm", -1, self.hidden)]
        optional = {
            "q_norm": self.head_dim,
            "k_norm": self.head_dim,
            "qkv_bias": (self.heads + 2 * self.kv_heads) * self.head_dim,
            "output_bias": self.hidden,
        }
        for layer in range(self.layers):
            listed += [("attention_norm", layer, self.hidden), ("mlp_norm", layer, self.hidden)]
            listed += [(n, layer, s) for n, s in optional.items() if rng.random() < 0.4]
        return listed


class Fuzz:
    """Keeps a decoder for some batches, so that errors between good forwards are met too."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def size(self, value: int, wrong: float = 0.01) -> int:
        return int(self.rng.choice(ODD)) if self.chance(wrong) else value

    def open(self) -> tuple[_native.Decoder, Shape]:
        rng, shape = self.rng, Shape.draw(self.rng)
        decoder = _native.Decoder(
            vocab_size=self.size(shape.vocab),
            hidden_size=self.size(shape.hidden),
            intermediate_size=self.size(shape.inner),
            layers=shape.layers if self.chance(0.99) else 0,
            heads=self.size(shape.heads),
            kv_heads=self.size(shape.kv_heads),
            head_dim=self.size(shape.head_dim),
            max_context=self.size(shape.max_context),
            rms_eps=1e-5,
            rope_scale=1.0,
            frequencies=rng.random(shape.head_dim // 2 + self.chance(0.01)).astype(np.float32),
            windows=[int(rng.choice([0, 0, 1, 7, 100])) for _ in range(shape.layers)],
            cache=str(rng.choice(("bf16", "fp32", "int8"))),
            isa=str(rng.choice([*_native.available_isas(), *_native.available_isas(), "sse9"])),
            threads=int(rng.integers(1, 5)),
            cores=_native.usable_cores(2) if self.chance(0.2) else [],
        )
        self.fill(decoder, shape)
        return decoder, shape

    def fill(self, decoder: _native.Decoder, shape: Shape) -> None:
        for role, layer, outputs, inputs in shape.matrices():
            self.set_matrix(decoder, role, layer, outputs, inputs)
        for role, layer, size in shape.vectors(self.rng):
            values = self.rng.normal(0, 1, size + self.chance(0.005)).astype(np.float32)
            decoder.set_vector(role, layer, values)
        if self.chance(0.98):
            decoder.seal()

    def set_matrix(
        self, decoder: _native.Decoder, role: str, layer: int, outputs: int, inputs: int
    ) -> None:
        form = str(self.rng.choice(FORMATS))
        outputs += self.chance(0.003)
        inputs += self.chance(0.003)
        weights = self.rng.normal(0, 0.3, (outputs, inputs)).astype(np.float32)
        packed = np.zeros(_native.packed_bytes(form, outputs, inputs), np.uint8)
        multiplier = _native.pack(weights, form, 1, packed)
        if self.chance(0.02):
            packed = misshapen(self.rng, packed)
        decoder.set_matrix(role, layer, packed, outputs, inputs, multiplier, form)

    def batch(self, shape: Shape, blocks: int, block_size: int) -> list[Any]:
        rng = self.rng
        positions, offsets, tables = [], [0], []
        order = rng.permutation(blocks)
        longest = min(shape.max_context, blocks * block_size)
        for _ in range(rng.integers(1, 5)):
            count = int(rng.integers(1, 1 + min(longest, rng.choice([1, 3, 40]))))
            start = int(rng.integers(0, longest - count + 1))
            positions += range(start, start + count)
            offsets.append(len(positions))
            needed = (start + count - 1) // block_size + 1
            # In turn, so that most batches write no block twice, which is refused.
            order = np.roll(order, -len(tables[-1]) if tables else 0)
            tables.append(np.resize(order, needed + rng.integers(0, 3)).astype(np.int32))
        total = len(positions)
        rows = np.flatnonzero(rng.random(total) < 0.4).astype(np.int32)
        ids = rng.integers(0, shape.vocab, total).astype(np.int32)
        logits = np.full((len(rows) + rng.integers(0, 3), shape.vocab), np.nan, np.float32)
        as_int32 = [np.array(values, np.int32) for values in (positions, offsets)]
        return [ids, *as_int32, tuple(tables), rows, logits]

    def taps(self, shape: Shape, tokens: int) -> list[Any]:
        """Taps and room for their features, at times wrong."""
        layers = [layer + 1 for layer in range(shape.layers) if self.chance(0.5)]
        if self.chance(0.1):
            layers.append(int(self.rng.choice(ODD)))
        features = np.full((tokens, len(layers) * shape.hidden), np.nan, np.float32)
        return [layers, misshapen(self.rng, features) if self.chance(0.1) else features]

    def spoil(self, batch: list[Any]) -> None:
        """One mistake, of value or of type."""
        rng, at = self.rng, int(self.rng.integers(6))
        if at == 3:
            tables = list(batch[3])
            index = int(rng.integers(len(tables)))
            match rng.integers(4):
                case 0:
                    tables.pop(index)
                case 1:
                    tables[index] = tables[index][: rng.integers(0, len(tables[index]) + 1)]
                case 2:
                    tables[index][rng.integers(len(tables[index]))] = int(rng.choice(ODD[:-1]))
                case _:
                    tables[index] = misshapen(rng, tables[index])
            batch[3] = tuple(tables) if self.chance(0.9) else tables
        elif at != 5 and self.chance(0.6) and batch[at].size:
            batch[at][rng.integers(batch[at].size)] = int(rng.choice([*ODD[:-1], 3, 50, 190]))
        else:
            batch[at] = misshapen(rng, batch[at])

    def run(self, ends: Counter[str]) -> None:
        decoder, shape = self.open()
        blocks = int(self.rng.integers(1, 30))
        block_size = int(self.rng.choice([1, 4, 16, 17, 64]))
        if self.chance(0.97):
            decoder.kv_bytes_per_block(self.size(block_size))
            decoder.allocate_kv(blocks, block_size)
        for _ in range(12):
            try:
                if self.chance(0.02):  # weights after the last one
                    role, layer, outputs, inputs = shape.matrices()[-1]
                    self.set_matrix(decoder, role, layer, outputs + 1, inputs)
                if self.chance(0.02):
                    decoder.set_vector("qkv_bias", 0, np.ones(3, np.float32))
                if self.chance(0.02):
                    decoder.seal()
                batch = self.batch(shape, blocks, block_size)
                if self.chance(0.5):
                    self.spoil(batch)
                taps = self.taps(shape, len(batch[0])) if self.chance(0.3) else []
                decoder.forward(*batch, *taps)
                assert not taps or not taps[0] or not np.isnan(taps[1]).any()
                rows = len(batch[4])
                assert not np.isnan(batch[5][:rows]).any(), "logits were not filled"
                assert np.isnan(batch[5][rows:]).all(), "rows that were not asked for were filled"
                ends["forward"] += 1
            except PROMISED as error:
                ends[type(error).__name__] += 1


def main(make: type[Fuzz], call: str) -> None:
    """SECONDS and SEED of the command line; `call`: how `Fuzz.run` counts what went through."""
    seconds = float(sys.argv[1])
    faulthandler.dump_traceback_later(4 * seconds + 120, exit=True)  # a call that hangs is an error
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns() % 2**32
    print("seed", seed, flush=True)
    fuzz = make(np.random.default_rng(seed))
    ends: Counter[str] = Counter()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            fuzz.run(ends)
        except PROMISED as error:
            ends[f"refused at load: {type(error).__name__}"] += 1
    print(dict(ends))
    # A fuzz in which all calls fail early would test nothing.
    assert min(ends[name] for name in (call, "TypeError", "ValueError")) > 10


if __name__ == "__main__":
    main(Fuzz, "forward")
