"""Warm-up samples: their rules, with Triton's messages, and their values. The content of files is looked at in `files`.

Triton finds these faults when it builds an instance; here the configuration is refused as a whole, in the same words.
A warm-up request has no id, which is why Triton begins some of its messages as it does.

Source: triton-spec section 4, "model_warmup"; Triton core, backend_model_instance.cc (GenerateWarmupData).
"""

from __future__ import annotations

from executor.configuration.names import Part, check_rank, has_type, leaves_directory, wire_type
from shared.configuration.schema import ConfigMessage
from shared.contract.errors import ConfigError
from shared.contract.model_config import WarmupInput, WarmupSample, WarmupSource

NO_ID = "[request id: <id_unknown>] "

_SOURCES = {"zero_data": WarmupSource.ZERO, "random_data": WarmupSource.RANDOM, "input_data_file": WarmupSource.FILE}


def check_warmup(config: ConfigMessage) -> list[str]:
    """Checks every tensor of every sample that is not skipped; returns notes on odd but allowed values.

    raises  ConfigError for the first broken rule
    """
    notes: list[str] = []
    for sample in config.model_warmup:
        if sample.batch_size == 0:
            notes.append(f"skipping batch 0 warmup sample '{sample.name}'")
            continue
        if sample.batch_size > max(1, config.max_batch_size):
            raise ConfigError(
                f"warmup sample '{sample.name}' has batch_size {sample.batch_size}, but max_batch_size is "
                f"{config.max_batch_size} for {config.name}"
            )
        for name in sorted(sample.inputs):
            _check_input(config.name, sample.name, name, sample.inputs[name])
        notes += _missing(config, sample)
    return notes


def warmup_samples(config: ConfigMessage) -> tuple[WarmupSample, ...]:
    """The values of valid samples, in order; those of batch size 0 are left out."""
    return tuple(
        WarmupSample(
            name=sample.name,
            batch_size=sample.batch_size,
            inputs={name: _input(sample.inputs[name]) for name in sorted(sample.inputs)},
            count=max(1, sample.count),
        )
        for sample in config.model_warmup
        if sample.batch_size
    )


def _input(tensor: Part) -> WarmupInput:
    return WarmupInput(
        datatype=wire_type(tensor.data_type),
        dims=tuple(tensor.dims),
        source=_SOURCES[tensor.WhichOneof("input_data_type")],
        file=tensor.input_data_file,
    )


def _check_input(model: str, sample: str, name: str, tensor: Part) -> None:
    if not has_type(tensor):
        raise ConfigError(f"warmup sample '{sample}' must specify 'data_type' of input '{name}' for {model}")
    check_rank(model, f"warmup sample '{sample}' input '{name}'", tensor.dims)
    if any(dim < 0 for dim in tensor.dims):
        raise ConfigError(f"warmup setting expects all variable-size dimensions are specified for input '{name}'")
    if tensor.WhichOneof("input_data_type") is None:
        raise ConfigError(f"{NO_ID}warmup setting expects input '{name}' to have input_data_type set")
    if leaves_directory(tensor.input_data_file):
        raise ConfigError(f"warmup file '{tensor.input_data_file}' of input '{name}' must lie in 'warmup' for {model}")


def _missing(config: ConfigMessage, sample: Part) -> list[str]:
    """Inputs and controls that the model will look for in vain while it warms up."""
    wanted = [tensor.name for tensor in config.input if not tensor.optional]
    wanted += [tensor.name for tensor in config.sequence_batching.control_input]
    return [
        f"warmup sample '{sample.name}' has no tensor '{name}', which every request of the model has"
        for name in wanted
        if name not in sample.inputs
    ]
