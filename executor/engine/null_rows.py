"""Null rows: they fill the places of a batch that have no step (triton-spec 1.4)."""

from __future__ import annotations

import numpy as np

from executor.engine.base import Row
from shared.contract.model_config import ControlKind, ControlSpec
from shared.contract.tensors import ELEMENT_BYTES, NUMPY_TYPE, Tensor, element_count

NULL_ROW = Row(inputs={}, null=True)


def zeros(datatype: str, shape: tuple[int, ...]) -> bytes:
    """The content of a tensor of zeros; of BYTES, elements of length 0 (four zero bytes each)."""
    return bytes(element_count(shape) * ELEMENT_BYTES.get(datatype, 4))


def false_control(control: ControlSpec, *, batched: bool) -> Tensor:
    """The control tensor of a null row: the false value, correlation id 0, or a string of length 0."""
    shape = (1, 1) if batched else (1,)
    if control.datatype == "BYTES":
        return Tensor(control.name, "BYTES", shape, bytes(4))
    false = control.false_true[0] if control.false_true and control.kind is not ControlKind.CORRID else 0
    return Tensor(control.name, control.datatype, shape, np.array([false], NUMPY_TYPE[control.datatype]).tobytes())
