"""Completes a configuration from a model's signature: inputs, outputs, and whether it takes batches.

As Triton does, where inputs or outputs are missing. Unlike Triton, tensors that the configuration declares as states
or controls are not declared as inputs and outputs once more.

Source: Triton onnxruntime backend, onnxruntime.cc (AutoCompleteConfig, AutoCompleteMaxBatch, AutoCompleteIO).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from executor.engine.pytorch.signature import taken_names
from executor.engine.sessions.signature import SessionSignature, SessionTensor
from shared.contract.errors import ConfigError
from shared.contract.tensors import config_type, shape_text

BATCH_DEFAULT = 4
"""Triton's backend setting `default-max-batch-size`."""


def completed(config_json: str, signature_of: Callable[[Mapping[str, Any]], SessionSignature]) -> str:
    """The configuration with what the model says; Triton's JSON in, the same out.

    signature_of  opens the model that a decoded configuration describes
    raises        ConfigError for a batch size that the model cannot have, and for a tensor that the model does not
                  describe; LoadError if the model cannot be opened
    """
    config: dict[str, Any] = json.loads(config_json)
    has_inputs = bool(config.get("input") or config.get("batch_input"))
    if has_inputs and config.get("output"):
        return config_json
    signature = signature_of(config)
    _complete_batch(config, signature)
    taken_in, given_out = taken_names(config)
    if not has_inputs:
        _declare(config, "input", [tensor for name, tensor in signature.inputs.items() if name not in taken_in])
    if not config.get("output"):
        _declare(config, "output", [tensor for name, tensor in signature.outputs.items() if name not in given_out])
    return json.dumps(config)


def _complete_batch(config: dict[str, Any], signature: SessionSignature) -> None:
    """A model takes batches if the first dimension of every tensor is variable."""
    tensors = (*signature.inputs.values(), *signature.outputs.values())
    unbatched = [tensor for tensor in tensors if not (tensor.dims and tensor.dims[0] == -1)]
    if unbatched:
        if int(config.get("max_batch_size", 0)):
            told = ", ".join(f"'{tensor.name}' {shape_text(tensor.dims or ())}" for tensor in unbatched)
            raise ConfigError(
                f"autofill failed for model '{config.get('name')}': model does not support batching while non-zero "
                f"max_batch_size is specified: not variable is the first dimension of {told}"
            )
        return
    config["max_batch_size"] = int(config.get("max_batch_size", 0)) or BATCH_DEFAULT
    if config["max_batch_size"] > 1 and "sequence_batching" not in config:
        config.setdefault("dynamic_batching", {})


def _declare(config: dict[str, Any], field: str, tensors: Iterable[SessionTensor]) -> None:
    batched = int(config.get("max_batch_size", 0)) > 0
    declared: list[dict[str, Any]] = []
    for tensor in tensors:
        if tensor.dims is None:
            raise ConfigError(
                f"autofill failed for model '{config.get('name')}': the model does not say how many dimensions its "
                f"{field} '{tensor.name}' has; give the {field}s in the configuration"
            )
        dims = list(tensor.dims[1:] if batched else tensor.dims)
        entry: dict[str, Any] = {"name": tensor.name, "data_type": config_type(tensor.datatype), "dims": dims or [1]}
        if batched and not dims:
            entry["reshape"] = {"shape": []}
        declared.append(entry)
    config[field] = declared
