"""Tiny ONNX models, written node by node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

# The package has no types.
types: Any = TensorProto
make: Any = helper
library: Any = onnx
FLOAT, DOUBLE, INT32, INT64 = types.FLOAT, types.DOUBLE, types.INT32, types.INT64
BOOL, STRING, BFLOAT16 = types.BOOL, types.STRING, types.BFLOAT16
BATCH = "batch"


def value(name: str, kind: int, dims: Sequence[int | str]) -> Any:
    """A tensor that a model takes or returns; a dimension with a name is variable."""
    return make.make_tensor_value_info(name, kind, dims)


def node(operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Any:
    return make.make_node(operator, list(inputs), list(outputs), **attributes)


def save(
    path: Path, nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], constants: Sequence[Any] = ()
) -> Path:
    """Writes a model."""
    graph = make.make_graph(list(nodes), path.stem, list(inputs), list(outputs), list(constants))
    opsets = [make.make_opsetid("", 17), make.make_opsetid("ai.onnx.ml", 3)]
    made = make.make_model(graph, opset_imports=opsets, ir_version=8)
    library.checker.check_model(made)
    library.save(made, str(path))
    return path


def constant(name: str, kind: int, dims: Sequence[int], values: Sequence[float]) -> Any:
    return make.make_tensor(name, kind, list(dims), list(values))


def leaky_sum(path: Path, batch: int | str = BATCH) -> Path:
    """s_next = s / 2 + x, y = s_next + offsets[index]: an index that does not exist fails the call."""
    nodes = [
        node("Mul", ["s", "half"], ["s_half"]),
        node("Add", ["s_half", "x"], ["s_next"]),
        node("Gather", ["offsets", "index"], ["offset"]),
        node("Add", ["s_next", "offset"], ["y"]),
    ]
    inputs = [value("x", FLOAT, [batch, 3]), value("index", INT64, [batch, 1]), value("s", FLOAT, [batch, 3])]
    outputs = [value("y", FLOAT, [batch, 3]), value("s_next", FLOAT, [batch, 3])]
    constants = [constant("half", FLOAT, [], [0.5]), constant("offsets", FLOAT, [4], [0.0, 10.0, 20.0, 30.0])]
    return save(path, nodes, inputs, outputs, constants)


def quantized_sum(path: Path) -> Path:
    """y = s_next = s + x, of which x is rounded by the largest number of its batch."""
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["short", "scale", "zero"]),
        node("DequantizeLinear", ["short", "scale", "zero"], ["rounded"]),
        node("Add", ["s", "rounded"], ["s_next"]),
        node("Identity", ["s_next"], ["y"]),
    ]
    inputs, outputs = ([value(name, FLOAT, [BATCH, 3]) for name in names] for names in (("x", "s"), ("y", "s_next")))
    return save(path, nodes, inputs, outputs)


def classifier(path: Path) -> Path:
    """probabilities = x by class, as skl2onnx writes them."""
    by_class = make.make_map_type_proto(INT64, make.make_tensor_type_proto(FLOAT, []))
    output = make.make_value_info("probabilities", make.make_sequence_type_proto(by_class))
    zipped = node("ZipMap", ["x"], ["probabilities"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])
    return save(path, [zipped], [value("x", FLOAT, [BATCH, 2])], [output])


def identity(path: Path, kind: int, dims: Sequence[int | str]) -> Path:
    """y = x."""
    return save(path, [node("Identity", ["x"], ["y"])], [value("x", kind, dims)], [value("y", kind, dims)])
