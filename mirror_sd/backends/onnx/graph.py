"""An ONNX graph while it is written: nodes, small constants inside, weights beside it.

Weights never enter the protobuf, whose copies of them would need their memory several times over
and whose limit is 2 GiB; the session takes them as they lie here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

# DequantizeLinear in blocks came with 21.
OPSET = 21
_IR_VERSION = 10
_CONTRIB = "com.microsoft"
# Weights in this file of their own, which is never written: the session replaces them all.
_ELSEWHERE = "weights"

FLOAT, HALF, BFLOAT, INT64 = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.BFLOAT16,
    TensorProto.INT64,
)
_OF_NUMPY: dict[str, int] = {
    "float32": FLOAT,
    "float16": HALF,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
}


class GraphBuilder:
    """Values are their names; each method appends what gives the value it returns."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: list[Any] = []
        self._constants: dict[tuple[int, ...], str] = {}
        self._initializers: list[TensorProto] = []
        self._inputs: list[ValueInfoProto] = []
        self._outputs: list[ValueInfoProto] = []
        self.weights: dict[str, tuple[NDArray[Any], int]] = {}

    def input(self, name: str, shape: Sequence[int | str], kind: int = INT64) -> str:
        """A named dimension may differ from run to run."""
        self._inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, value: str, shape: Sequence[int | str]) -> None:
        """Of float32. `value` becomes known as `name`."""
        self._nodes.append(helper.make_node("Identity", [value], [name]))
        self._declare(name, shape)

    def _declare(self, name: str, shape: Sequence[int | str]) -> None:
        self._outputs.append(helper.make_tensor_value_info(name, FLOAT, shape))

    def op(
        self, kind: str, *inputs: str, output: str = "", domain: str = "", **options: Any
    ) -> str:
        name = output or f"{kind}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [name], domain=domain, **options))
        return name

    def contrib(self, kind: str, *inputs: str, **options: Any) -> str:
        """An operator that ONNX Runtime has beside the standard's."""
        return self.op(kind, *inputs, domain=_CONTRIB, **options)

    def output_op(
        self, name: str, shape: Sequence[int | str], kind: str, *inputs: str, **options: Any
    ) -> str:
        """`op`, whose result is an output too: without a copy."""
        self._declare(name, shape)
        return self.op(kind, *inputs, output=name, **options)

    def split(self, value: str, sizes: Sequence[int], axis: int = -1) -> list[str]:
        names = [f"Split_{len(self._nodes)}_{i}" for i in range(len(sizes))]
        inputs = [value, self.integers(sizes)]
        self._nodes.append(helper.make_node("Split", inputs, names, axis=axis))
        return names

    def cut(self, value: str, end: int, *, axis: int) -> str:
        """The first `end` along the axis."""
        return self.op("Slice", value, *(self.integers([n]) for n in (0, end, axis)))

    def integers(self, values: Sequence[int]) -> str:
        """A constant [n] of int64."""
        key = tuple(values)
        if key not in self._constants:
            name = self._constants[key] = f"integers_{len(self._constants)}"
            self._initializers.append(numpy_helper.from_array(np.array(key, np.int64), name))
        return self._constants[key]

    def constant(self, values: NDArray[Any]) -> str:
        """A small constant of float32."""
        name = f"constant_{len(self._initializers)}"
        array = np.asarray(values, np.float32)
        self._initializers.append(numpy_helper.from_array(array, name))
        return name

    def reshape(self, value: str, *shape: int) -> str:
        """0 keeps the dimension at its place, -1 is what is left."""
        return self.op("Reshape", value, self.integers(shape))

    def weight(self, name: str, values: NDArray[Any], kind: int | None = None) -> str:
        """`kind` BFLOAT: `values` are the bits, uint16. A name given again is the same weight."""
        if name not in self.weights:
            kind = _OF_NUMPY[values.dtype.name] if kind is None else kind
            proto = TensorProto(name=name, data_type=kind, dims=values.shape)
            proto.data_location = TensorProto.EXTERNAL
            proto.external_data.add(key="location", value=_ELSEWHERE)
            self._initializers.append(proto)
            self.weights[name] = (np.ascontiguousarray(values), kind)
        return name

    def model(self) -> ModelProto:
        graph = helper.make_graph(
            self._nodes, self._name, self._inputs, self._outputs, self._initializers
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(_CONTRIB, 1)]
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="mirror-sd"
        )
