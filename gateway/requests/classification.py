"""The classification extension: a numeric output as its k largest elements. Pure; source: triton-spec 5.4."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gateway.bounds.pieces import pieces
from shared.contract.errors import RequestError
from shared.contract.messages import ModelRecord
from shared.contract.tensors import Tensor, pack_bytes, to_numpy

ELEMENTS_MAX = 1_000_000
"""Elements of an output that can be classified."""
CLASSES_BYTES_MAX = 64 << 20
"""Bytes of what is made of an output: of 64 bits, a value may have 309 digits. Of 32 bits, as many as may be fit in."""
NOT_CLASSIFIED = ("BOOL", "FP16", "BF16", "BYTES")
WEIGHT = 64
"""So many bytes of an output that is copied, or written as JSON, take no longer than one that is classified: an element
takes 1 to 3 us."""


def classify(tensor: Tensor, classes: int, *, batched: bool, labels: Sequence[str] = ()) -> Tensor:
    """The output as BYTES elements `value:index` or `value:index:label`, largest value first; equal values by index.

    classes  number of elements per row; fewer when a row has fewer values
    labels   label of each index; "" means none, and so does an index beyond the end
    batched  dim 0 is the batch: each row is classified by itself, and the result is [batch, k] instead of [k]
    raises   RequestError for a datatype that Triton does not classify and for an output that is too large
    """
    if tensor.datatype in NOT_CLASSIFIED:
        raise RequestError(f"class result not available for output due to unsupported type '{tensor.datatype}'")
    values = to_numpy(tensor)
    if values.size > ELEMENTS_MAX:
        raise RequestError("classification output tensor too large")
    # Computed, because numpy finds no length for rows of which there are none.
    rows = values.reshape(tensor.shape[0] if batched and tensor.shape else 1, math.prod(tensor.shape[int(batched) :]))
    count = min(classes, rows.shape[1])
    elements = pack_bytes(_bounded(element for row in rows for element in _top(row, count, labels)))
    return Tensor(tensor.name, "BYTES", (len(rows), count) if batched else (count,), elements)


def classified(tensor: Tensor, classes: int, record: ModelRecord) -> Tensor:
    """As `classify`, for an output of this model."""
    labels = record.labels.get(tensor.name, ())
    return classify(tensor, classes, batched=record.config.max_batch_size > 0, labels=labels)


def _bounded(elements: Iterable[str]) -> Iterator[str]:
    left = CLASSES_BYTES_MAX
    for element in elements:
        left -= len(element)
        if left < 0:
            raise RequestError("classification output tensor too large")
        yield element


def _top(row: NDArray[Any], count: int, labels: Sequence[str]) -> Iterator[str]:
    # What C++'s to_string writes: six decimals for a float of any size.
    text = "{:f}:{}" if row.dtype.kind == "f" else "{:d}:{}"
    order = _descending(row)[:count]
    for piece in pieces(len(order)):
        part = order[piece]
        for value, index in zip(row[part].tolist(), part.tolist(), strict=True):
            label = labels[index] if index < len(labels) else ""
            yield text.format(value, index) + (f":{label}" if label else "")


def _descending(row: NDArray[Any]) -> NDArray[np.intp]:
    """Indexes by falling value, equal values by rising index, NaN last."""
    if row.dtype.kind == "f":
        return np.argsort(-row, kind="stable")
    # The negation of an integer may not exist. Sorted backwards and read backwards, equal values keep their order.
    return len(row) - 1 - np.argsort(row[::-1], kind="stable")[::-1]
