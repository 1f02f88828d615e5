"""Rules of the parameters that mean something to the mesh (`executor.configuration.parameters`).

Source: docs/triton/dialect.md; docs/design/failures.md; triton-spec sections 1.1 and 3.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from executor.configuration.parameters import CPU_INPUTS, ENVIRONMENT, PARAMETERS, PROCESS, STRATEGY, For
from shared.configuration.schema import ConfigMessage
from shared.contract.errors import ConfigError
from shared.contract.limits import RETRY_IDS
from shared.contract.model_config import FixedShape, SequenceRecovery

_SEQUENCE_PARAMETERS = tuple(each.name for each in PARAMETERS if each.of is For.SEQUENCES)
_LOG = ("sequence_log_steps", "sequence_log_bytes")
_WHOLE_DIGITS_MAX = 18
PYTHON = "python"
"""The one backend whose models may hand their state out."""
_READ_ALONE = tuple(each.backend for each in For if each.backend not in ("", PYTHON))
"""Backends of which nobody but the mesh reads parameters. A `model.py` may read any."""
_WITHOUT_EFFECT = (
    ("openvino", "ENABLE_BATCH_PADDING", "the model is given batches of every size"),
    ("tensorflow", "MAX_SESSION_SHARE_COUNT", "each instance has a session of its own"),
)
"""Backend, parameter of it, and why it has no effect."""


def check_parameters(config: ConfigMessage) -> list[str]:
    """Checks the values that the mesh reads; returns notes on parameters without effect.

    raises  ConfigError for the first broken rule
    """
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    model, stateful = config.name, config.HasField("sequence_batching")
    for name, (wanted, fits) in _VALUES.items():
        if name in parameters and not fits(parameters[name]):
            raise ConfigError(f"parameter '{name}' must be {wanted} for {model}, got '{parameters[name]}'")
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
    notes += [
        f"parameter '{name}' has no effect: {because}"
        for backend, name, because in _WITHOUT_EFFECT
        if name in parameters and config.backend == backend
    ]
    if ENVIRONMENT in parameters and parameters.get(PROCESS) == "false":
        raise ConfigError(
            f"parameter '{ENVIRONMENT}' of {model} needs a process for each instance, and '{PROCESS}' says 'false'"
        )
    notes += [
        f"parameter '{each.name}' has no effect: the backend is {config.backend}, and {each.of.backend} models have it"
        for each in PARAMETERS
        if each.name in parameters and config.backend in _READ_ALONE and each.of.backend not in ("", config.backend)
    ]
    if parameters.get(CPU_INPUTS) == "no":
        notes.append(f"parameter '{CPU_INPUTS}' has no effect: inputs are on the CPU")
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
    if "journal_bytes" in parameters and "journal_steps" not in parameters:
        notes.append("parameter 'journal_bytes' has no effect without journal_steps")
    if "journal_steps" in parameters and config.model_transaction_policy.decoupled:
        notes.append("parameter 'journal_steps' has no effect: the model is decoupled")
    if "virtual_slots" in parameters and not config.sequence_batching.state and config.backend != PYTHON:
        notes.append("parameter 'virtual_slots' has no effect: the model declares no state")
    return notes


def _is_whole(text: str) -> bool:
    """Whether the text is a number that fits 64 bits, without sign."""
    return text.isascii() and text.isdigit() and len(text) <= _WHOLE_DIGITS_MAX


def _is_positive(text: str) -> bool:
    return _is_whole(text) and int(text) >= 1


_VALUES: Mapping[str, tuple[str, Callable[[str], bool]]] = {
    "checkpoint_interval": ("a positive integer", _is_positive),
    "sequence_log_steps": ("a positive integer", _is_positive),
    "sequence_log_bytes": ("a positive integer", _is_positive),
    "journal_steps": ("a positive integer", _is_positive),
    "journal_bytes": ("a positive integer", _is_positive),
    "sequence_recovery": ("none, replay or methods", lambda text: text in list(SequenceRecovery)),
    "fixed_shape": ("true, rows or false", lambda text: text in list(FixedShape)),
    "virtual_slots": ("'true' or 'false'", lambda text: text in ("true", "false")),
    "batch_gathering": ("'on' or 'off'", lambda text: text in ("on", "off")),
    PROCESS: ("'true' or 'false'", lambda text: text in ("true", "false")),
    CPU_INPUTS: ("'yes' or 'no'", lambda text: text in ("yes", "no")),
    "orphan_grace_microseconds": ("a non-negative integer", _is_whole),
    "retry_replies": (f"an integer from 1 to {RETRY_IDS}", lambda text: _is_positive(text) and int(text) <= RETRY_IDS),
    "retry_reply_bytes": ("a non-negative integer", _is_whole),
}
"""What a parameter must be, in words and as a check; the first that is broken is told."""
