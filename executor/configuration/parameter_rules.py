"""Rules of those parameters that mean something to the mesh. All others are the model's own.

    checkpoint_interval          steps between two checkpoints of a sequence, default 1
    retry_replies                replies of a sequence that are kept for retries, 1 to 64, default 8
    retry_reply_bytes            bytes of those beyond the newest, default 65536
    fixed_shape                  "true" or "rows": results do not depend on a batch's other rows, default "false"
    sequence_recovery            of a model that keeps its sequences' state itself: none, replay, or methods (its own
                                 `checkpoint` and `restore`, the default where it has them)
    sequence_log_steps           with replay: steps since START that are kept, default 1000
    sequence_log_bytes           with replay: their bytes, default 16 MiB
    virtual_slots                whether an idle sequence gives up its slot while others wait, default true
    orphan_grace_microseconds    idle time left to a sequence whose connection is gone before its END,
                                 default 0: all of it
    TRITON_BATCH_STRATEGY_PATH   Triton's custom batching (triton-spec 3.4); here a Python file
    EXECUTION_ENV_PATH           the python backend's packed environment, which the mesh does not unpack

Source: docs/triton/dialect.md; docs/design/failures.md; triton-spec sections 1.1 and 3.4.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.configuration.schema import ConfigMessage
from shared.contract.errors import ConfigError
from shared.contract.limits import RETRY_IDS
from shared.contract.model_config import FixedShape, SequenceRecovery

_SEQUENCE_PARAMETERS = (
    "checkpoint_interval",
    "sequence_recovery",
    "sequence_log_steps",
    "sequence_log_bytes",
    "retry_replies",
    "retry_reply_bytes",
    "fixed_shape",
    "virtual_slots",
    "orphan_grace_microseconds",
)
_POSITIVE = ("checkpoint_interval", "sequence_log_steps", "sequence_log_bytes")
_LOG = ("sequence_log_steps", "sequence_log_bytes")
_WHOLE_DIGITS_MAX = 18
PYTHON = "python"
"""The one backend whose models may hand their state out."""
STRATEGY = "TRITON_BATCH_STRATEGY_PATH"


def check_parameters(config: ConfigMessage) -> list[str]:
    """Values that the mesh reads; returns notes on those without effect.

    raises  ConfigError for the first broken rule
    """
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    model, stateful = config.name, config.HasField("sequence_batching")
    for name in _POSITIVE:
        text = parameters.get(name, "1")
        if not _is_whole(text) or int(text) < 1:
            raise ConfigError(f"parameter '{name}' must be a positive integer for {model}, got '{text}'")
    recovery = parameters.get("sequence_recovery")
    if recovery is not None and recovery not in list(SequenceRecovery):
        raise ConfigError(
            f"parameter 'sequence_recovery' must be none, replay or methods for {model}, got '{recovery}'"
        )
    fixed = parameters.get("fixed_shape", FixedShape.OFF)
    if fixed not in list(FixedShape):
        raise ConfigError(f"parameter 'fixed_shape' must be true, rows or false for {model}, got '{fixed}'")
    virtual = parameters.get("virtual_slots", "true")
    if virtual not in ("true", "false"):
        raise ConfigError(f"parameter 'virtual_slots' must be 'true' or 'false' for {model}, got '{virtual}'")
    grace = parameters.get("orphan_grace_microseconds", "0")
    if not _is_whole(grace):
        raise ConfigError(
            f"parameter 'orphan_grace_microseconds' must be a non-negative integer for {model}, got '{grace}'"
        )
    _check_retries(parameters, model)
    strategy = parameters.get(STRATEGY)
    if strategy is not None and not stateful and not strategy.endswith(".py"):
        raise ConfigError(
            f"parameter '{STRATEGY}' names '{strategy}', which is not supported for {model}: a batch strategy is a "
            "Python file here"
        )
    notes = [
        f"parameter '{name}' has no effect on a {'stateful' if stateful else 'stateless'} model"
        for name in ((STRATEGY,) if stateful else _SEQUENCE_PARAMETERS)
        if name in parameters
    ]
    if strategy is not None and not stateful and not config.HasField("dynamic_batching"):
        notes.append(f"parameter '{STRATEGY}' has no effect without dynamic_batching")
    if "EXECUTION_ENV_PATH" in parameters:
        notes.append("parameter 'EXECUTION_ENV_PATH' has no effect: the model runs in the executor's own environment")
    return notes + (_recovery_notes(config, parameters) if stateful else [])


def _recovery_notes(config: ConfigMessage, parameters: Mapping[str, str]) -> list[str]:
    """What has no effect on a stateful model, as far as that can be told before it is loaded."""
    notes: list[str] = []
    recovery = parameters.get("sequence_recovery")
    if config.sequence_batching.state:
        if recovery is not None:
            notes.append("parameter 'sequence_recovery' has no effect: the model declares its state")
    elif int(parameters.get("checkpoint_interval", "1")) > 1 and config.backend != PYTHON:
        notes.append("parameter 'checkpoint_interval' has no effect: the model declares no state")
    if recovery != SequenceRecovery.REPLAY:
        notes += [
            f"parameter '{name}' has no effect without sequence_recovery: replay" for name in _LOG if name in parameters
        ]
    if "virtual_slots" in parameters and not config.sequence_batching.state and config.backend != PYTHON:
        notes.append("parameter 'virtual_slots' has no effect: the model declares no state")
    return notes


def _check_retries(parameters: Mapping[str, str], model: str) -> None:
    count = parameters.get("retry_replies", "1")
    if not _is_whole(count) or not 1 <= int(count) <= RETRY_IDS:
        raise ConfigError(
            f"parameter 'retry_replies' must be an integer from 1 to {RETRY_IDS} for {model}, got '{count}'"
        )
    size = parameters.get("retry_reply_bytes", "0")
    if not _is_whole(size):
        raise ConfigError(f"parameter 'retry_reply_bytes' must be a non-negative integer for {model}, got '{size}'")


def _is_whole(text: str) -> bool:
    """Whether the text is a number that fits 64 bits, without sign."""
    return text.isascii() and text.isdigit() and len(text) <= _WHOLE_DIGITS_MAX
