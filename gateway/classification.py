"""The classification extension: a numeric output as its k largest elements. Pure; source: triton-spec 5.4."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.errors import Code, RequestError
from shared.tensors import Tensor, pack_bytes, to_numpy

ELEMENTS_MAX = 1_000_000
"""Elements of an output that can be classified."""


def classify(tensor: Tensor, classes: int, *, batched: bool) -> Tensor:
    """The output as BYTES elements `value:index`, largest value first; equal values by index.

    classes  how many; fewer when the output has fewer
    batched  dim 0 is the batch: each row is classified by itself, and the result is [batch, k] instead of [k]
    raises   RequestError for BYTES and for an output that is too large
    """
    if tensor.datatype == "BYTES":
        raise RequestError(f"class result not available for output '{tensor.name}' due to unsupported type 'BYTES'")
    values = _numbers(tensor)
    if values.size > ELEMENTS_MAX:
        raise RequestError("classification output tensor too large", Code.INVALID_ARG)
    rows = values.reshape(tensor.shape[0], -1) if batched and tensor.shape else values.reshape(1, -1)
    count = min(classes, rows.shape[1])
    labels = [label for row in rows for label in _top(row, count)]
    return Tensor(tensor.name, "BYTES", (len(rows), count) if batched else (count,), pack_bytes(labels))


def _numbers(tensor: Tensor) -> NDArray[Any]:
    values = to_numpy(tensor)
    if tensor.datatype == "BF16":
        # A bfloat16 is the upper half of a float32.
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if tensor.datatype == "FP16" else values


def _top(row: NDArray[Any], count: int) -> list[str]:
    text = "{:f}:{}" if row.dtype.kind == "f" else "{:d}:{}"
    return [text.format(row[index].item(), index) for index in _descending(row)[:count]]


def _descending(row: NDArray[Any]) -> NDArray[np.intp]:
    """Indexes by falling value, equal values by rising index, NaN last."""
    if row.dtype.kind == "f":
        return np.argsort(-row, kind="stable")
    # The negation of an integer may not exist. Sorted backwards and read backwards, equal values keep their order.
    return len(row) - 1 - np.argsort(row[::-1], kind="stable")[::-1]
