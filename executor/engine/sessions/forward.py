"""Calls a session with torch tensors, as if it were a torch module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from executor.engine.pytorch.state_values import Texts
from executor.engine.sessions.checks import SessionCall
from executor.engine.shapes import Shape

Value = torch.Tensor | Texts

Compute = Callable[[Mapping[str, Value]], Mapping[str, Value]]
"""One call of a session: its inputs by name -> the wanted outputs by name."""

Run = Callable[[Mapping[str, NDArray[Any]]], Sequence[NDArray[Any]]]
"""The same with arrays: its inputs by name -> `SessionCall.outputs`, in their order."""


class SessionForward:
    """The call of one session, as `TorchEngine` makes it."""

    def __init__(self, call: SessionCall, compute: Compute) -> None:
        self._compute = compute
        tensors = {**call.signature.inputs, **call.signature.optional}
        self._scalars = {name for name, tensor in tensors.items() if tensor.dims == ()}

    def __call__(self, **given: Value) -> dict[str, Value]:
        """Runs the model. Raises what its runtime raises."""
        # The configuration has no scalars: it says [1].
        found = self._compute({name: self._shaped(name, value) for name, value in given.items()})
        return {name: value if value.shape else _reshaped(value, (1,)) for name, value in found.items()}

    def _shaped(self, name: str, value: Value) -> Value:
        return _reshaped(value, ()) if name in self._scalars else value


class Lent:
    """Calls a session with numpy arrays.

    On a CPU a tensor's memory is lent to the session, and what the session returns is taken over: nothing is copied
    here. numpy has no bfloat16: such a tensor travels as int16 with the same bits.
    """

    def __init__(self, call: SessionCall, run: Run) -> None:
        self._run = run
        self._outputs = [(name, call.signature.outputs[name].datatype) for name in call.outputs]

    def __call__(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        found = self._run({name: _array(value) for name, value in inputs.items()})
        return {name: _value(array, datatype) for (name, datatype), array in zip(self._outputs, found, strict=True)}


def _reshaped(value: Value, shape: Shape) -> Value:
    return Texts(value, shape) if isinstance(value, Texts) else value.reshape(shape)


def _array(value: Value) -> NDArray[Any]:
    if isinstance(value, Texts):
        return np.array(value, dtype=object).reshape(value.shape)
    return (value.view(torch.int16) if value.dtype is torch.bfloat16 else value).cpu().numpy()


def _value(array: NDArray[Any], datatype: str) -> Value:
    if datatype == "BYTES":
        texts = (element.decode() if isinstance(element, bytes) else str(element) for element in np.ravel(array))
        return Texts(texts, np.shape(array))
    # By its name, because numpy has two types of 64 bits that are equal, and torch knows one of them.
    owned = np.asarray(array)
    owned = owned.view(np.dtype(owned.dtype.str))
    value = torch.from_numpy(owned if owned.flags.writeable else owned.copy())
    return value.view(torch.bfloat16) if datatype == "BF16" else value
