"""What a conversion changed: the weights of each layer, and what the model computes with them.

Error of weights: the root of the mean square of the difference over that of the weights. Error of
states: the same of the residual stream after a layer, over all tokens of a text, both models
computing in fp32 by the reference back end, so that nothing but the stored numbers differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mirror_sd.backends.protocol import Float32, RaggedBatch
from mirror_sd.backends.reference_backend import ReferenceBackend
from mirror_sd.uir.model_spec import expected_shapes
from mirror_sd.uir.program import Program

_LAYER = re.compile(r"layers\.(\d+)\.(\w+)")


@dataclass(slots=True)
class LayerError:
    """Over the matrices of one layer, or the embedding, or the head. `worst` names the matrix of
    the largest relative error; `state` is None where nothing was computed."""

    layer: str
    relative: float
    worst: str
    worst_relative: float
    largest: float
    state: float | None = None

    def row(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "weights": f"{self.relative:.2e}",
            "worst": f"{self.worst} {self.worst_relative:.2e}",
            "largest": f"{self.largest:.2e}",
            "states": None if self.state is None else f"{self.state:.2e}",
        }


@dataclass(frozen=True, slots=True)
class OutputError:
    """Over the positions of the text. kl: mean KL(source || converted) in nats."""

    positions: int
    max_logit: float
    kl: float
    top1_agreement: float


@dataclass(slots=True)
class _Sums:
    difference: float = 0.0
    square: float = 0.0
    largest: float = 0.0
    worst: str = ""
    worst_relative: float = 0.0


def of_weights(source: Program, converted: Program) -> list[LayerError]:
    """One for the embedding, each layer and the head, matrix by matrix."""
    sums: dict[str, _Sums] = {}
    for name, shape in expected_shapes(source.spec).items():
        if len(shape) != 2:
            continue
        found = _LAYER.fullmatch(name)
        layer, role = (found[1], found[2]) if found else (name, name)
        difference, square, largest = _compared(
            source.weights.load(name), converted.weights.load(name)
        )
        total = sums.setdefault(layer, _Sums())
        total.difference += difference
        total.square += square
        total.largest = max(total.largest, largest)
        relative = _ratio(difference, square)
        if relative >= total.worst_relative:
            total.worst, total.worst_relative = role, relative
    return [
        LayerError(layer, _ratio(s.difference, s.square), s.worst, s.worst_relative, s.largest)
        for layer, s in sums.items()
    ]


def of_outputs(
    source: Program, converted: Program, tokens: Sequence[int], layers: list[LayerError]
) -> OutputError:
    """Run the text through both, one after the other; notes `state` in `layers`."""
    expected_states, expected = _run(source, tokens)
    states, logits = _run(converted, tokens)
    by_name = {error.layer: error for error in layers}
    for layer in range(source.spec.num_layers):
        difference, square, _ = _compared(expected_states[layer], states[layer])
        by_name[str(layer)].state = _ratio(difference, square)
    theirs, ours = _log_softmax(expected), _log_softmax(logits)
    return OutputError(
        positions=len(tokens),
        max_logit=float(np.abs(expected - logits).max()),
        kl=float((np.exp(theirs) * (theirs - ours)).sum() / len(tokens)),
        top1_agreement=float((expected.argmax(axis=1) == logits.argmax(axis=1)).mean()),
    )


def _run(program: Program, tokens: Sequence[int]) -> tuple[list[Float32], Float32]:
    """(the states [T, hidden] after each layer, logits [T, vocab])"""
    backend = ReferenceBackend(program)
    count = len(tokens)
    backend.allocate_kv(1, count)
    backend.tap(range(1, program.spec.num_layers + 1))
    logits = backend.forward(
        RaggedBatch(
            token_ids=np.array(tokens, np.int32),
            positions=np.arange(count, dtype=np.int32),
            sequence_offsets=np.array([0, count], np.int32),
            block_tables=(np.zeros(1, np.int32),),
            logit_rows=np.arange(count, dtype=np.int32),
        )
    )
    return np.split(backend.features, program.spec.num_layers, axis=1), logits


def _compared(expected: Float32, found: Float32) -> tuple[float, float, float]:
    """(sum of squared differences, sum of squares, largest difference), in pieces of rows."""
    difference = square = largest = 0.0
    for a, b in zip(_pieces(expected), _pieces(found), strict=True):
        apart = a.astype(np.float64) - b
        difference += float(np.square(apart).sum())
        square += float(np.square(a, dtype=np.float64).sum())
        largest = max(largest, float(np.abs(apart).max(initial=0.0)))
    return difference, square, largest


def _pieces(values: Float32) -> Iterator[Float32]:
    for start in range(0, len(values), 4096):
        yield values[start : start + 4096]


def _ratio(difference: float, square: float) -> float:
    return float(np.sqrt(difference / square)) if square > 0 else 0.0


def _log_softmax(logits: Float32) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
