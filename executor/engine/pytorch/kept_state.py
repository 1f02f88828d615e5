"""Gives a module that keeps its state in attributes one state per sequence.

Each leaf of an attribute that forward changes (`attributes`) is a state like a declared one: it lies in the arena, goes
into checkpoints, and begins with what the module's file holds. Before a call of the module the attributes are set to
the batch's states, and after the call the new states are read from them.

A state is declared under the attribute's path as both names. Its dims are the attribute's whole shape. Where batches
have a batch dimension and the attribute begins with a dimension of 1, that dimension counts as the batch dimension:
such an attribute may be given the states of several rows. Whether the module understands it so is tried at load
(`batch_trial`). In all other cases each row is a call of its own.

A model that has the parameter `sequence_recovery` says that its module keeps its sequences apart itself, by their
correlation ids: then its attributes are left alone.

An attribute that is None, or a tensor without elements, before the first step is kept as a tensor without elements
until it has some.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from executor.engine import shapes
from executor.engine.pytorch.attributes import Attribute, Changes, Leaf
from executor.engine.pytorch.datatypes import TORCH_TYPE, datatype_of, raw_of
from executor.engine.pytorch.outputs import several
from shared.contract.errors import ConfigError, LoadError
from shared.contract.model_config import ModelConfig, StateSpec
from shared.contract.tensors import Tensor, shape_text

REMEDY = (
    "make it a tensor (register_buffer) that forward changes, or an argument and a result of forward that the "
    "configuration declares as a state; if the module keeps its sequences apart itself, by their correlation ids, say "
    "so by the parameter sequence_recovery (none or replay)"
)


@dataclass(frozen=True, slots=True)
class LeafForm:
    """How a leaf's value and its state differ.

    per_row  the first dimension of the value is the batch; otherwise the value belongs to one row as a whole
    shape    of the value in the module's file; None where it is unset there
    unset    what stands in the file then: None, or a tensor without elements
    """

    leaf: Leaf
    datatype: str
    per_row: bool
    shape: shapes.Shape | None
    unset: torch.Tensor | None = None

    def value(self, state: torch.Tensor, *, batched: bool) -> Any:
        """The attribute's value for a state, [rows, *dims] or, without batch dimension, [*dims]."""
        if self.per_row:
            return state
        own = state[0] if batched else state
        if self.leaf.scalar:
            return own.item()
        if self.shape is None and not own.numel():
            return self.unset if self.unset is None else self.unset.clone()
        return own.reshape(()) if self.shape == () else own

    def state(self, value: Any, like: torch.Tensor, *, batched: bool) -> torch.Tensor:
        """The state for the attribute's new value; `like` is the state before."""
        if self.per_row:
            return value
        if self.shape is None and is_unset(value):
            own = like.new_empty((0,) * (like.dim() - int(batched)))
        elif self.leaf.scalar:
            own = torch.tensor([value], dtype=TORCH_TYPE[self.leaf.scalar], device=like.device)
        else:
            own = value.reshape(1) if not value.dim() else value
        return own.unsqueeze(0) if batched else own


def declared_states(changes: Changes, found: Mapping[str, torch.Tensor], *, batched: bool) -> Sequence[StateSpec]:
    """The states that a configuration must declare for what a module changes.

    found  values of the leaves that are unset in the file, after a first step
    """
    specs: list[StateSpec] = []
    for leaf, value in changes.read():
        if leaf.scalar:
            datatype, dims = leaf.scalar, (1,)
        elif is_unset(value):
            datatype, dims = datatype_of(leaf.name, found[leaf.name].dtype), (-1,) * found[leaf.name].dim()
        else:
            datatype, shape = datatype_of(leaf.name, value.dtype), tuple(value.shape)
            dims = shape[1:] if batched and is_per_row(shape) else shape or (1,)
        specs.append(StateSpec(leaf.name, leaf.name, datatype, dims))
    return specs


def refuse_problems(config_name: str, changes: Changes) -> None:
    """Raises ConfigError if something that forward changes cannot be kept for each sequence."""
    if changes.problems:
        raise ConfigError(
            f"model '{config_name}' keeps state that the mesh cannot keep apart for each sequence: "
            f"{'; '.join(changes.problems)}. Remedy: {REMEDY}"
        )


def is_unset(value: object) -> bool:
    """Whether an attribute has no value yet, so that its shape is unknown."""
    return value is None or (isinstance(value, torch.Tensor) and not value.numel())


def is_per_row(shape: Sequence[int]) -> bool:
    """Whether the first dimension of an attribute may be the batch."""
    return len(shape) > 1 and shape[0] == 1


class KeptForward(nn.Module):
    """A module whose attributes are given to its call and returned from it, by the names of their states."""

    def __init__(
        self,
        module: nn.Module,
        config: ModelConfig,
        attributes: Sequence[Attribute],
        forms: Mapping[str, LeafForm],
        places: Mapping[str, int],
    ) -> None:
        """places: of the outputs and the other states, in what the module returns"""
        super().__init__()
        self.module = module
        self.forms = forms
        self._attributes = tuple(attributes)
        self._batched = config.max_batch_size > 0
        self._places = places
        self.calls = 0

    @property
    def alone_because(self) -> str:
        """Why each row must be a call of its own; "" if rows may share one."""
        whole = [form.leaf.name for form in self.forms.values() if not form.per_row]
        return f"the module's attribute '{whole[0]}' has no batch dimension" if whole and self._batched else ""

    def forward(self, *positional: Any, **named: Any) -> dict[str, Any]:
        """Runs one batch. Raises what the module raises, and ValueError for a state that cannot be kept."""
        states: dict[str, torch.Tensor] = {name: named.pop(name) for name in self.forms}
        self.calls += 1
        values = {name: form.value(states[name], batched=self._batched) for name, form in self.forms.items()}
        for attribute in self._attributes:
            attribute.write([values[leaf.name] for leaf in attribute.leaves])
        returned = self.module(*positional, **named)
        found = self._by_name(returned)
        for attribute in self._attributes:
            for leaf, value in zip(attribute.leaves, attribute.read(), strict=True):
                form = self.forms[leaf.name]
                if is_unset(value) and (form.shape is not None or (value is None) is not (form.unset is None)):
                    raise ValueError(f"attribute '{leaf.name}' lost its elements, which the mesh cannot keep")
                found[leaf.name] = form.state(value, states[leaf.name], batched=self._batched)
        return found

    def _by_name(self, returned: Any) -> dict[str, Any]:
        if isinstance(returned, dict):
            return dict(cast("dict[str, Any]", returned))
        values = several(returned)
        return {name: values[place] for name, place in self._places.items() if place < len(values)}


def kept_forms(config: ModelConfig, changes: Changes) -> dict[str, LeafForm]:
    """How each leaf that changes is kept, by its name. Raises LoadError if the configuration does not declare it, or
    declares it otherwise.
    """
    refuse_problems(config.name, changes)
    declared = {state.input_name: state for state in config.states}
    forms: dict[str, LeafForm] = {}
    for leaf, value in changes.read():
        spec = declared.get(leaf.name)
        if spec is None:
            raise LoadError(
                f"model '{config.name}' changes the attribute '{leaf.name}' of its module, and the configuration "
                f"declares no state '{leaf.name}': declare it, or let the mesh complete the configuration"
            )
        forms[leaf.name] = _form(config, spec, leaf, value)
    return forms


def _form(config: ModelConfig, spec: StateSpec, leaf: Leaf, value: Any) -> LeafForm:
    if spec.output_name != leaf.name:
        raise LoadError(
            f"model '{config.name}': state '{leaf.name}' is an attribute of the module, so its output_name must be "
            f"'{leaf.name}' too, not '{spec.output_name}'"
        )
    unset = is_unset(value)
    shape = None if unset else tuple(value.shape) if isinstance(value, torch.Tensor) else ()
    datatype = leaf.scalar or (spec.datatype if unset else datatype_of(leaf.name, value.dtype))
    per_row = (
        config.max_batch_size > 0 and shape is not None and is_per_row(shape) and shapes.fits(shape[1:], spec.dims)
    )
    fits = set(spec.dims) == {-1} if shape is None else per_row or shapes.fits(shape or (1,), spec.dims)
    if spec.datatype != datatype or not fits:
        told = "unset in the file, so its dims must all be -1" if shape is None else f"{datatype} {shape_text(shape)}"
        raise LoadError(
            f"model '{config.name}': state '{leaf.name}' is declared as {spec.datatype} {shape_text(spec.dims)}, but "
            f"the module's attribute is {told}"
        )
    return LeafForm(leaf, datatype, per_row, shape, value if unset else None)


def first_states(config: ModelConfig, changes: Changes, forms: Mapping[str, LeafForm]) -> dict[str, Tensor]:
    """What the states begin with: what the module's file holds, where the configuration gives no `initial_state`."""
    dims = {state.input_name: state.dims for state in config.states if state.initial_dims is None}
    firsts: dict[str, Tensor] = {}
    for leaf, value in changes.read():
        form = forms[leaf.name]
        if leaf.name not in dims:
            continue
        if is_unset(value):
            firsts[leaf.name] = Tensor(leaf.name, form.datatype, (0,) * len(dims[leaf.name]), b"")
            continue
        tensor = torch.as_tensor(value, dtype=TORCH_TYPE[form.datatype])
        shape = tuple(tensor.shape[1:]) if form.per_row else tuple(tensor.shape) or (1,)
        firsts[leaf.name] = Tensor(leaf.name, form.datatype, shape, bytes(raw_of(tensor)))
    return firsts
