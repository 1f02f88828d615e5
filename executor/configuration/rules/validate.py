"""The rules that a normalised configuration must keep, with Triton's messages, and their order.

Where Triton has no message, ours is written in its manner. Nothing is changed here, and nothing is read from disk.
If two rules are broken, the message is the one that Triton gives first: batchers and metrics come before instances,
these before tensors, and states last, because Triton looks at them when it makes the batcher.

Source: triton-spec sections 1.1, 1.2, 2, 3.1 and 4; Triton core, model_config_utils.cc (ValidateModelConfig).
"""

from __future__ import annotations

import math

from google.protobuf.message import Message

from executor.configuration.names import leaves_directory
from executor.configuration.rules.batch_io import check_batch_io
from executor.configuration.rules.batching import check_batching
from executor.configuration.rules.ensembles import check_ensemble, is_ensemble
from executor.configuration.rules.instances import check_instance_groups
from executor.configuration.rules.metrics import check_metrics
from executor.configuration.rules.parameters import check_parameters
from executor.configuration.rules.states import check_states
from executor.configuration.rules.tensors import check_tensors
from executor.configuration.rules.warmup import check_warmup
from shared.configuration.schema import ConfigMessage
from shared.contract.errors import ConfigError

_NAME_LENGTH_MAX = 256


def check_name(name: str, directory: str) -> None:
    """A model's name: the directory's, and fit for paths, URLs and Redis keys.

    raises  ConfigError
    """
    if not name:
        raise ConfigError("Model name cannot be empty. Please enter a valid name to deploy.")
    if name in (".", "..") or "/" in name or "\\" in name:
        raise ConfigError(f"invalid model name '{name}', model name must not contain path traversal characters")
    if "|" in name or not name.isprintable():
        raise ConfigError(f"invalid model name {name!r}, model name must not contain '|' or unprintable characters")
    if len(name) > _NAME_LENGTH_MAX:
        raise ConfigError(f"invalid model name '{name[:32]}...', longer than {_NAME_LENGTH_MAX} characters")
    if name != directory:
        raise ConfigError(
            f"unexpected directory name '{directory}' for model '{name}', directory name must equal model name"
        )


def validate(config: ConfigMessage, *, dialect: bool, gpu_count: int) -> list[str]:
    """Checks everything that the configuration alone can tell; returns notes on odd but allowed values.

    dialect    the configuration is in the dialect, which allows `gpus` with KIND_CPU
    gpu_count  GPUs of this executor
    raises     ConfigError for the first broken rule
    """
    if config.max_batch_size < 0:
        raise ConfigError(f"'max_batch_size' must be non-negative value for {config.name}")
    _check_filename(config)
    if is_ensemble(config):
        notes = check_ensemble(config)
        check_metrics(config)
        check_tensors(config)
        _check_numbers(config, config.name)
        return notes
    notes = check_batching(config)
    check_metrics(config)
    notes += check_instance_groups(config, dialect=dialect, gpu_count=gpu_count)
    check_tensors(config)
    check_batch_io(config)
    notes += check_parameters(config)
    notes += check_warmup(config)
    notes += check_states(config)
    _check_numbers(config, config.name)
    return notes


def _check_numbers(message: Message, model: str) -> None:
    """Refuses infinities and NaN: gateways get a model as JSON, which has no form for them."""
    for field, value in message.ListFields():
        of_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        for element in value.values() if of_map else value if field.is_repeated else (value,):
            if isinstance(element, Message):
                _check_numbers(element, model)
            elif isinstance(element, float) and not math.isfinite(element):
                raise ConfigError(f"'{field.name}' must be finite, not {element}, for {model}")


def _check_filename(config: ConfigMessage) -> None:
    if leaves_directory(config.default_model_filename):
        raise ConfigError(
            f"default_model_filename '{config.default_model_filename}' must name a file inside the version directory "
            f"for {config.name}"
        )
