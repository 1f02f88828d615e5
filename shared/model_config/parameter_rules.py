"""Rules of those parameters that mean something to the mesh. All others are the model's own.

    checkpoint_interval          steps between two checkpoints of a sequence, default 1
    orphan_grace_microseconds    idle time left to a sequence whose connection was lost
    TRITON_BATCH_STRATEGY_PATH   Triton's custom batching (triton-spec 3.4)

Source: DESIGN 5 and 6, triton-spec sections 1.1 and 3.4.
"""

from __future__ import annotations

from shared.errors import ConfigError
from shared.model_config.schema import ConfigMessage

_SEQUENCE_PARAMETERS = ("checkpoint_interval", "orphan_grace_microseconds")
_WHOLE_DIGITS_MAX = 18


def check_parameters(config: ConfigMessage) -> list[str]:
    """Values that the mesh reads; returns notes on those without effect.

    raises  ConfigError for the first broken rule
    """
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    model, stateful = config.name, config.HasField("sequence_batching")
    interval = parameters.get("checkpoint_interval", "1")
    if not _is_whole(interval) or int(interval) < 1:
        raise ConfigError(f"parameter 'checkpoint_interval' must be a positive integer for {model}, got '{interval}'")
    grace = parameters.get("orphan_grace_microseconds", "0")
    if not _is_whole(grace):
        raise ConfigError(
            f"parameter 'orphan_grace_microseconds' must be a non-negative integer for {model}, got '{grace}'"
        )
    if "TRITON_BATCH_STRATEGY_PATH" in parameters and not stateful:
        raise ConfigError(
            f"parameter 'TRITON_BATCH_STRATEGY_PATH' is not supported for {model}: the mesh loads no batching libraries"
        )
    notes = [
        f"parameter '{name}' has no effect on a {'stateful' if stateful else 'stateless'} model"
        for name in (("TRITON_BATCH_STRATEGY_PATH",) if stateful else _SEQUENCE_PARAMETERS)
        if name in parameters
    ]
    if stateful and int(grace):
        notes.append("parameter 'orphan_grace_microseconds' is not applied yet: idle sequences end by their idle time")
    if stateful and int(interval) > 1 and not config.sequence_batching.state:
        notes.append("parameter 'checkpoint_interval' has no effect: the model declares no state")
    return notes


def _is_whole(text: str) -> bool:
    """Whether the text is a number that fits 64 bits, without sign."""
    return text.isascii() and text.isdigit() and len(text) <= _WHOLE_DIGITS_MAX
