"""Calls an ONNX session: with lent arrays on a CPU, by io binding on a GPU.

With io binding states never leave the device. It also serves datatypes that numpy lacks. It has no strings: a model
with strings is called with arrays on a GPU too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from executor.engine.onnx.session import OnnxModel, ort
from executor.engine.pytorch.datatypes import TORCH_TYPE
from executor.engine.sessions.checks import SessionCall
from executor.engine.sessions.forward import Compute, Lent, Value
from shared.contract.errors import LoadError


def compute_of(model: OnnxModel, call: SessionCall, device: torch.device, run_options: Any) -> Compute:
    """How a session is called: with lent arrays, or by io binding on a GPU and for BF16, which numpy lacks.
    Raises LoadError for BF16 beside strings, which no call takes.
    """
    signature = model.signature
    tensors = (*signature.inputs.values(), *signature.optional.values())
    datatypes = {tensor.datatype for tensor in (*tensors, *(signature.outputs[name] for name in call.outputs))}
    if {"BF16", "BYTES"} <= datatypes:
        raise LoadError("the model has strings and BF16, which ONNX Runtime does not take in one call")
    if "BF16" in datatypes or (device.type != "cpu" and "BYTES" not in datatypes):
        return Bound(model, call, device, run_options)
    names = list(call.outputs)
    return Lent(call, lambda arrays: model.session.run(names, arrays, run_options))


class Bound:
    """Calls a session by io binding."""

    def __init__(self, model: OnnxModel, call: SessionCall, device: torch.device, run_options: Any) -> None:
        self._session = model.session
        self._datatypes = {name: call.signature.outputs[name].datatype for name in call.outputs}
        self._device = device
        self._run_options = run_options

    def __call__(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        binding = self._session.io_binding()
        for name, value in inputs.items():
            assert isinstance(value, torch.Tensor), "a model with strings is not bound"
            binding.bind_ortvalue_input(name, ort.OrtValue.from_dlpack(value.contiguous()))
        for name in self._datatypes:
            binding.bind_output(name, self._device.type, self._device.index or 0)
        # ONNX Runtime has a stream of its own.
        binding.synchronize_inputs()
        self._session.run_with_iobinding(binding, self._run_options)
        binding.synchronize_outputs()
        values = (torch.from_dlpack(value) for value in binding.get_outputs())
        return {
            name: value.view(torch.bool) if datatype == "BOOL" else value.view(TORCH_TYPE[datatype])
            for (name, datatype), value in zip(self._datatypes.items(), values, strict=True)
        }
