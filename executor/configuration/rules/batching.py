"""Rules of the dynamic and the sequence batcher, with Triton's messages.

Source: triton-spec sections 1.1 and 3.1; Triton core, model_config_utils.cc (ValidateModelConfig).
"""

from __future__ import annotations

from collections.abc import Iterable

from executor.configuration.names import QUEUE_DELAY
from executor.configuration.rules.controls import check_controls
from shared.configuration.schema import ConfigMessage
from shared.contract.errors import ConfigError


def check_batching(config: ConfigMessage) -> list[str]:
    """Checks both batchers and the response cache; returns notes on odd but allowed values.

    raises  ConfigError for the first broken rule
    """
    notes: list[str] = []
    if config.HasField("dynamic_batching"):
        notes += _check_dynamic_batching(config)
    check_response_cache(config)
    if config.HasField("sequence_batching"):
        notes += _check_sequence_batching(config)
    return notes


def check_response_cache(config: ConfigMessage) -> None:
    """Which models the response cache refuses (triton-spec 1.1, 4). Raises ConfigError."""
    if not config.response_cache.enable:
        return
    refusal = f"Response Cache does not currently support model {config.name} with"
    if config.HasField("sequence_batching"):
        raise ConfigError(f"{refusal} sequence batching scheduler. Please disable the response cache.")
    if config.model_transaction_policy.decoupled:
        raise ConfigError(f"{refusal} 'decoupled' transaction policy. Please disable the response cache.")


def _check_dynamic_batching(config: ConfigMessage) -> list[str]:
    model, dynamic = config.name, config.dynamic_batching
    _check_sizes(config, dynamic.preferred_batch_size, "dynamic batching preferred size")
    levels = dynamic.priority_levels
    if levels:
        if not 1 <= dynamic.default_priority_level <= levels:
            raise ConfigError(f"default priority level must be in range [1, {levels}] for {model}")
        if any(not 1 <= level <= levels for level in dynamic.priority_queue_policy):
            raise ConfigError(f"priority queue policy must have priority level in range [1, {levels}] for {model}")
    if dynamic.preserve_ordering:
        _check_ordering(config)
    if not levels and (dynamic.priority_queue_policy or dynamic.default_priority_level):
        return ["dynamic_batching: priorities have no effect without priority_levels"]
    return []


def _check_ordering(config: ConfigMessage) -> None:
    model, dynamic = config.name, config.dynamic_batching
    if dynamic.priority_levels > 1:
        raise ConfigError(f"Only one priority level is allowed when 'preserve_ordering' is true for {model}")
    levels = dynamic.priority_queue_policy
    for policy in (dynamic.default_queue_policy, *(levels[level] for level in sorted(levels))):
        # In the dialect (`timeout_action`) a request's own timeout counts where the policy has none.
        has_timeouts = policy.default_timeout_microseconds or dynamic.timeout_action
        if has_timeouts and policy.timeout_action == QUEUE_DELAY:
            raise ConfigError(
                f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {model}"
            )


def _check_sequence_batching(config: ConfigMessage) -> list[str]:
    model, sequence = config.name, config.sequence_batching
    check_controls(config)
    _check_sizes(config, sequence.oldest.preferred_batch_size, "sequence batching preferred batch size")
    if not 0.0 <= sequence.direct.minimum_slot_utilization <= 1.0:
        raise ConfigError(f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {model}")
    declared = {tensor.name for tensor in config.input}
    made = [control.name for control in sequence.control_input] + [state.input_name for state in sequence.state]
    return [
        f"input '{name}' is also a control or state tensor: the server's own value is used"
        for name in made
        if name in declared
    ]


def _check_sizes(config: ConfigMessage, sizes: Iterable[int], what: str) -> None:
    for size in sizes:
        if size <= 0:
            raise ConfigError(f"{what} must be positive for {config.name}")
        if size > config.max_batch_size:
            raise ConfigError(f"{what} must be <= max batch size for {config.name}")
