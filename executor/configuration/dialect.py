"""Translates the dialect (docs/triton/dialect.md) into Triton's own fields.

Each rule fills a field that Triton knows from a field of the dialect, and leaves the dialect's field in place. So a
translation can be repeated: a translated configuration (the JSON of the config endpoint) is translated to itself.
Contradictions are refused; what was read is told in notes.

    dialect                                      here
    state { name }                               a state whose input and output have that name
    reusable_batch { max_size, candidates }      oldest: max_candidate_sequences, preferred_batch_size
    default_batch_size                           one more preferred batch size
    dynamic_batching beside sequence_batching    lends delay, ordering and preferred sizes to the oldest strategy, and
                                                 its timeout_action to every one
    stateful_model_policy                        sequence_batching with the oldest strategy, idle after ten minutes
    timeout_action in dynamic_batching           COMPLETE: a late request runs after the punctual ones (DELAY). Either
                                                 way a request's own timeout counts, also where a policy has none
    timeout_action in sequence_batching          a step whose own `timeout` ends in the backlog: REJECT fails it with
                                                 its sequence, as Triton does; COMPLETE serves it late. Both end an
                                                 idle sequence: nothing of it is queued when it expires
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from executor.configuration.names import QUEUE_DELAY, enum_names, enum_numbers
from shared.configuration.schema import ConfigMessage
from shared.contract.errors import ConfigError
from shared.contract.model_config import TimeoutAction

_ACTION_NAMES = enum_names("inference.DialectTimeoutAction")
_COMPLETE = enum_numbers("inference.DialectTimeoutAction")["TIMEOUT_COMPLETE"]
_DESCRIBE = enum_numbers("inference.ModelTransactionPolicy.StatefulModelPolicy.TimeoutAction")["DESCRIBE"]

SESSION_IDLE_US = 600_000_000
"""Idle time of a model that has a `stateful_model_policy` and no `sequence_batching`, microseconds. The dialect's
sessions are typed by hand, request by request; Triton's second would end them. Ten minutes is its own example.
"""


def describes_on_expiry(config: ConfigMessage) -> bool:
    """Whether `stateful_model_policy` asks for a description of the state when a sequence expires."""
    return bool(config.model_transaction_policy.stateful_model_policy.timeout_action == _DESCRIBE)


def sequence_timeout_action(config: ConfigMessage) -> TimeoutAction:
    """What becomes of a step that waits for a slot longer than its own `timeout`."""
    complete = _lent_timeout_action(config) == _COMPLETE
    return TimeoutAction.DELAY if complete else TimeoutAction.REJECT


def _lent_timeout_action(config: ConfigMessage) -> int:
    """The sequence batcher's own action, else that of the `dynamic_batching` beside it; 0 for none."""
    return int(config.sequence_batching.timeout_action or config.dynamic_batching.timeout_action)


def translate_dialect(config: ConfigMessage) -> list[str]:
    """Fills Triton's fields from the dialect's, in place; returns what was read, as notes.

    raises  ConfigError where the dialect's fields contradict Triton's, and for a number that no timeout action has
    """
    notes: list[str] = []
    for batching in (config.dynamic_batching, config.sequence_batching):
        if batching.timeout_action not in _ACTION_NAMES:
            raise ConfigError(f"there is no timeout_action {batching.timeout_action} for {config.name}")
    if config.model_transaction_policy.HasField("stateful_model_policy"):
        notes.extend(_translate_policy(config))
    if not config.HasField("sequence_batching"):
        notes.extend(_translate_dynamic(config))
        return notes
    states = config.sequence_batching.state
    notes.extend(_translate_state(config.name, state) for state in states if state.HasField("name"))
    notes.extend(_translate_sequence(config))
    return notes


def _translate_policy(config: ConfigMessage) -> Iterable[str]:
    if not config.HasField("sequence_batching"):
        config.sequence_batching.oldest.SetInParent()
        config.sequence_batching.max_sequence_idle_microseconds = SESSION_IDLE_US
        yield (
            "stateful_model_policy: served by the sequence batcher, oldest strategy; a session is idle after "
            f"{SESSION_IDLE_US // 1_000_000} s"
        )
    if describes_on_expiry(config):
        yield "timeout_action DESCRIBE: an idle sequence's state is described in the log when it expires"


def _translate_dynamic(config: ConfigMessage) -> Iterable[str]:
    """Dialect of a stateless model's batcher."""
    dynamic = config.dynamic_batching
    if dynamic.HasField("default_batch_size"):
        yield _prefer(dynamic.preferred_batch_size, dynamic.default_batch_size)
    if dynamic.timeout_action:
        yield _translate_timeouts(config)


def _translate_timeouts(config: ConfigMessage) -> str:
    """The section's action is the action of each of its queue policies."""
    dynamic = config.dynamic_batching
    levels = dynamic.priority_queue_policy
    policies = {"default_queue_policy": dynamic.default_queue_policy}
    policies |= {f"priority_queue_policy[{level}]": levels[level] for level in sorted(levels)}
    delays = dynamic.timeout_action == _COMPLETE
    for name, policy in policies.items():
        if delays:
            policy.timeout_action = QUEUE_DELAY
        elif policy.timeout_action == QUEUE_DELAY:
            raise _contradiction(config, "dynamic_batching.timeout_action", f"{name}.timeout_action")
    return (
        f"dynamic_batching: timeout_action {_ACTION_NAMES[dynamic.timeout_action]} is read as "
        f"{'DELAY' if delays else 'REJECT'} in every queue policy, and a request's own timeout counts"
    )


def _translate_state(model: str, state: Any) -> str:
    for field in ("input_name", "output_name"):
        if getattr(state, field) not in ("", state.name):
            raise ConfigError(
                f"state '{state.name}' has both 'name' and a different '{field}' '{getattr(state, field)}' for {model}"
            )
        setattr(state, field, state.name)
    return f"state '{state.name}': one tensor, in and out"


def _translate_sequence(config: ConfigMessage) -> Iterable[str]:
    sequence = config.sequence_batching
    beside = config.HasField("dynamic_batching")
    if sequence.HasField("reusable_batch"):
        yield _translate_reusable_batch(config)
    if beside and sequence.WhichOneof("strategy_choice") is None:
        sequence.oldest.SetInParent()
    yield from _translate_sizes(config)
    if beside:
        yield _lend(config)
    if action := _lent_timeout_action(config):
        late = "served late" if sequence_timeout_action(config) is TimeoutAction.DELAY else "refused with its sequence"
        yield (
            f"sequence_batching: a step that waits for a slot longer than its timeout is {late} "
            f"(timeout_action {_ACTION_NAMES[action]}); an idle sequence ends either way"
        )


def _translate_reusable_batch(config: ConfigMessage) -> str:
    sequence = config.sequence_batching
    if sequence.HasField("direct"):
        raise _contradiction(config, "sequence_batching.reusable_batch", "sequence_batching.direct")
    oldest, batch = sequence.oldest, sequence.reusable_batch
    oldest.SetInParent()
    if batch.max_size < 0:
        raise ConfigError(f"reusable_batch max_size must be non-negative value for {config.name}")
    if oldest.max_candidate_sequences not in (0, batch.max_size):
        raise _contradiction(config, "reusable_batch.max_size", "oldest.max_candidate_sequences")
    oldest.max_candidate_sequences = batch.max_size
    for size in batch.candidate_batch_size:
        _prefer(oldest.preferred_batch_size, size)
    return (
        f"reusable_batch: oldest strategy with {batch.max_size or 'max_batch_size'} candidate sequences, "
        f"preferred batch sizes {list(batch.candidate_batch_size)}"
    )


def _translate_sizes(config: ConfigMessage) -> Iterable[str]:
    """`default_batch_size`, wherever it stands, is one more preferred size of the oldest strategy."""
    sequence = config.sequence_batching
    for batching in (sequence, config.dynamic_batching):
        if not batching.HasField("default_batch_size"):
            continue
        if sequence.HasField("oldest"):
            yield _prefer(sequence.oldest.preferred_batch_size, batching.default_batch_size)
        else:
            yield "default_batch_size has no effect on the direct strategy"


def _prefer(sizes: Any, size: int) -> str:
    if size not in sizes:
        sizes.append(size)
    return f"default_batch_size {size} is one of the preferred batch sizes"


def _lend(config: ConfigMessage) -> str:
    dynamic, sequence = config.dynamic_batching, config.sequence_batching
    if not sequence.HasField("oldest"):
        return "dynamic_batching beside sequence_batching has no effect on the direct strategy"
    oldest = sequence.oldest
    oldest.max_queue_delay_microseconds = oldest.max_queue_delay_microseconds or dynamic.max_queue_delay_microseconds
    oldest.preserve_ordering = oldest.preserve_ordering or dynamic.preserve_ordering
    if not oldest.preferred_batch_size:
        oldest.preferred_batch_size.extend(dynamic.preferred_batch_size)
    unused = [name for name in _STATELESS_FIELDS if name in {field.name for field, _ in dynamic.ListFields()}]
    without = f"; without effect on sequences: {', '.join(unused)}" if unused else ""
    return (
        "dynamic_batching beside sequence_batching: its delay, ordering and preferred sizes apply to the batches of "
        f"the oldest strategy{without}"
    )


_STATELESS_FIELDS = ("priority_levels", "default_priority_level", "default_queue_policy", "priority_queue_policy")


def _contradiction(config: ConfigMessage, one: str, other: str) -> ConfigError:
    return ConfigError(f"'{one}' and '{other}' contradict each other for {config.name}")
