"""The rules a normalised configuration must keep, with Triton's messages.

Messages that Triton has no word for are ours, in its manner. Nothing is changed here, nothing is read from disk.

Source: triton-spec sections 1.1, 1.2, 2, 3.1 and 4; Triton core, model_config_utils.cc (ValidateModelConfig,
ValidateModelInput, ValidateInstanceGroup, GetBooleanSequenceControlProperties, GetTypedSequenceControlProperties) and
sequence_batch_scheduler.cc (initial state).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from shared.errors import ConfigError
from shared.model_config.normalise import KIND
from shared.model_config.schema import POOL, ConfigMessage

TYPE_NAMES = {
    number: value.name for number, value in POOL.FindEnumTypeByName("inference.DataType").values_by_number.items()
}
CONTROL_NAMES = {
    number: value.name
    for number, value in POOL.FindEnumTypeByName(
        "inference.ModelSequenceBatching.Control.Kind"
    ).values_by_number.items()
}

_FALSE_TRUE = ("int32_false_true", "fp32_false_true", "bool_false_true")
_CORRID_TYPES = frozenset({"TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING"})
_NAME_LENGTH_MAX = 256
_DELAY = POOL.FindEnumTypeByName("inference.ModelQueuePolicy.TimeoutAction").values_by_name["DELAY"].number

Part = Any
"""A message inside the configuration, of a class made at run time."""


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
    """Checks everything that the configuration says by itself; returns notes on what is odd but allowed.

    dialect    the configuration is in the seeds' dialect, which allows `gpus` with KIND_CPU
    gpu_count  GPUs of this executor
    raises     ConfigError for the first broken rule
    """
    if config.max_batch_size < 0:
        raise ConfigError(f"'max_batch_size' must be non-negative value for {config.name}")
    _check_filename(config)
    _check_tensors(config)
    notes: list[str] = []
    if config.HasField("dynamic_batching"):
        notes += _check_dynamic_batching(config)
    if config.HasField("sequence_batching"):
        notes += _check_sequence_batching(config)
    notes += _check_instance_groups(config, dialect=dialect, gpu_count=gpu_count)
    notes += _check_parameters(config)
    return notes


def _check_filename(config: ConfigMessage) -> None:
    if _leaves_directory(config.default_model_filename):
        raise ConfigError(
            f"default_model_filename '{config.default_model_filename}' must name a file inside the version directory "
            f"for {config.name}"
        )


def _leaves_directory(path: str) -> bool:
    return path.startswith("/") or "\\" in path or "\0" in path or ".." in path.split("/")


# Inputs and outputs


def _check_tensors(config: ConfigMessage) -> None:
    for kind, tensors in (("input", config.input), ("output", config.output)):
        names: set[str] = set()
        for tensor in tensors:
            _check_tensor(config, kind, tensor)
            if tensor.name in names:
                raise ConfigError(f"model {kind} '{tensor.name}' is specified more than once for {config.name}")
            names.add(tensor.name)
    sequence = config.sequence_batching
    if not (config.input or sequence.control_input or sequence.state):
        raise ConfigError(f"must specify at least one 'input' for {config.name}: its backend could not complete them")
    if not config.output:
        raise ConfigError(f"must specify at least one 'output' for {config.name}: its backend could not complete them")


def _check_tensor(config: ConfigMessage, kind: str, tensor: Part) -> None:
    model = config.name
    if not tensor.name:
        raise ConfigError(f"model {kind} must specify 'name' for {model}")
    prefix = f"model {kind} '{tensor.name}'"
    if TYPE_NAMES.get(tensor.data_type, "TYPE_INVALID") == "TYPE_INVALID":
        raise ConfigError(f"{prefix} must specify 'data_type' for {model}")
    if not tensor.dims:
        raise ConfigError(f"{prefix} must specify 'dims' for {model}")
    if not _are_dims(tensor.dims):
        raise ConfigError(
            f"{prefix} dimension must be integer >= 1, or -1 to indicate a variable-size dimension for {model}"
        )
    if kind == "input" and tensor.format and len(tensor.dims) != 3:
        raise ConfigError(f"{prefix} NHWC/NCHW require 3 dims for {model}")
    if tensor.is_shape_tensor:
        raise ConfigError(f"{prefix} shape tensors are only supported for TensorRT platform for {model}")
    if tensor.HasField("reshape"):
        _check_reshape(config, prefix, list(tensor.dims), list(tensor.reshape.shape))


def _are_dims(dims: Sequence[int]) -> bool:
    return all(dim >= 1 or dim == -1 for dim in dims)


def _check_reshape(config: ConfigMessage, prefix: str, dims: list[int], shape: list[int]) -> None:
    model = config.name
    if not shape and config.max_batch_size == 0:
        raise ConfigError(
            f"{prefix} cannot have empty reshape for non-batching model as scalar tensors are not supported for {model}"
        )
    if not _are_dims(shape):
        raise ConfigError(
            f"{prefix} reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension for {model}"
        )
    ours, theirs = _trunks(dims), _trunks(shape)
    if (-1 in dims) == (-1 in shape) and len(ours) != len(theirs):
        raise ConfigError(f"{prefix} has different number of variable-size dimensions for dims and reshape for {model}")
    if ours != theirs:
        raise ConfigError(f"{prefix} has different size for dims and reshape for {model}")


def _trunks(dims: list[int]) -> list[int]:
    """Element counts of the stretches between variable dimensions: [2, 4, -1, 6] is [8, 6]."""
    cuts = [-1, *(index for index, dim in enumerate(dims) if dim == -1), len(dims)]
    return [math.prod(dims[start + 1 : end]) for start, end in itertools.pairwise(cuts)]


# Dynamic batching


def _check_dynamic_batching(config: ConfigMessage) -> list[str]:
    model, dynamic = config.name, config.dynamic_batching
    for size in dynamic.preferred_batch_size:
        if size <= 0:
            raise ConfigError(f"dynamic batching preferred size must be positive for {model}")
        if size > config.max_batch_size:
            raise ConfigError(f"dynamic batching preferred size must be <= max batch size for {model}")
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
        if policy.default_timeout_microseconds and policy.timeout_action == _DELAY:
            raise ConfigError(
                f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {model}"
            )


# Sequence batching


def _check_sequence_batching(config: ConfigMessage) -> list[str]:
    model, sequence = config.name, config.sequence_batching
    for size in sequence.oldest.preferred_batch_size:
        if size <= 0:
            raise ConfigError(f"sequence batching preferred batch size must be positive for {model}")
        if size > config.max_batch_size:
            raise ConfigError(f"sequence batching preferred batch size must be <= max batch size for {model}")
    if sequence.oldest.max_candidate_sequences < 0:
        raise ConfigError(f"sequence batching max candidate sequences must be non-negative for {model}")
    if not 0.0 <= sequence.direct.minimum_slot_utilization <= 1.0:
        raise ConfigError(f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {model}")
    _check_controls(config)
    notes = _check_states(config)
    declared = {tensor.name for tensor in config.input}
    made = [control.name for control in sequence.control_input] + [state.input_name for state in sequence.state]
    notes += [
        f"input '{name}' is also a control or state tensor: the server's own value is used"
        for name in made
        if name in declared
    ]
    return notes


def _check_controls(config: ConfigMessage) -> None:
    model = config.name
    tensors: set[str] = set()
    kinds: set[int] = set()
    for tensor in config.sequence_batching.control_input:
        if not tensor.name:
            raise ConfigError(f"sequence batching control tensor must have a name for {model}")
        if tensor.name in tensors:
            raise ConfigError(
                f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds for {model}"
            )
        tensors.add(tensor.name)
        for control in tensor.control:
            kind = CONTROL_NAMES.get(control.kind)
            if kind is None:
                raise ConfigError(f"sequence batching control tensor '{tensor.name}' has no known kind for {model}")
            if control.kind in kinds:
                raise ConfigError(f"sequence batching specifies multiple {kind} tensors for {model}")
            kinds.add(control.kind)
            _check_control(model, kind, control)


def _check_control(model: str, kind: str, control: Part) -> None:
    given = [name for name in _FALSE_TRUE if getattr(control, name)]
    either = "'int32_false_true', 'fp32_false_true' or 'bool_false_true'"
    if kind == "CONTROL_SEQUENCE_CORRID":
        if given:
            raise ConfigError(f"sequence batching must not specify either {either} for {kind} for {model}")
        if TYPE_NAMES.get(control.data_type) not in _CORRID_TYPES:
            raise ConfigError(
                f"unexpected data type for control CONTROL_SEQUENCE_CORRID for {model}. Allowed data types are "
                "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            )
        return
    if not given:
        raise ConfigError(f"sequence batching must specify either {either} for {kind} for {model}")
    if len(given) > 1:
        more = "'int32_false_true', 'fp32_false_true' and 'bool_false_true'"
        raise ConfigError(f"sequence batching specifies more than one from {more} for {kind} for {model}")
    if len(getattr(control, given[0])) != 2:
        raise ConfigError(f"sequence batching control '{given[0]}' must have exactly 2 entries for {kind} for {model}")


def _check_states(config: ConfigMessage) -> list[str]:
    """Checks each state; a state whose names were used before is left out, with a note, as Triton does."""
    notes: list[str] = []
    with_initial: set[str] = set()
    inputs: set[str] = set()
    outputs: set[str] = set()
    for state in config.sequence_batching.state:
        _check_state(config.name, state)
        if state.initial_state:
            _check_initial_state(state)
            if state.input_name in with_initial:
                raise ConfigError(f"State input name '{state.input_name}' specified more than once.")
            with_initial.add(state.input_name)
        if state.input_name in inputs or state.output_name in outputs:
            notes.append(f"state '{state.input_name}' is declared more than once; the first declaration counts")
        inputs.add(state.input_name)
        outputs.add(state.output_name)
    return notes


def _check_state(model: str, state: Part) -> None:
    if not (state.input_name and state.output_name):
        raise ConfigError(f"state must specify 'input_name' and 'output_name' for {model}")
    if TYPE_NAMES.get(state.data_type, "TYPE_INVALID") == "TYPE_INVALID":
        raise ConfigError(f"state '{state.input_name}' must specify 'data_type' for {model}")
    if not _are_dims(state.dims):
        raise ConfigError(
            f"state '{state.input_name}' dimension must be integer >= 1, or -1 to indicate a variable-size dimension "
            f"for {model}"
        )


def _check_initial_state(state: Part) -> None:
    name = state.input_name
    if len(state.initial_state) > 1:
        raise ConfigError(
            f"initial_state field for state input '{name}' must contain exactly one or zero element. "
            f"Found '{len(state.initial_state)}' elements."
        )
    initial = state.initial_state[0]
    if initial.data_type != state.data_type:
        raise ConfigError(
            f"The data type used for 'initial_state' field of state '{name}' does not match the state data type."
        )
    if not initial.name:
        raise ConfigError(f"Field 'name' must be set when using initial_state for state input '{name}'.")
    if len(initial.dims) != len(state.dims):
        raise ConfigError(
            f"Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            f"'{name}'. {len(initial.dims)} != {len(state.dims)}"
        )
    for dim, declared in zip(initial.dims, state.dims, strict=True):
        if dim == -1:
            raise ConfigError(f"'initial_state' field for state input name '{name}' contains variable dimensions.")
        if declared not in (-1, dim) or dim < 1:
            raise ConfigError(
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. "
                f"{dim} != {declared}"
            )
    if initial.WhichOneof("state_data") is None:
        raise ConfigError(f"initial_state setting expects state'{name}' to have state_data set")
    if _leaves_directory(initial.data_file):
        raise ConfigError(f"initial_state file '{initial.data_file}' of state '{name}' must lie in 'initial_state'")


# Instances and parameters


def _check_instance_groups(config: ConfigMessage, *, dialect: bool, gpu_count: int) -> list[str]:
    notes: list[str] = []
    names: set[str] = set()
    for group in config.instance_group:
        prefix = f"instance group {group.name} of model {config.name}"
        if group.name in names:
            raise ConfigError(f"{prefix} is specified more than once")
        names.add(group.name)
        if group.count < 1:
            raise ConfigError(f"{prefix} must have a count of at least 1")
        if group.kind == KIND["KIND_CPU"] and group.gpus:
            if not dialect:
                raise ConfigError(f"{prefix} has kind KIND_CPU but specifies one or more GPUs")
            notes.append(f"instance group {group.name} has kind KIND_CPU: its gpus have no effect")
        elif group.kind == KIND["KIND_GPU"]:
            _check_gpus(prefix, group, gpu_count)
        elif group.kind != KIND["KIND_CPU"]:
            raise ConfigError(f"{prefix} has kind KIND_MODEL, which is not supported: say KIND_CPU or KIND_GPU")
    return notes


def _check_gpus(prefix: str, group: Part, gpu_count: int) -> None:
    if gpu_count == 0:
        raise ConfigError(f"{prefix} has kind KIND_GPU but no GPUs are available")
    for gpu in group.gpus:
        if not 0 <= gpu < gpu_count:
            available = ", ".join(str(index) for index in range(gpu_count))
            raise ConfigError(f"{prefix} specifies invalid or unsupported gpu id {gpu}. GPUs available: {available}")


def _check_parameters(config: ConfigMessage) -> list[str]:
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


_SEQUENCE_PARAMETERS = ("checkpoint_interval", "orphan_grace_microseconds")
_WHOLE_DIGITS_MAX = 18


def _is_whole(text: str) -> bool:
    """Whether the text is a number that fits 64 bits, without sign."""
    return text.isascii() and text.isdigit() and len(text) <= _WHOLE_DIGITS_MAX
