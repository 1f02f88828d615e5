"""What the checkpoints of states that grow hold, of engines that hand such a state out whole.

The next checkpoint then writes what was added, and not the whole. The new state is compared with the one that the last
checkpoint holds, bit for bit; everything from the first changed position on is written. An engine that keeps states on
a device does the same there (`executor.engine.pytorch.growing`), and its results bring no such state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from executor.engine.base import RowResult
from shared.contract.ids import SequenceId
from shared.contract.model_config import StateSpec
from shared.contract.state_fields import GrownState, Parts
from shared.contract.tensors import ELEMENT_BYTES, Tensor


class WrittenStates:
    """Of one instance's sequences. Each step whose checkpoint was made is committed, or its sequence leaves."""

    def __init__(self, specs: Sequence[StateSpec]) -> None:
        self._axes = {spec.input_name: axis for spec in specs if (axis := spec.growth_axis) is not None}
        self._written: dict[SequenceId, Mapping[str, Tensor]] = {}

    def cut(self, sequence: SequenceId, result: RowResult) -> RowResult:
        """A step's result with what its checkpoint writes of the states that grow, in the place of these states."""
        states = {name: result.states[name] for name in self._axes if name in result.states}
        if not states:
            return result
        forms = {name: self._form(name, state) for name, state in states.items()}
        before = self._written.get(sequence, {})
        # What Redis holds is not known, or has more parts: then nothing of it may stay.
        anew = any(
            name not in before or self._form(name, before[name]).count > form.count for name, form in forms.items()
        )
        self._written[sequence] = states
        return msgspec.structs.replace(
            result,
            states={name: state for name, state in result.states.items() if name not in states},
            grown=[grown_state(forms[name], None if anew else before[name], one) for name, one in states.items()],
        )

    def _form(self, name: str, state: Tensor) -> Parts:
        return Parts.along(self._axes[name], state.datatype, state.shape)

    def forget(self, sequence: SequenceId) -> None:
        """The sequence leaves this executor, or begins anew."""
        self._written.pop(sequence, None)

    def forget_all(self) -> None:
        self._written.clear()


def grown_state(form: Parts, before: Tensor | None, state: Tensor) -> GrownState:
    """What a checkpoint writes of a state. before: what the last one holds; None if it must be replaced"""
    positions = _positions(state, form.axis)
    first = 0 if before is None else leading_equal(_positions(before, form.axis), positions) // form.length
    parts = form.cut(positions[first * form.length :].tobytes())
    return GrownState(state.name, form, first, parts, anew=before is None)


def _positions(state: Tensor, axis: int) -> NDArray[Any]:
    """A view of a state's bits, with the axis first: equal numbers may differ in their bits (zeros), and equal bits
    may be no number (NaN).
    """
    return np.moveaxis(np.frombuffer(state.raw, f"u{ELEMENT_BYTES[state.datatype]}").reshape(state.shape), axis, 0)


def leading_equal(before: NDArray[Any], after: NDArray[Any]) -> int:
    """How many leading positions of two arrays are equal; they differ in shape by their number of positions alone."""
    count = min(len(before), len(after))
    if np.array_equal(before[:count], after[:count]):
        return count
    return int((before[:count] != after[:count]).reshape(count, -1).any(axis=1).argmax())
