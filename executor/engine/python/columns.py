"""A batch's tensors, as a model gets them: column by column, when it asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor.core.controls import ControlTensors
from executor.engine import shapes
from executor.engine.base import Row
from executor.engine.error_texts import quoted
from executor.engine.null_rows import zeros
from executor.engine.python.slot_states import States
from executor.engine.python.tensor import Column, ModelTensor, TypedTensor
from executor.engine.python.unwanted_rows import UnwantedRows
from shared.contract.model_config import ModelConfig, TensorSpec
from shared.contract.tensors import NUMPY_TYPE, Tensor, to_numpy


class Sources:
    """Where a model's input names come from; one per engine.

    version    of the model; -1 if that is no number
    names      in the order in which they are looked up: inputs, controls, states
    outputs    names of the declared outputs: a request that names none gets all of them
    unwanted   rows for which nobody waits any more
    """

    def __init__(self, config: ModelConfig, version: str) -> None:
        self.model = config.name
        self.version = int(version) if version.isdecimal() else -1
        self.batched = config.max_batch_size > 0
        self.inputs = config.inputs_by_name
        self.false_controls = ControlTensors(config).null_row
        self.states = [state.input_name for state in config.states]
        self.names = (*self.inputs, *(control.name for control in config.controls), *self.states)
        self.outputs = tuple(config.outputs_by_name)
        self.unwanted = UnwantedRows()


class Columns(dict[str, Column]):
    """A batch's tensors by name. Each is made for all rows when it is first asked for."""

    def __init__(self, sources: Sources, batch: Sequence[Row], states: Sequence[States | None]) -> None:
        super().__init__()
        self.sources = sources
        self._batch = batch
        self._states = states

    def __missing__(self, name: str) -> Column:
        sources = self.sources
        if name in sources.inputs:
            column = self._input_column(name, sources.inputs[name])
        elif name in sources.false_controls:
            false = sources.false_controls[name]
            column = _made(
                name, [row.controls.get(name, false) if row.null else row.controls[name] for row in self._batch]
            )
        elif name in sources.states:
            column = self._state_column(name)
        else:
            column: Column = [None] * len(self._batch)
        self[name] = column
        return column

    @property
    def undeclared(self) -> str:
        """A sentence about names that the model asked for and its configuration lacks, for which it was given None."""
        names = self.sources.names
        # A list, because threads of the model may ask meanwhile.
        lacking = [name for name in list(self) if name not in names]
        if not lacking:
            return ""
        return f"\nThe model asked for {quoted(lacking)}. Its configuration has {quoted(names) or 'no input'} alone."

    def _input_column(self, name: str, spec: TensorSpec) -> Column:
        tensors = [row.inputs.get(name) for row in self._batch]
        if spec.reshape is not None:
            tensors = [None if tensor is None else self._reshaped(spec, tensor) for tensor in tensors]
        return _made(name, self._nulls_filled(tensors))

    def _reshaped(self, spec: TensorSpec, tensor: Tensor) -> Tensor:
        leading = tensor.shape[:1] if self.sources.batched else ()
        shape = (*leading, *shapes.for_model(spec, tensor.shape[len(leading) :]))
        return Tensor(tensor.name, tensor.datatype, shape, tensor.raw)

    def _state_column(self, name: str) -> Column:
        leading = (1,) if self.sources.batched else ()
        tensors = [None if states is None else states[name] for states in self._states]
        return _made(name, self._nulls_filled(tensors), leading)

    def _nulls_filled(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Fills the null rows with zeros of the first real row's shape."""
        if None not in tensors:
            return tensors
        sample = next((tensor for tensor in tensors if tensor is not None), None)
        if sample is None:
            return tensors
        null = Tensor(sample.name, sample.datatype, sample.shape, zeros(sample.datatype, sample.shape))
        return [
            null if tensor is None and row.null else tensor for tensor, row in zip(tensors, self._batch, strict=True)
        ]


def _made(name: str, tensors: Sequence[Tensor | None], leading: shapes.Shape = ()) -> Column:
    """The interface's tensors. Tensors of one shape share one buffer, and each is writable."""
    first = tensors[0]
    if first is not None and first.datatype != "BYTES" and len(tensors) > 1:
        datatype, shape = first.datatype, first.shape
        parts: list[bytes] = []
        for tensor in tensors:
            if tensor is None or tensor.shape != shape:
                break
            parts.append(tensor.raw)
        else:
            arrays = _array(datatype, (len(parts), *leading, *shape), parts)
            # By index: numpy ends an iteration over an array with an error, whose text it makes each time.
            return [TypedTensor(name, arrays[position], datatype) for position in range(len(parts))]
    return [None if tensor is None else tensor_of(name, tensor, leading) for tensor in tensors]


def tensor_of(name: str, tensor: Tensor, leading: shapes.Shape = ()) -> ModelTensor:
    """A tensor as the model gets it; writable."""
    if tensor.datatype == "BYTES":
        array = to_numpy(tensor).reshape((*leading, *tensor.shape))
    else:
        array = _array(tensor.datatype, (*leading, *tensor.shape), [tensor.raw])
    return TypedTensor(name, array, tensor.datatype)


def _array(datatype: str, shape: shapes.Shape, parts: Sequence[bytes]) -> NDArray[Any]:
    return np.ndarray(shape, NUMPY_TYPE["UINT16" if datatype == "BF16" else datatype], bytearray().join(parts))
