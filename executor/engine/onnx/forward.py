"""Calls an ONNX session with torch tensors, as if it were a torch module.

On a CPU, a tensor's memory is lent to the session, and what the session returns is taken over: nothing is copied. On a
GPU the same is done by io binding, so that states never leave the device. It also serves datatypes that numpy lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from executor.engine.onnx.session import OnnxModel, ort
from executor.engine.pytorch.datatypes import TORCH_TYPE

Value = torch.Tensor | list[str]
"""A tensor; of BYTES, its elements in order."""


class OnnxForward:
    """The call of one session. Returns the wanted outputs by name."""

    def __init__(
        self,
        model: OnnxModel,
        device: torch.device,
        text_shapes: Mapping[str, tuple[int, ...]],
        outputs: tuple[str, ...],
        run_options: Any,
    ) -> None:
        """text_shapes: of inputs of BYTES, with at most one dimension of -1; outputs: those that are wanted"""
        self._session = model.session
        self._device = device
        self._text_shapes = text_shapes
        self._outputs = {name: model.outputs[name] for name in outputs}
        self._run_options = run_options
        tensors = {**model.inputs, **model.optional}
        self._scalars = {name for name, tensor in tensors.items() if not tensor.dims}
        lacks_numpy = any(tensor.datatype == "BF16" for tensor in (*tensors.values(), *self._outputs.values()))
        self._is_bound = device.type != "cpu" or lacks_numpy

    def __call__(self, **given: Value) -> dict[str, Value]:
        """Runs the model. Raises what ONNX Runtime raises."""
        inputs = {name: self._shaped(name, value) for name, value in given.items()}
        found = self._bound(inputs) if self._is_bound else self._lent(inputs)
        # The configuration has no scalars: it says [1].
        return {name: value if isinstance(value, list) or value.dim() else value[None] for name, value in found.items()}

    def _shaped(self, name: str, value: Value) -> Value:
        return value.reshape(()) if name in self._scalars and not isinstance(value, list) else value

    def _lent(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        arrays = {
            name: np.array(value, dtype=object).reshape(self._text_shapes[name])
            if isinstance(value, list)
            else value.numpy()
            for name, value in inputs.items()
        }
        found = self._session.run(list(self._outputs), arrays, self._run_options)
        return {
            name: [str(element) for element in np.ravel(array)]
            if tensor.datatype == "BYTES"
            else torch.from_numpy(np.asarray(array))
            for (name, tensor), array in zip(self._outputs.items(), found, strict=True)
        }

    def _bound(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        binding = self._session.io_binding()
        for name, value in inputs.items():
            assert isinstance(value, torch.Tensor), "a model with strings is not bound"
            binding.bind_ortvalue_input(name, ort.OrtValue.from_dlpack(value.contiguous()))
        for name in self._outputs:
            binding.bind_output(name, self._device.type, self._device.index or 0)
        # ONNX Runtime has a stream of its own.
        binding.synchronize_inputs()
        self._session.run_with_iobinding(binding, self._run_options)
        binding.synchronize_outputs()
        values = (torch.from_dlpack(value) for value in binding.get_outputs())
        return {
            name: value.view(torch.bool) if tensor.datatype == "BOOL" else value.view(TORCH_TYPE[tensor.datatype])
            for (name, tensor), value in zip(self._outputs.items(), values, strict=True)
        }
