"""Tiny OpenVINO models, written operation by operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino import opset13

# Generated bindings.
ov: Any = openvino
op: Any = opset13
BATCH = -1


def value(name: str, kind: Any, dims: Sequence[int]) -> Any:
    """A tensor that a model takes; -1 is variable. kind: a numpy type, or a type of OpenVINO"""
    made = op.parameter(list(dims), kind, name=name)
    made.output(0).set_names({name})
    return made


def save(path: Path, inputs: Sequence[Any], outputs: Mapping[str, Any]) -> Path:
    """Writes a model, `model.xml` and `model.bin`."""
    results: list[Any] = []
    for name, node in outputs.items():
        node.output(0).set_names({name})
        results.append(op.result(node))
    ov.save_model(ov.Model(results, list(inputs), path.stem), str(path), compress_to_fp16=False)
    return path


def leaky_sum(path: Path, batch: int = BATCH) -> Path:
    """s_next = s / 2 + x, y = s_next + offsets[index]."""
    x, index, s = (
        value("x", np.float32, [batch, 3]),
        value("index", np.int64, [batch, 1]),
        value("s", np.float32, [batch, 3]),
    )
    s_next = op.add(op.multiply(s, np.float32(0.5)), x)
    offsets = op.constant(np.array([0, 10, 20, 30], np.float32))
    return save(path, [x, index, s], {"y": op.add(s_next, op.gather(offsets, index, op.constant(0))), "s_next": s_next})


def tanh_cell(path: Path) -> Path:
    """y = s_next = tanh(x + s): one value that is two outputs."""
    x, s = value("x", np.float32, [BATCH, 1]), value("s", np.float32, [BATCH, 1])
    after = op.tanh(op.add(x, s))
    results = {name: op.result(after) for name in ("y", "s_next")}
    for name, result in results.items():
        result.output(0).set_names({name})
    ov.save_model(ov.Model(list(results.values()), [x, s], path.stem), str(path), compress_to_fp16=False)
    return path


def identity(path: Path, kind: Any, dims: Sequence[int]) -> Path:
    """y = x."""
    x = value("x", kind, dims)
    return save(path, [x], {"y": op.reshape(x, np.zeros(len(dims), np.int64), special_zero=True)})


def pairs(path: Path) -> Path:
    """y = x as pairs: a row of an odd number of elements fails."""
    x = value("x", np.float32, [BATCH, -1])
    return save(path, [x], {"y": op.reshape(x, np.array([0, -1, 2]), special_zero=True)})


def keeps_its_sum(path: Path) -> Path:
    """A sum that the model keeps in a variable of its own."""
    x = value("x", np.float32, [BATCH, 1])
    info = ov.op.util.VariableInfo()
    info.data_shape, info.data_type, info.variable_id = ov.PartialShape([-1, 1]), ov.Type.f32, "total"
    variable = ov.op.util.Variable(info)
    y = op.add(op.read_value(op.constant(np.zeros((1, 1), np.float32)), variable), x)
    y.output(0).set_names({"y"})
    ov.save_model(ov.Model([op.result(y)], [op.assign(y, variable)], [x], path.stem), str(path))
    return path
