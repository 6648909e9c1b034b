"""How weights of each precision enter a graph: as factors of products, and as a table to look up.

Sums are always fp32, but for products of halves. int8 is a code and a scale for each 32 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from mirror_sd.backends.onnx.graph import BFLOAT, FLOAT, HALF, GraphBuilder
from mirror_sd.backends.onnx.providers import Provider
from mirror_sd.backends.protocol import Float32
from mirror_sd.errors import ConfigError
from mirror_sd.uir import bfloat16, draft_file

Precision = Literal["fp32", "fp16", "bf16", "int8"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8")
_GROUP = draft_file.GROUP
# By `accuracy_level` 4 the activations are int8 too, with a scale for each 32.
_INT8_ACTIVATIONS = 4
_ZERO_POINT = 128
# An embedding has tens of millions of values, and quantising takes them several times over.
_ROWS_AT_ONCE = 2048


def precision_of(setting: str) -> Precision:
    """auto is int8. Raises `ConfigError`."""
    wanted = "int8" if setting == "auto" else setting
    for precision in PRECISIONS:
        if precision == wanted:
            return precision
    raise ConfigError(f"precision {setting!r} is not one of auto, {', '.join(PRECISIONS)}")


@dataclass(frozen=True, slots=True)
class Products:
    """Writes products of one precision as the provider has them.

    fp16 and bf16 are formats of the stored weights, and the products are fp32, unless the provider
    multiplies halves. int8 without block products is dequantised, as the standard's operators say
    it, for compilers to fuse.
    """

    precision: Precision
    provider: Provider

    @property
    def shares_table(self) -> bool:
        """Whether `table` and `linear` hold a matrix alike, so that one of them does for both."""
        return self.precision == "int8" and self.provider.has_block_products

    def linear(self, graph: GraphBuilder, name: str, x: str, matrix: Float32) -> str:
        """x [.., inputs] times the transpose of `matrix` [outputs, inputs]."""
        if self.precision == "int8":
            if self.provider.has_block_products:
                return self._by_blocks(graph, name, x, matrix)
            return graph.op("MatMul", x, self._dequantised(graph, name, matrix))
        transposed = np.ascontiguousarray(matrix.T)
        if self.precision == "fp16" and self.provider.multiplies_halves:
            weight = graph.weight(name, transposed.astype(np.float16))
            product = graph.op("MatMul", graph.op("Cast", x, to=HALF), weight)
            return graph.op("Cast", product, to=FLOAT)
        return graph.op("MatMul", x, self._stored(graph, name, transposed))

    def _stored(self, graph: GraphBuilder, name: str, values: Float32) -> str:
        """`values` rounded to the precision, as fp32: ONNX Runtime does that once, at load."""
        if self.precision == "fp32":
            return graph.weight(name, values)
        return graph.op("Cast", self._narrow(graph, name, values), to=FLOAT)

    def _narrow(self, graph: GraphBuilder, name: str, values: Float32) -> str:
        if self.precision == "fp16":
            return graph.weight(name, values.astype(np.float16))
        return graph.weight(name, bfloat16.bits(values), BFLOAT)

    def _by_blocks(self, graph: GraphBuilder, name: str, x: str, matrix: Float32) -> str:
        codes, scales = self._blocks(graph, name, matrix)
        return graph.contrib(
            "MatMulNBits",
            *(x, codes, scales),
            N=matrix.shape[0],
            K=matrix.shape[1],
            bits=8,
            block_size=_GROUP,
            accuracy_level=_INT8_ACTIVATIONS,
        )

    @staticmethod
    def _blocks(graph: GraphBuilder, name: str, matrix: Float32) -> tuple[str, str]:
        """([outputs, groups, 32] uint8 around 128, [outputs, groups] scales)."""
        outputs, inputs = matrix.shape
        groups = -(-inputs // _GROUP)
        unsigned = np.full((outputs, groups * _GROUP), _ZERO_POINT, np.uint8)
        scales = np.empty((outputs, groups), np.float32)
        for first in range(0, outputs, _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            codes, scales[rows] = draft_file.quantise(matrix[rows])
            unsigned[rows, :inputs] = codes.astype(np.int16) + _ZERO_POINT
        return (
            graph.weight(f"{name}.codes", unsigned.reshape(outputs, groups, _GROUP)),
            graph.weight(f"{name}.scales", scales),
        )

    @staticmethod
    def _dequantised(graph: GraphBuilder, name: str, matrix: Float32) -> str:
        """[inputs, outputs]"""
        codes, scales = draft_file.quantise(matrix)
        inputs = matrix.shape[1]
        # OpenVINO knows whole blocks only.
        padded = np.pad(codes, ((0, 0), (0, -inputs % _GROUP)))
        values = graph.op(
            "DequantizeLinear",
            graph.weight(f"{name}.columns", np.ascontiguousarray(padded.T)),
            graph.weight(f"{name}.column_scales", np.ascontiguousarray(scales.T, np.float32)),
            axis=0,
            block_size=_GROUP,
        )
        return values if inputs % _GROUP == 0 else graph.cut(values, inputs, axis=0)

    def table(self, graph: GraphBuilder, name: str, matrix: Float32, ids: str) -> str:
        """Rows `ids` [tokens] of `matrix` [rows, width], as fp32 [tokens, width]."""
        if self.precision == "fp32":
            return graph.op("Gather", graph.weight(name, matrix), ids)
        if self.precision != "int8":
            rows = graph.op("Gather", self._narrow(graph, name, matrix), ids)
            return graph.op("Cast", rows, to=FLOAT)
        codes, scales = self._blocks(graph, name, matrix)
        wide = graph.op("Cast", graph.op("Gather", codes, ids), to=FLOAT)
        signed = graph.op("Sub", wide, graph.constant(np.array(_ZERO_POINT)))
        factors = graph.op("Unsqueeze", graph.op("Gather", scales, ids), graph.integers([2]))
        values = graph.reshape(graph.op("Mul", signed, factors), 0, -1)
        width = matrix.shape[1]
        return values if width % _GROUP == 0 else graph.cut(values, width, axis=1)
