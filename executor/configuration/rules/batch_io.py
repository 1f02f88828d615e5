"""Batch inputs and outputs: their rules, with Triton's messages, and their values.

Source: triton-spec section 4, "batch_input / batch_output"; Triton core, model_config_utils.cc (ValidateBatchIO).
"""

from __future__ import annotations

from collections.abc import Container

from executor.configuration.names import BATCH_INPUT_NAMES, BATCH_OUTPUT_NAMES, TYPE_NAMES, Part, wire_type
from shared.configuration.schema import ConfigMessage
from shared.contract.errors import ConfigError
from shared.contract.model_config import BatchInput, BatchInputKind, BatchOutput

_BATCH_INPUT_TYPES = ("TYPE_INT32", "TYPE_FP32")


def check_batch_io(config: ConfigMessage) -> None:
    """Every kind is known, has one source that is an input, and targets that a model can have.

    raises  ConfigError for the first broken rule
    """
    model = config.name
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    for entry in config.batch_input:
        _check_source(model, "batch input", BATCH_INPUT_NAMES, entry)
        if TYPE_NAMES.get(entry.data_type) not in _BATCH_INPUT_TYPES:
            raise ConfigError(f"batch input data type must be TYPE_INT32 or TYPE_FP32 for {model}")
        _check_source_name(model, inputs, entry)
        if not entry.target_name:
            raise ConfigError(f"batch input must specify 'target_name' for {model}")
        _check_targets_are_new(model, inputs, entry)
    for entry in config.batch_output:
        _check_source(model, "batch output", BATCH_OUTPUT_NAMES, entry)
        _check_source_name(model, inputs, entry)
        _check_outputs(model, outputs, entry)


def batch_inputs(config: ConfigMessage) -> tuple[BatchInput, ...]:
    """The values of valid batch inputs, in the order of their declaration."""
    return tuple(
        BatchInput(
            kind=BatchInputKind(BATCH_INPUT_NAMES[entry.kind]),
            names=tuple(entry.target_name),
            datatype=wire_type(entry.data_type),
            source=entry.source_input[0],
        )
        for entry in config.batch_input
    )


def batch_outputs(config: ConfigMessage) -> tuple[BatchOutput, ...]:
    """The values of valid batch outputs, in the order of their declaration."""
    return tuple(
        BatchOutput(names=tuple(entry.target_name), source=entry.source_input[0]) for entry in config.batch_output
    )


def _check_source(model: str, what: str, kinds: dict[int, str], entry: Part) -> None:
    kind = kinds.get(entry.kind)
    if kind is None:
        raise ConfigError(f"unknown {what} kind '' for {model}")
    if len(entry.source_input) != 1:
        raise ConfigError(f"{what} kind '{kind}' expects 1 source input, got {len(entry.source_input)} for {model}")


def _check_source_name(model: str, inputs: Container[str], entry: Part) -> None:
    if entry.source_input[0] not in inputs:
        raise ConfigError(f"unknown source input name '{entry.source_input[0]}' for {model}")


def _check_targets_are_new(model: str, inputs: Container[str], entry: Part) -> None:
    """Triton would let a client's tensor and the batcher's fight over one name; we refuse it."""
    for name in entry.target_name:
        if name in inputs:
            raise ConfigError(f"batch input target '{name}' is also a model input for {model}")


def _check_outputs(model: str, outputs: Container[str], entry: Part) -> None:
    seen: set[str] = set()
    for name in entry.target_name:
        if name not in outputs:
            raise ConfigError(f"unknown target output name '{name}' for {model}")
        if name in seen:
            raise ConfigError(f"target output name '{name}' can only be specified once for {model}")
        seen.add(name)
