"""Implicit state of `python` models: per slot, as the bytes of its checkpoint.

A model gets a copy to work on and returns a new tensor, so bytes are enough. For a batch they are joined into one
buffer like inputs, and a step's checkpoint costs nothing more. Triton has no implicit state for this backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from executor.engine.state_tensors import check_checkpoint, initial_state
from shared.contract.model_config import StateSpec
from shared.contract.tensors import Tensor, described

States = Mapping[str, Tensor]
"""States by input name, without the batch dimension."""


class SlotStates:
    """The states of every slot of one engine."""

    def __init__(self, specs: Sequence[StateSpec], model_dir: Path, bytes_max: int) -> None:
        """bytes_max: largest state of one sequence. Raises LoadError if a file of initial state cannot be used, or a
        state is larger.
        """
        self._specs = tuple(specs)
        self.initial: States = {spec.input_name: initial_state(model_dir, spec, bytes_max) for spec in specs}
        self._slots: dict[int, States] = {}

    def at(self, slot: int) -> States:
        """A slot's states; the initial ones if it has none."""
        return self._slots.get(slot, self.initial)

    def put(self, slot: int, states: States) -> None:
        """Replaces a slot's states, which the caller has checked."""
        self._slots[slot] = states

    def load(self, slot: int, states: States) -> None:
        """Puts a checkpoint into a slot. Raises ModelError when a state is missing or does not fit."""
        for spec in self._specs:
            check_checkpoint(spec, states.get(spec.input_name))
        self._slots[slot] = {spec.input_name: states[spec.input_name] for spec in self._specs}

    def drop(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def describe(self, slot: int) -> str:
        """One line: each state's name, dtype, shape, mean and norm."""
        return described(self.at(slot))
