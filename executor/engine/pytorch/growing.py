"""A state that grows along one axis, an attention cache say (`use_growable_memory`).

A step usually leaves what was there and adds positions behind it. Then only these are copied into the slot's memory,
which has room for more, and only these go into the checkpoint. That the rest is unchanged is not taken for granted: the
new state is compared, bit for bit, with the one before. It costs as much as one copy of the state on the same device,
which the step makes anyway for the model to read. Where the model has changed, moved or removed positions, everything
from the first changed one on is written.

A checkpoint is cut into parts at fixed positions (`shared.contract.state_fields`). So Redis holds each position once,
no parts must ever be put together there, and a step writes at most the one part in which the state ended, and those
behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from executor.engine.pytorch.datatypes import TORCH_TYPE, raw_of, tensor_of
from executor.engine.pytorch.places import FIRST_SLOT, Places
from executor.engine.pytorch.state_values import SlotTensors
from shared.contract.model_config import StateSpec
from shared.contract.state_fields import GrownState, Parts, TensorInParts
from shared.contract.tensors import Tensor

BITS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the same size: equal numbers may differ in their bits (zeros), and equal bits may be no number (NaN)."""


@dataclass(slots=True, eq=False)
class _Grown:
    """The state of one slot.

    memory     the state and room behind it, along the axis
    length     positions of the state
    saved      positions that the last checkpoint holds; None if there is none, or it does not lie in parts like these
    unchanged  leading positions that are since that checkpoint as it holds them
    """

    memory: torch.Tensor
    length: int = 0
    saved: int | None = None
    unchanged: int = 0


class GrowingState(SlotTensors[_Grown]):
    """Each tensor has room to grow; rows of a batch have one length. In the place of `tensors` it has `grown`."""

    def __init__(self, spec: StateSpec, initial: Tensor, device: torch.device, bytes_max: int) -> None:
        super().__init__(spec, initial, device, bytes_max)
        axis = spec.growth_axis
        assert axis is not None, f"state '{spec.input_name}' does not grow"
        self._axis = axis
        self._part_length = Parts.along(axis, spec.datatype, spec.dims).length

    @property
    def byte_size(self) -> int:
        """Bytes of all slots together, with their room."""
        return sum(grown.memory.nbytes for grown in list(self._slots.values()))

    def _at(self, place: int) -> torch.Tensor:
        grown = self._slots.get(place)
        return self._initial if grown is None else grown.memory.narrow(self._axis, 0, grown.length)

    def _size_problem(self, size: int) -> str | None:
        if size <= self._bytes_max:
            return None
        return (
            f"it has {size} bytes, and the mesh keeps no more than {self._bytes_max} of one state "
            "(proto-max-bulk-len): have the model drop its oldest positions, or begin anew with START sooner"
        )

    # --- what a step has left of the state before it

    def _kept(self, places: Places, value: torch.Tensor) -> Sequence[int]:
        """Of each row: how many leading positions the step has left as they were. 0 for a row that begins anew."""
        found = places.kept_positions.get(self.spec.input_name)
        if found is None:
            found = [
                leading_equal(self._at(place), row, self._axis) if place >= FIRST_SLOT else 0
                for place, row in zip(places.reads, value, strict=False)
            ]
            places.kept_positions[self.spec.input_name] = found
        return found

    # --- checkpoints

    def begins_anew(self, places: Places, value: torch.Tensor, row: int) -> bool:
        """Whether the row's next checkpoint must replace all of the last one: it is the first of a run, its owner does
        not know what the last one holds, or the last one has more parts.
        """
        grown = self._slots.get(places.writes[row])
        if places.reads[row] < FIRST_SLOT or grown is None or grown.saved is None:
            return True
        return self._count(value.shape[1 + self._axis]) < self._count(grown.saved)

    def _count(self, positions: int) -> int:
        return -(-positions // self._part_length)

    def grown(self, places: Places, value: torch.Tensor, anew: Sequence[bool]) -> dict[int, GrownState]:
        """What the checkpoint of each saved row writes. anew: rows for which any state `begins_anew`"""
        form = Parts(self._axis, self._part_length, self.spec.datatype, tuple(value.shape[1:]))
        return {
            row: self._grown(form, value[row], 0 if anew[row] else self._unchanged(places, value, row), anew=anew[row])
            for row, saves in enumerate(places.saves)
            if saves
        }

    def _unchanged(self, places: Places, value: torch.Tensor, row: int) -> int:
        return min(self._slots[places.writes[row]].unchanged, self._kept(places, value)[row])

    def _grown(self, form: Parts, state: torch.Tensor, unchanged: int, *, anew: bool) -> GrownState:
        first = unchanged // form.length
        begin = first * form.length
        raw = raw_of(state.narrow(form.axis, begin, form.shape[form.axis] - begin).movedim(form.axis, 0))
        return GrownState(self.spec.input_name, form, first, form.cut(raw), anew)

    # --- changes

    def scatter(self, places: Places, value: torch.Tensor) -> None:
        kept = self._kept(places, value)
        for row, place in enumerate(places.writes):
            if place >= FIRST_SLOT and places.ends[row]:
                self.drop(place)
            elif place >= FIRST_SLOT:
                self._write(place, value[row], kept[row], begins=places.reads[row] < FIRST_SLOT)
                if places.saves[row]:
                    grown = self._slots[place]
                    grown.saved = grown.unchanged = grown.length

    def _write(self, place: int, state: torch.Tensor, kept: int, *, begins: bool) -> None:
        """Writes a state behind its first `kept` positions, which the arena has already."""
        length = state.shape[self._axis]
        grown = self._slots.get(place)
        if grown is None or begins:
            kept = 0
            grown = self._slots[place] = _Grown(self._memory(state, length))
        elif grown.memory.shape[self._axis] < length:
            # Twice as long: each position is copied once on average, however long the state becomes.
            memory = self._memory(state, 2 * length)
            memory.narrow(self._axis, 0, kept).copy_(grown.memory.narrow(self._axis, 0, kept))
            grown.memory = memory
        grown.memory.narrow(self._axis, kept, length - kept).copy_(state.narrow(self._axis, kept, length - kept))
        grown.length = length
        grown.unchanged = min(grown.unchanged, kept)

    def _memory(self, like: torch.Tensor, positions: int) -> torch.Tensor:
        shape = list(like.shape)
        shape[self._axis] = positions
        return torch.empty(shape, dtype=TORCH_TYPE[self.spec.datatype], device=self._device)

    def put(self, places: Sequence[int], tensors: Sequence[Tensor]) -> None:
        for place, tensor in zip(places, tensors, strict=True):
            state = tensor_of([tensor.raw], self.spec.datatype, tensor.shape, self._device)
            grown = self._slots[place] = _Grown(state, tensor.shape[self._axis])
            parts = tensor.parts if isinstance(tensor, TensorInParts) else None
            if parts is not None and (parts.axis, parts.length) == (self._axis, self._part_length):
                grown.saved = grown.unchanged = grown.length


def leading_equal(before: torch.Tensor, after: torch.Tensor, axis: int) -> int:
    """How many leading positions along an axis have the same bits in two tensors, which differ in that axis alone."""
    count = min(before.shape[axis], after.shape[axis])
    pair = [tensor.narrow(axis, 0, count).view(BITS[tensor.element_size()]) for tensor in (before, after)]
    if _equal(pair[0], pair[1]):
        return count
    differs = (pair[0] != pair[1]).movedim(axis, 0).reshape(count, -1).any(dim=1)
    return int(differs.to(torch.uint8).argmax())


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    # On the CPU numpy compares four times as fast as torch.
    if one.device.type == "cpu":
        return bool(np.array_equal(cast("Any", one.numpy()), cast("Any", other.numpy())))
    return torch.equal(one, other)
