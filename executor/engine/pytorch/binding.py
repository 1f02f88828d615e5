"""Binds the configuration's tensors to forward's arguments, and its outputs to forward's returned values.

Decided once, at load. An argument is found by its own name, or by Triton's convention `NAME__INDEX` (its position
among forward's arguments). A returned dict is read by key. A returned tensor, tuple or list is read by `NAME__INDEX`
or, for other names, by the order of declaration: outputs first, then the states that are not outputs as well.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from executor.engine.pytorch.signature import argument_names
from shared.contract.errors import LoadError
from shared.contract.model_config import BatchInput, ControlSpec, ModelConfig, StateSpec, TensorSpec

Source = TensorSpec | ControlSpec | StateSpec | BatchInput
"""Where an argument's value comes from."""

_INDEXED = re.compile(r".+__(\d+)\Z")


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of forward.

    position  None if it can be given by name only
    required  it has no default: it is given None for an absent optional input
    """

    name: str
    position: int | None
    required: bool


@dataclass(frozen=True, slots=True)
class Binding:
    """One argument and the tensor of the configuration that is given to it."""

    argument: Argument
    name: str
    source: Source


def script_arguments(module: torch.jit.ScriptModule) -> list[Argument]:
    """Forward's arguments, without self."""
    schema = module.forward.schema  # type: ignore[attr-defined]  # torch's stubs do not know compiled methods
    return [
        Argument(
            argument.name,
            None if argument.kwarg_only else position,
            not argument.has_default_value(),
        )
        for position, argument in enumerate(schema.arguments[1:])
    ]


def program_arguments(program: torch.export.ExportedProgram) -> list[Argument]:
    """Forward's arguments as the program was exported: all are required."""
    positional = program.call_spec.in_spec.children()[0].num_children if program.call_spec.in_spec else 0
    return [
        Argument(name, position if position < positional else None, required=True)
        for position, name in enumerate(argument_names(program))
    ]


def bind_arguments(config: ModelConfig, arguments: Sequence[Argument]) -> tuple[Binding, ...]:
    """A tensor of the configuration for each of forward's arguments, in their order.

    Optional arguments that the configuration does not name are left to their defaults. Raises LoadError for a
    tensor that fits no argument, for two that fit the same, and for a required argument that nothing fits.
    """
    bound: dict[int, Binding] = {}
    for name, source in argument_sources(config):
        position = _argument_position(config, name, arguments)
        if position in bound:
            raise LoadError(
                f"model '{config.name}': '{name}' and '{bound[position].name}' are both argument "
                f"'{arguments[position].name}' of forward"
            )
        bound[position] = Binding(arguments[position], name, source)
    missing = [argument.name for index, argument in enumerate(arguments) if argument.required and index not in bound]
    if missing:
        raise LoadError(
            f"model '{config.name}': nothing in the configuration is argument {_quoted(missing)} of forward; "
            f"its arguments are {_quoted([argument.name for argument in arguments])}"
        )
    return tuple(bound[position] for position in sorted(bound))


def bind_outputs(config: ModelConfig) -> dict[str, int]:
    """Outputs, then states that are no outputs -> their place in a returned tuple.

    Raises LoadError when two names mean the same place.
    """
    states = config.sequence_batching.states if config.sequence_batching else ()
    names = list(dict.fromkeys([spec.name for spec in config.outputs] + [state.output_name for state in states]))
    places: dict[int, str] = {}
    for order, name in enumerate(names):
        match = _INDEXED.match(name)
        place = int(match[1]) if match else order
        if place in places:
            raise LoadError(
                f"model '{config.name}': outputs '{places[place]}' and '{name}' both mean value {place} of what "
                "forward returns; name them NAME__0, NAME__1, ..., or return a dict"
            )
        places[place] = name
    return {name: place for place, name in places.items()}


def argument_sources(config: ModelConfig) -> list[tuple[str, Source]]:
    """Every tensor that a model is given, by name: inputs, batch inputs, controls and states."""
    sources: list[tuple[str, Source]] = [(spec.name, spec) for spec in config.inputs]
    sources += [(name, spec) for spec in config.batch_inputs for name in spec.names]
    if config.sequence_batching:
        sources += [(control.name, control) for control in config.sequence_batching.controls]
        sources += [(state.input_name, state) for state in config.sequence_batching.states]
    return sources


def _argument_position(config: ModelConfig, name: str, arguments: Sequence[Argument]) -> int:
    for position, argument in enumerate(arguments):
        if argument.name == name:
            return position
    match = _INDEXED.match(name)
    if match and int(match[1]) < len(arguments):
        return int(match[1])
    raise LoadError(
        f"model '{config.name}': '{name}' is no argument of forward, nor does it follow the convention NAME__INDEX; "
        f"the arguments are {_quoted([argument.name for argument in arguments])}"
    )


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "(none)"
