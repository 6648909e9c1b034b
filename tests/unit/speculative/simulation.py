"""An engine in simulated time: a target and a head whose costs are curves, sources whose drafts are
right as often as they are told to be. What the chooser makes of them can then be compared with the
best that it could have done.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mirror_sd.backends.protocol import Capabilities, DraftBatch, RaggedBatch
from mirror_sd.config import EngineConfig
from mirror_sd.config_speculation import SpeculationConfig
from mirror_sd.engine import Engine
from mirror_sd.messages import Chunk, SamplingParams, Submit
from mirror_sd.speculative import drafters

VOCAB = 256
PROMPT = 16


def following(token: int, position: int) -> int:
    """The target's token after `token` at `position`."""
    return (token * 31 + position * 17 + 7) % (VOCAB - 1)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SimTarget:
    """`cost`: seconds of a forward by its rows."""

    def __init__(self, clock: Clock, cost: Callable[[int], float]) -> None:
        self.capabilities = Capabilities(
            name="simulated",
            device="cpu",
            precision="fp32",
            vocab_size=VOCAB,
            max_context=100_000,
            bit_stable=True,
            num_layers=1,
            hidden_size=2,
        )
        self.clock, self.cost = clock, cost
        self.taps: tuple[int, ...] = ()

    def kv_bytes_per_block(self, block_size: int) -> int:
        return 256

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        pass

    def tap(self, layers: Sequence[int]) -> None:
        self.taps = tuple(layers)

    def forward(self, batch: RaggedBatch):
        self.clock.now += self.cost(len(batch.token_ids))
        tokens, positions = batch.token_ids.astype(np.int64), batch.positions.astype(np.int64)
        self.features = np.stack([tokens, positions], axis=1).astype(np.float32)
        rows = batch.logit_rows
        logits = np.zeros((len(rows), VOCAB), np.float32)
        logits[
            np.arange(len(rows)), (tokens[rows] * 31 + positions[rows] * 17 + 7) % (VOCAB - 1)
        ] = 9
        return logits


@dataclass
class Curve:
    """How a source fares: a proposal comes with probability `supply`, its strength is drawn from
    `strengths`, and token j is right with `chance(strength, j)`. Asking takes `ask_s`."""

    supply: float
    chance: Callable[[int, int], float]
    strengths: Sequence[int] = (3,)
    ask_s: float = 5e-6
    rng: random.Random = field(default_factory=lambda: random.Random(1))


class SimSource:
    def __init__(self, name: str, curve: Curve, clock: Clock, tokens: Sequence[int]) -> None:
        self.name, self._curve, self._clock = name, curve, clock
        self._last, self._length = tokens[-1], len(tokens)
        self._strength = 0

    def commit(self, tokens: Sequence[int]) -> None:
        self._last, self._length = tokens[-1], self._length + len(tokens)

    def strength(self) -> int:
        return self._strength

    def strengths(self) -> list[int]:
        return [self.strength()]

    def propose(self, limit: int) -> list[int]:
        curve = self._curve
        self._clock.now += curve.ask_s
        if curve.rng.random() >= curve.supply:
            return []
        self._strength = curve.rng.choice(curve.strengths)
        return invent(
            self._last,
            self._length - 1,
            [curve.rng.random() < curve.chance(self._strength, j) for j in range(limit)],
        )


def invent(token: int, position: int, rights: Sequence[bool]) -> list[int]:
    """A draft after `token` at `position` whose tokens are right or not."""
    made = []
    for right in rights:
        token = following(token, position)
        position += 1
        made.append(token if right else VOCAB - 1)
    return made


class SimDrafter:
    def __init__(self, name: str, curve: Curve, clock: Clock) -> None:
        self._name, self._curve, self._clock = name, curve, clock

    nbytes = 0

    def open(self, tokens: Sequence[int], *, tenant: str, prompt_length: int) -> SimSource:
        return SimSource(self._name, self._curve, self._clock, tokens)

    def close(self, source, tokens, *, tenant: str, prompt_length: int) -> None:
        pass


class SimHead:
    """Right with `chance(j)`, and it half knows when. `cost`: seconds of a pass by sequences."""

    taps = (1,)

    def __init__(
        self, clock: Clock, chance: Callable[[int], float], cost: Callable[[int], float]
    ) -> None:
        self.clock, self.chance, self.cost = clock, chance, cost
        self.rng = random.Random(2)
        self.calls = 0

    def kv_bytes_per_block(self, block_size: int) -> int:
        return 16

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        pass

    def draft(self, batch: DraftBatch):
        self.calls += 1
        most = int(batch.steps.max(initial=0))
        tokens = np.full((len(batch.steps), most), -1, np.int32)
        chances = np.zeros((len(batch.steps), most), np.float32)
        passes = 1
        for row, steps in enumerate(batch.steps):
            last = int(batch.sequence_offsets[row + 1]) - 1
            product, rights = 1.0, []
            for depth in range(int(steps)):
                # Knows the chance of this very token: around the mean, sure or unsure.
                mean = self.chance(depth)
                known = min(max(mean + self.rng.uniform(-0.3, 0.3), 0.02), 0.98)
                if product * known < batch.floors[row]:
                    break
                product *= known
                chances[row, depth] = known
                rights.append(self.rng.random() < known)
            made = invent(int(batch.token_ids[last]), int(batch.positions[last]), rights)
            tokens[row, : len(made)] = made
            passes = max(passes, 1 + len(made))
        self.clock.now += passes * self.cost(len(batch.steps))
        return tokens, chances


class Scene:
    """`streams` sequences that never end, drafted for by `curves` and a head."""

    def __init__(
        self,
        monkeypatch,
        streams: int,
        cost: Callable[[int], float],
        curves: Mapping[str, Curve],
        head: tuple[Callable[[int], float], Callable[[int], float]] | None = None,
        length: str = "bandit",
        fixed: int | None = None,
        speculation: bool = True,
        longest: int = 8,
    ) -> None:
        self.clock = Clock()
        registry = {
            name: (lambda config, name=name, curve=curve: SimDrafter(name, curve, self.clock))
            for name, curve in curves.items()
        }
        monkeypatch.setattr(drafters, "_REGISTRY", registry)
        limits = {"max_tokens": longest}
        if fixed is not None:
            limits = {"min_tokens": fixed, "max_tokens": fixed, "initial_tokens": fixed}
        self.target = SimTarget(self.clock, cost)
        self.head = SimHead(self.clock, *head) if head is not None else None
        self.engine = Engine(
            self.target,
            EngineConfig(block_size=16, kv_cache_mb=64, prefill_chunk=8192, prefix_reuse=False),
            SpeculationConfig(drafter="auto", length=length, **limits),
            model_name="m",
            device_class="cpu",
            slots=streams,
            head=self.head,
            clock=self.clock,
        )
        self.engine.warm_up()
        for i in range(streams):
            params = SamplingParams(
                max_tokens=90_000, seed=i, temperature=0.0, speculation=speculation
            )
            self.engine.add(
                Submit(request_id=f"r{i}", model="m", prompt=(i % VOCAB,) * PROMPT, params=params)
            )

    def run(self, seconds: float) -> float:
        """Tokens a second over the next simulated `seconds`."""
        begin, end, tokens = self.clock.now, self.clock.now + seconds, 0
        while self.clock.now < end:
            for output in self.engine.step():
                assert isinstance(output, Chunk)
                tokens += len(output.tokens)
        return tokens / (self.clock.now - begin)
