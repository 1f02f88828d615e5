"""Implicit state of `python` models: per slot, as the bytes of its checkpoint.

A model gets a copy to work on and returns a new tensor, so bytes are enough: they are joined into one buffer for a
batch as inputs are, and a step's checkpoint costs nothing more. Triton has no implicit state for this backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from executor.engine import shapes
from executor.engine.state_tensors import check_checkpoint, initial_state
from shared.model_config.values import StateSpec
from shared.tensors import Tensor, to_numpy

States = Mapping[str, Tensor]
"""By the state's input name, without the batch dimension."""


class SlotStates:
    """The states of every slot of one engine."""

    def __init__(self, specs: Sequence[StateSpec], model_dir: Path, bytes_max: int) -> None:
        """bytes_max: of one state of one sequence. Raises LoadError when a file of initial state cannot be used, or a
        state has a larger size."""
        self.specs = tuple(specs)
        self.initial: States = {spec.input_name: initial_state(model_dir, spec, bytes_max) for spec in specs}
        self._slots: dict[int, States] = {}

    def at(self, slot: int) -> States:
        """A slot's states; the initial ones when it has none."""
        return self._slots.get(slot, self.initial)

    def put(self, slot: int, states: States) -> None:
        """Replaces a slot's states; they are complete and right."""
        self._slots[slot] = states

    def load(self, slot: int, states: States) -> None:
        """Puts a checkpoint into a slot. Raises ModelError when a state is missing or does not fit."""
        for spec in self.specs:
            check_checkpoint(spec, states.get(spec.input_name))
        self._slots[slot] = {spec.input_name: states[spec.input_name] for spec in self.specs}

    def drop(self, slot: int) -> None:
        """Forgets a slot."""
        self._slots.pop(slot, None)

    def describe(self, slot: int) -> str:
        """One line: each state's name, dtype, shape, mean and norm."""
        return "; ".join(f"{name} {_description(tensor)}" for name, tensor in self.at(slot).items())


def _description(tensor: Tensor) -> str:
    kind = f"{tensor.datatype} {shapes.text(tensor.shape)}"
    if tensor.datatype == "BYTES":
        return f"{kind} {len(tensor.raw)} bytes"
    values = _as_float(tensor)
    mean = float(values.mean()) if values.size else 0.0
    return f"{kind} mean {mean:.6g} norm {float(np.linalg.norm(values)):.6g}"


def _as_float(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    array = to_numpy(tensor).reshape(-1)
    if tensor.datatype == "BF16":
        # A BF16 number is the upper half of the FP32 number with the same bits.
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)
