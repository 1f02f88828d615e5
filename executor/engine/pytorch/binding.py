"""Binds the configuration's tensors to forward's arguments, and its outputs to forward's returned values.

Decided once, at load, by Triton's rules. Inputs are found by the names of forward's arguments, if all of them are such
names; else by their positions, if all are named `NAME__INDEX`; else in the order of the configuration. A forward with
one dictionary of tensors gets all of them by name. Controls and states are found by argument or by `NAME__INDEX`, each
for itself: there Triton asks for `NAME__INDEX`.

A returned dict is read by key. A returned tensor, tuple or list is read by `NAME__INDEX` if all outputs have such
names, else in the order of the configuration: outputs first, then the states that are not outputs as well.

Source: Triton pytorch_backend, model_instance_state.cc (GetNamingConvention, AddInputToMap); its README.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from executor.engine.error_texts import quoted
from executor.engine.pytorch.datatypes import DATATYPE
from executor.engine.pytorch.signature import argument_names, placeholders
from shared.contract.errors import LoadError
from shared.contract.model_config import BatchInput, ControlSpec, ModelConfig, StateSpec, TensorSpec

Source = TensorSpec | ControlSpec | StateSpec | BatchInput
"""Where an argument's value comes from."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of forward.

    position  None if it can be given by name only
    required  it has no default: it is given None for an absent optional input
    is_dictionary  of tensors by name
    example  what a program was exported with: its datatype, and its sizes, of which those that may vary are symbols
    """

    name: str
    position: int | None
    required: bool
    is_dictionary: bool = False
    example: torch.Tensor | None = None


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
            argument.type.annotation_str == "Dict[str, Tensor]",
        )
        for position, argument in enumerate(schema.arguments[1:])
    ]


def program_arguments(program: torch.export.ExportedProgram) -> list[Argument]:
    """Forward's arguments as the program was exported: all are required."""
    positional = program.call_spec.in_spec.children()[0].num_children if program.call_spec.in_spec else 0
    values = placeholders(program)
    examples = [values.get(str(node)) for node in program.graph_signature.user_inputs]
    return [
        Argument(
            name,
            position if position < positional else None,
            required=True,
            example=example if isinstance(example, torch.Tensor) else None,
        )
        for position, (name, example) in enumerate(zip(argument_names(program), examples, strict=True))
    ]


class DictionaryForward(nn.Module):
    """Gives a module that takes one dictionary of tensors the arguments of its call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **named: torch.Tensor) -> Any:
        return self.module(named)


def takes_dictionary(arguments: Sequence[Argument]) -> bool:
    """Whether forward takes all of its tensors as one dictionary."""
    return len(arguments) == 1 and arguments[0].is_dictionary


def bind_arguments(config: ModelConfig, arguments: Sequence[Argument], kept: Collection[str]) -> tuple[Binding, ...]:
    """A tensor of the configuration for each of forward's arguments, in their order.

    kept  states that are attributes of the module: they are given by name, as arguments that forward does not have

    Optional arguments that the configuration does not name are left to their defaults. Raises LoadError for a
    tensor that fits no argument, for two that fit the same, and for a required argument that nothing fits.
    """
    sources = argument_sources(config)
    own = tuple(Binding(Argument(name, None, required=True), name, source) for name, source in sources if name in kept)
    given = [(name, source) for name, source in sources if name not in kept]
    if takes_dictionary(arguments):
        return (*(Binding(_entry(name, source), name, source) for name, source in given), *own)
    return (*_bound_by_place(config, given, arguments), *own)


def _entry(name: str, source: Source) -> Argument:
    """An entry of forward's one dictionary, in which an absent optional input is left out."""
    return Argument(name, None, required=not (isinstance(source, TensorSpec) and source.optional))


def _bound_by_place(
    config: ModelConfig, sources: Sequence[tuple[str, Source]], arguments: Sequence[Argument]
) -> Sequence[Binding]:
    bound: dict[int, Binding] = {}
    ordered = _ordered_inputs(config, arguments)
    for name, source in sources:
        position = ordered[name] if name in ordered else _argument_position(config, name, arguments)
        if position in bound:
            raise LoadError(
                f"model '{config.name}': '{name}' and '{bound[position].name}' are both argument "
                f"'{arguments[position].name}' of forward"
            )
        bound[position] = Binding(arguments[position], name, source)
    missing = [argument.name for index, argument in enumerate(arguments) if argument.required and index not in bound]
    if missing:
        raise LoadError(
            f"model '{config.name}': nothing in the configuration is argument {quoted(missing)} of forward; "
            f"its arguments are {_all_quoted(arguments)}"
        )
    return [bound[position] for position in sorted(bound)]


def _ordered_inputs(config: ModelConfig, arguments: Sequence[Argument]) -> dict[str, int]:
    """The inputs that are found by their order in the configuration, with their positions; {} if none is."""
    known = {argument.name for argument in arguments}
    names = [spec.name for spec in config.inputs]
    if all(name in known for name in names) or all(_index(name) is not None for name in names):
        return {}
    names += [name for spec in config.batch_inputs for name in spec.names]
    if len(names) > len(arguments):
        raise LoadError(
            f"model '{config.name}': its inputs {quoted(names)} are neither arguments of forward nor named "
            f"NAME__INDEX, and there are more of them than arguments, which are "
            f"{_all_quoted(arguments)}"
        )
    log.warning(
        "model '%s': its inputs %s are not all arguments of forward (%s), nor all named NAME__INDEX: they are given in "
        "the order of the configuration",
        config.name,
        quoted(names),
        _all_quoted(arguments),
    )
    return {name: position for position, name in enumerate(names)}


def _index(name: str) -> int | None:
    """The position that a name of the form NAME__INDEX tells; None for other names."""
    _, found, index = name.partition("__")
    return int(index) if found and index.isascii() and index.isdigit() else None


def returned_types(program: torch.export.ExportedProgram) -> dict[str | int, str]:
    """The values that forward returns, by their keys in a dict, or else by their places -> the datatype that each has
    as an output; of a value that can be none, what it is.
    """
    spec = program.call_spec.out_spec
    if spec is None:
        return {}
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    # Of a tensor or a size the name of its node, of a constant itself.
    leaves = iter([_returned_type(values.get(one), one) for one in program.graph_signature.user_outputs])
    keys, parts = ([0], [spec]) if spec.is_leaf() else (range(spec.num_children), spec.children())
    found: dict[str | int, str] = {}
    for key, part in zip(spec.context if spec.type is dict else keys, parts, strict=True):
        what = [next(leaves) for _ in range(part.num_leaves)]
        if kind := what[0] if part.is_leaf() else "a nested value":
            found[key] = kind
    return found


def _returned_type(value: object, returned: object) -> str:
    """As `returned_types`; "" if the graph does not tell. value: that of the node, if `returned` names one"""
    if isinstance(value, torch.Tensor):
        return DATATYPE.get(value.dtype, f"a tensor of {value.dtype}")
    if value is None and isinstance(returned, str):
        return ""
    return "None" if returned is None else "a number"


def bind_outputs(config: ModelConfig, kept: Collection[str]) -> dict[str, int]:
    """Outputs, then states that are no outputs -> their place in a returned tuple.

    kept    states that are attributes of the module, which are not returned
    raises  LoadError when two names mean the same place
    """
    names = list(dict.fromkeys([spec.name for spec in config.outputs] + [state.output_name for state in config.states]))
    names = [name for name in names if name not in kept]
    by_order = any(_index(spec.name) is None for spec in config.outputs if spec.name not in kept)
    outputs = {spec.name for spec in config.outputs}
    places: dict[int, str] = {}
    for order, name in enumerate(names):
        index = None if by_order and name in outputs else _index(name)
        place = order if index is None else index
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
    sources += [(control.name, control) for control in config.controls]
    sources += [(state.input_name, state) for state in config.states]
    return sources


def _argument_position(config: ModelConfig, name: str, arguments: Sequence[Argument]) -> int:
    for position, argument in enumerate(arguments):
        if argument.name == name:
            return position
    index = _index(name)
    if index is not None and index < len(arguments):
        return index
    raise LoadError(
        f"model '{config.name}': '{name}' is no argument of forward, nor does it follow the convention NAME__INDEX; "
        f"the arguments are {_all_quoted(arguments)}"
    )


def _all_quoted(arguments: Sequence[Argument]) -> str:
    return quoted(argument.name for argument in arguments) or "(none)"
