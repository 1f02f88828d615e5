"""Rules of implicit state, with Triton's messages. The content of files is looked at in `files`.

Source: triton-spec section 2; Triton core, sequence_batch_scheduler.cc (Create, GenerateInitialStateData).
"""

from __future__ import annotations

from executor.configuration.names import Part, are_dims, check_rank, has_type, leaves_directory, wire_type
from shared.configuration.schema import ConfigMessage
from shared.contract.errors import ConfigError


def check_states(config: ConfigMessage) -> list[str]:
    """Checks each state; a state whose names were used before is left out, with a note, as Triton does.

    raises  ConfigError for the first broken rule
    """
    notes: list[str] = []
    with_initial: set[str] = set()
    inputs: set[str] = set()
    outputs: set[str] = set()
    for state in config.sequence_batching.state:
        _check_state(config.name, state)
        if state.initial_state:
            _check_initial_state(state, with_initial)
            with_initial.add(state.input_name)
        if state.input_name in inputs or state.output_name in outputs:
            notes.append(f"state '{state.input_name}' is declared more than once; the first declaration counts")
        elif state.use_growable_memory and (list(state.dims).count(-1) > 1 or wire_type(state.data_type) == "BYTES"):
            notes.append(
                f"'use_growable_memory' of state '{state.input_name}' has no effect: it has strings, or several "
                "dimensions of -1, so it is kept whole"
            )
        inputs.add(state.input_name)
        outputs.add(state.output_name)
    return notes


def _check_state(model: str, state: Part) -> None:
    if not (state.input_name and state.output_name):
        raise ConfigError(f"state must specify 'input_name' and 'output_name' for {model}")
    if not has_type(state):
        raise ConfigError(f"state '{state.input_name}' must specify 'data_type' for {model}")
    check_rank(model, f"state '{state.input_name}'", state.dims)
    if not are_dims(state.dims):
        raise ConfigError(
            f"state '{state.input_name}' dimension must be integer >= 1, or -1 to indicate a variable-size dimension "
            f"for {model}"
        )

    if state.use_growable_memory and not state.use_same_buffer_for_input_output:
        raise ConfigError(
            "In order to 'use_growable_memory', you must also enable 'use_single_buffer' for state input name "
            f"'{state.input_name}'. The field's name is use_same_buffer_for_input_output."
        )


def _check_initial_state(state: Part, seen: set[str]) -> None:
    """seen: inputs of the states before it that have an initial state."""
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
    if name in seen:
        raise ConfigError(f"State input name '{name}' specified more than once.")
    _check_initial_dims(state, initial)
    if initial.WhichOneof("state_data") is None:
        raise ConfigError(f"initial_state setting expects state'{name}' to have state_data set")
    if leaves_directory(initial.data_file):
        raise ConfigError(f"initial_state file '{initial.data_file}' of state '{name}' must lie in 'initial_state'")


def _check_initial_dims(state: Part, initial: Part) -> None:
    name = state.input_name
    if len(initial.dims) != len(state.dims):
        raise ConfigError(
            f"Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            f"'{name}'. {len(initial.dims)} != {len(state.dims)}"
        )
    for dim, declared in zip(initial.dims, state.dims, strict=True):
        if dim == -1:
            raise ConfigError(f"'initial_state' field for state input name '{name}' contains variable dimensions.")
        if declared not in (-1, dim) or dim < 0:
            raise ConfigError(
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. "
                f"{dim} != {declared}"
            )
