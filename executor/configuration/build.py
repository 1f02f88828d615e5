"""A valid, normalised configuration message as the frozen values that the mesh works with."""

from __future__ import annotations

from executor.configuration.dialect import describes_on_expiry, sequence_timeout_action
from executor.configuration.names import CONTROL_NAMES, KIND, QUEUE_DELAY, Part, wire_type
from executor.configuration.rules.batch_io import batch_inputs, batch_outputs
from executor.configuration.rules.metrics import histogram_buckets
from executor.configuration.rules.warmup import warmup_samples
from shared.configuration.schema import ConfigMessage
from shared.contract.model_config import (
    ControlKind,
    ControlSpec,
    Direct,
    DynamicBatching,
    EnsembleStep,
    InstanceGroup,
    ModelConfig,
    Oldest,
    QueuePolicy,
    SequenceBatching,
    StateSpec,
    TensorSpec,
    TimeoutAction,
)


def build(config: ConfigMessage, *, dialect: bool, notes: tuple[str, ...]) -> ModelConfig:
    """The values of a configuration.

    dialect  a first request may begin a sequence without START
    """
    sequence = sequence_specs(config, dialect=dialect) if config.HasField("sequence_batching") else None
    # Beside a sequence batcher the dynamic batcher schedules nothing: `dialect` has copied its values to the oldest
    # strategy.
    dynamic = config.HasField("dynamic_batching") and sequence is None
    return ModelConfig(
        name=config.name,
        backend=config.backend,
        platform=config.platform,
        max_batch_size=config.max_batch_size,
        inputs=tuple(map(tensor_spec, config.input)),
        outputs=tuple(map(tensor_spec, config.output)),
        default_model_filename=config.default_model_filename,
        sequence_batching=sequence,
        dynamic_batching=_dynamic_batching(config.dynamic_batching) if dynamic else None,
        instance_groups=tuple(_instance_group(group) for group in config.instance_group),
        parameters={name: config.parameters[name].string_value for name in sorted(config.parameters)},
        notes=notes,
        batch_inputs=batch_inputs(config),
        batch_outputs=batch_outputs(config),
        warmup=warmup_samples(config),
        response_cache=config.response_cache.enable,
        metric_tags={name: config.metric_tags[name] for name in sorted(config.metric_tags)},
        histogram_buckets=histogram_buckets(config),
        ensemble=_ensemble(config),
        ensemble_inflight_max=config.ensemble_scheduling.max_inflight_requests,
        decoupled=config.model_transaction_policy.decoupled,
    )


def _ensemble(config: ConfigMessage) -> tuple[EnsembleStep, ...]:
    return tuple(
        EnsembleStep(
            model=step.model_name,
            version="" if step.model_version < 0 else str(step.model_version),
            inputs={name: step.input_map[name] for name in sorted(step.input_map)},
            outputs={name: step.output_map[name] for name in sorted(step.output_map)},
        )
        for step in config.ensemble_scheduling.step
    )


def tensor_spec(tensor: Part) -> TensorSpec:
    """Inputs and outputs alike; what only the other kind has is left at its default."""
    dims, shape = tuple(tensor.dims), tuple(tensor.reshape.shape)
    names = {field.name for field in tensor.DESCRIPTOR.fields}
    return TensorSpec(
        name=tensor.name,
        datatype=wire_type(tensor.data_type),
        dims=dims,
        optional="optional" in names and tensor.optional,
        allow_ragged_batch="allow_ragged_batch" in names and tensor.allow_ragged_batch,
        reshape=shape if tensor.HasField("reshape") and shape != dims else None,
        label_filename=tensor.label_filename if "label_filename" in names else "",
    )


def sequence_specs(config: ConfigMessage, *, dialect: bool) -> SequenceBatching:
    """The sequence batcher's values, with controls and states. dialect: as of `build`"""
    sequence = config.sequence_batching
    return SequenceBatching(
        strategy=_strategy(config),
        idle_us=sequence.max_sequence_idle_microseconds,
        controls=tuple(_control(entry.name, control) for entry in sequence.control_input for control in entry.control),
        states=_states(sequence),
        iterative=sequence.iterative_sequence,
        implicit_start=dialect,
        describe_on_expiry=describes_on_expiry(config),
        timeout_action=sequence_timeout_action(config),
    )


def _strategy(config: ConfigMessage) -> Direct | Oldest:
    sequence = config.sequence_batching
    if sequence.HasField("oldest"):
        oldest = sequence.oldest
        candidates = oldest.max_candidate_sequences
        return Oldest(
            max_candidate_sequences=candidates if candidates > 0 else max(1, config.max_batch_size),
            preferred_batch_sizes=tuple(sorted(set(oldest.preferred_batch_size))),
            max_queue_delay_us=oldest.max_queue_delay_microseconds,
            preserve_ordering=oldest.preserve_ordering,
        )
    direct = sequence.direct
    return Direct(
        max_queue_delay_us=direct.max_queue_delay_microseconds, minimum_slot_utilization=direct.minimum_slot_utilization
    )


def _control(name: str, control: Part) -> ControlSpec:
    kind = ControlKind(CONTROL_NAMES[control.kind].removeprefix("CONTROL_SEQUENCE_"))
    if kind is ControlKind.CORRID:
        return ControlSpec(name=name, kind=kind, datatype=wire_type(control.data_type))
    pairs = {
        "INT32": tuple(control.int32_false_true),
        "FP32": tuple(control.fp32_false_true),
        "BOOL": tuple(control.bool_false_true),
    }
    datatype, (false, true) = next((datatype, pair) for datatype, pair in pairs.items() if pair)
    return ControlSpec(name=name, kind=kind, datatype=datatype, false_true=(float(false), float(true)))


def _states(sequence: Part) -> tuple[StateSpec, ...]:
    """Each state once: a later one of a name that was used is left out (triton-spec 2)."""
    states: list[StateSpec] = []
    for state in sequence.state:
        if all(state.input_name != s.input_name and state.output_name != s.output_name for s in states):
            states.append(_state(state))
    return tuple(states)


def _state(state: Part) -> StateSpec:
    initial = state.initial_state[0] if state.initial_state else None
    dims, initial_dims = tuple(state.dims), None if initial is None else tuple(initial.dims)
    if state.use_growable_memory and -1 not in dims and wire_type(state.data_type) != "BYTES":
        # Triton compares no shapes here: such a state begins as its dims say, and grows behind that.
        dims, initial_dims = (-1, *dims[1:]), dims
    return StateSpec(
        input_name=state.input_name,
        output_name=state.output_name,
        datatype=wire_type(state.data_type),
        dims=dims,
        initial_dims=initial_dims,
        initial_file="" if initial is None else initial.data_file,
        same_buffer=state.use_same_buffer_for_input_output,
        growable=state.use_growable_memory,
    )


def _dynamic_batching(dynamic: Part) -> DynamicBatching:
    policies = dynamic.priority_queue_policy
    return DynamicBatching(
        preferred_batch_sizes=tuple(sorted(set(dynamic.preferred_batch_size))),
        max_queue_delay_us=dynamic.max_queue_delay_microseconds,
        preserve_ordering=dynamic.preserve_ordering,
        priority_levels=dynamic.priority_levels,
        default_priority_level=dynamic.default_priority_level,
        default_queue_policy=_queue_policy(dynamic.default_queue_policy),
        priority_queue_policies={level: _queue_policy(policies[level]) for level in sorted(policies)},
        own_timeouts=bool(dynamic.timeout_action),
    )


def _queue_policy(policy: Part) -> QueuePolicy:
    return QueuePolicy(
        timeout_action=TimeoutAction.DELAY if policy.timeout_action == QUEUE_DELAY else TimeoutAction.REJECT,
        default_timeout_us=policy.default_timeout_microseconds,
        allow_timeout_override=policy.allow_timeout_override,
        max_queue_size=policy.max_queue_size,
    )


def _instance_group(group: Part) -> InstanceGroup:
    on_gpu = group.kind == KIND["KIND_GPU"]
    return InstanceGroup(
        name=group.name, kind="GPU" if on_gpu else "CPU", count=group.count, gpus=tuple(group.gpus) if on_gpu else ()
    )
