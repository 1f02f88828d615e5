"""Tensors that belong to a whole batch: inputs that describe its rows (`batch_input`), and outputs of the whole batch
that are cut into rows (`batch_output`).

Pure. A backend with one tensor per batch (`pytorch`) needs them for ragged inputs, whose rows lie one after the other
in one flat tensor. Shapes here are those of requests, with their batch dimension; a null row counts as a request.

Source: triton-spec section 4, "batch_input / batch_output"; Triton backend, backend_input_collector.cc
(BatchInputShape, ProcessBatchInput) and backend_output_responder.cc (ProcessBatchOutput).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor.engine.error_texts import quoted
from executor.engine.shapes import Shape
from shared.contract.errors import LoadError
from shared.contract.model_config import BatchInputKind, ModelConfig
from shared.contract.tensors import NUMPY_TYPE, element_count


def batch_input_value(kind: BatchInputKind, datatype: str, given: Sequence[Shape]) -> NDArray[Any]:
    """The tensor that a model gets, without a batch dimension of its own.

    given    each request's shape of the source input; at least one
    returns  element counts [requests], their running sum (with a leading zero: [requests + 1]), zeros whose length is
             the largest count, or the shape of every batch item ([items, rank], or flat). Triton leaves the content of
             the zeros open
    """
    counts = [element_count(shape) for shape in given]
    match kind:
        case BatchInputKind.ELEMENT_COUNT:
            values: Sequence[int] = counts
        case BatchInputKind.ACCUMULATED_ELEMENT_COUNT:
            values = list(itertools.accumulate(counts))
        case BatchInputKind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO:
            values = list(itertools.accumulate(counts, initial=0))
        case BatchInputKind.MAX_ELEMENT_COUNT_AS_SHAPE:
            return np.zeros(max(counts), NUMPY_TYPE[datatype])
        case BatchInputKind.ITEM_SHAPE | BatchInputKind.ITEM_SHAPE_FLATTEN:
            return _item_shapes(kind, datatype, given)
    return np.array(values, NUMPY_TYPE[datatype])


def _item_shapes(kind: BatchInputKind, datatype: str, given: Sequence[Shape]) -> NDArray[Any]:
    items = [shape[1:] for shape in given for _ in range(shape[0])]
    table = np.array(items, NUMPY_TYPE[datatype]).reshape(len(items), len(given[0]) - 1)
    return table if kind is BatchInputKind.ITEM_SHAPE else table.reshape(-1)


def scattered_shape(dims: Shape, source: Shape, *, batched: bool) -> Shape:
    """The shape of one request's part of an output: a variable dimension is as long as the source's at the same place.

    dims    the output's, without batch dimension
    source  the request's shape of the source input
    """
    whole = (-1, *dims) if batched else dims
    return tuple(source[place] if dim == -1 else dim for place, dim in enumerate(whole))


def check_batch_tensors(config: ModelConfig) -> None:
    """Checks that every batch tensor can be made: raises LoadError for a contradiction of shapes."""
    inputs, outputs = config.inputs_by_name, config.outputs_by_name
    for entry in config.batch_inputs:
        if entry.kind in (BatchInputKind.ITEM_SHAPE, BatchInputKind.ITEM_SHAPE_FLATTEN) and not config.max_batch_size:
            raise LoadError(
                f"model '{config.name}': batch input {quoted(entry.names)} tells the shapes of batch items, but "
                "max_batch_size is 0"
            )
    for cut in config.batch_outputs:
        source = inputs[cut.source]
        for name in cut.names:
            variable = [place for place, dim in enumerate(outputs[name].dims) if dim == -1]
            if variable and variable[-1] >= len(source.dims):
                raise LoadError(
                    f"model '{config.name}': dimension {variable[-1]} of batch output '{name}' is variable, but its "
                    f"source input '{source.name}' has only {len(source.dims)} dimensions"
                )
