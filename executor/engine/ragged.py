"""Ragged inputs (`allow_ragged_batch`): rows of any shape share a batch, because they lie one after the other in one
flat tensor.

Pure. Such a tensor has one dimension, the elements of all rows; also if all shapes happen to be equal, so that a model
sees one form only. Batch inputs (`batch_tensors`) tell the model where each row begins. The `python` backend has no
such tensors: it is given each request apart.

Source: triton-spec 1.9; Triton pytorch backend, libtorch.cc (SetInputTensors).
"""

from __future__ import annotations

from collections.abc import Sequence

from executor.engine.base import Row
from executor.engine.null_rows import zeros
from executor.engine.row_shapes import InputShapes
from executor.engine.shapes import Shape
from shared.contract.model_config import TensorSpec
from shared.contract.tensors import element_count

_ANY: Shape = ()
"""Stands for a ragged input's shape in a group's key."""


class RaggedInputs:
    """Which inputs of a model are ragged."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.names = frozenset(spec.name for spec in specs if spec.allow_ragged_batch)
        self._at = frozenset(place for place, spec in enumerate(specs) if spec.allow_ragged_batch)

    def group(self, key: InputShapes) -> InputShapes:
        """What rows must have in common to share a batch. Of ragged inputs only their presence counts."""
        if not self._at:
            return key
        return tuple(_ANY if place in self._at and shape is not None else shape for place, shape in enumerate(key))


def request_shapes(name: str, batch: Sequence[Row]) -> list[Shape]:
    """Each row's shape of an input, with batch dimension. A null row has the shape of the first real row (triton-spec
    1.4) with one item. At least one row is real, and every real row has the input.
    """
    sample = next(row.inputs[name].shape for row in batch if not row.null)
    null = (1, *sample[1:]) if sample else sample
    return [null if row.null else row.inputs[name].shape for row in batch]


def flat_parts(spec: TensorSpec, batch: Sequence[Row], given: Sequence[Shape]) -> tuple[list[bytes], int]:
    """The content of each row, and the number of elements of all rows. given: from `request_shapes`"""
    parts = [
        zeros(spec.datatype, shape) if row.null else row.inputs[spec.name].raw
        for row, shape in zip(batch, given, strict=True)
    ]
    return parts, sum(map(element_count, given))
