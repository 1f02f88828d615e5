"""Null rows: they fill the places of a batch that have no step (triton-spec 1.4)."""

from __future__ import annotations

from executor.engine.base import Row
from shared.contract.tensors import ELEMENT_BYTES, element_count

NULL_ROW = Row(inputs={}, null=True)


def zeros(datatype: str, shape: tuple[int, ...]) -> bytes:
    """The content of a tensor of zeros; of BYTES, elements of length 0 (four zero bytes each)."""
    return bytes(element_count(shape) * ELEMENT_BYTES.get(datatype, 4))
