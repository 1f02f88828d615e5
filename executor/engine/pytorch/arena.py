"""The implicit state of an engine's sequences, between steps.

A state of fixed shape is one tensor on the device, `[places, *dims]`: a batch reads its rows by one gather and writes
them by one scatter. The first three places are the initial state (read by START rows), zeros (read by null rows) and
scrap (written by null rows); the slots follow. So no row of a batch is a special case, and padding can never reach a
sequence's state. The tensor grows with the highest slot that was used. A state of variable shape, and a BYTES state, is
kept per slot; so is one that grows (`growing`).

The arena is a cache of what Redis holds: after a takeover `put` fills it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from executor.engine import shapes
from executor.engine.pytorch.datatypes import STORAGE_TYPE, TORCH_TYPE, on_device, tensor_of
from executor.engine.pytorch.growing import GrowingState
from executor.engine.pytorch.places import FIRST_SLOT, INITIAL_PLACE, NULL_PLACE, Places
from executor.engine.pytorch.running_batch import Pieces
from executor.engine.pytorch.state_values import SlotTensors, Texts, row_tensors, tensor_problem, wire_form
from executor.engine.state_tensors import check_checkpoint, initial_state, size_problem
from shared.contract.errors import LoadError
from shared.contract.model_config import StateSpec
from shared.contract.state_fields import GrownState
from shared.contract.tensors import Tensor, bytes_elements, described, element_count, pack_bytes, shape_text

SLOTS_AT_FIRST = 64
"""Slots for which a state of fixed shape has room before it grows."""
PUT_BYTES_MAX = 64 << 20
"""Bytes of checkpoints that are copied to the device at once: in the host's memory they are there twice meanwhile."""


class StateArena:
    """All states of an engine, in the order of the configuration."""

    def __init__(
        self,
        specs: Sequence[StateSpec],
        slots: int,
        model_dir: Path,
        device: torch.device,
        bytes_max: int,
        firsts: Mapping[str, Tensor] | None = None,
    ) -> None:
        """bytes_max: largest state of one sequence. firsts: first content, by input name, of states that do not begin
        as the configuration says. Raises LoadError if a file of initial state cannot be used, or a state is larger.
        """
        self._places = FIRST_SLOT + min(slots, SLOTS_AT_FIRST)
        self._places_max = FIRST_SLOT + slots
        self.device = device
        self.states = [
            _state(
                spec,
                self._places,
                (firsts or {}).get(spec.input_name) or initial_state(model_dir, spec, bytes_max),
                device,
                bytes_max,
            )
            for spec in specs
        ]
        self.varies = any(not isinstance(state, FixedState) for state in self.states)
        self.grows = any(isinstance(state, GrowingState) for state in self.states)

    def place(self, slot: int) -> int:
        """The place of a slot's states; there is room for them from now on."""
        place = FIRST_SLOT + slot
        if place >= self._places:
            places = min(self._places_max, max(2 * self._places, place + 1))
            for state in self.states:
                if isinstance(state, FixedState):
                    state.grow(places)
            # Last: if there is no memory for one of them, the next slot tries again.
            self._places = places
        return place

    @property
    def byte_size(self) -> int:
        """Bytes that the states of fixed size, and those that grow, take on the device now."""
        return sum(state.byte_size for state in self.states if isinstance(state, FixedState | GrowingState))

    def tensors(self, values: Sequence[Any], rows: int, pieces: Pieces) -> list[tuple[str, list[Tensor]]]:
        """A batch's states for the checkpoints, by the name of the input, row by row; without those that grow."""
        return [
            (state.spec.input_name, state.tensors(value, rows, pieces))
            for state, value in zip(self.states, values, strict=True)
            if not isinstance(state, GrowingState)
        ]

    def grown(self, places: Places, values: Sequence[Any]) -> list[dict[int, GrownState]]:
        """What the checkpoints of a batch's rows write of the states that grow: state by state, by row. Asked before
        the new states are written.
        """
        if not (self.grows and any(places.saves)):
            return []
        pairs = zip(self.states, values, strict=True)
        growing = [(state, value) for state, value in pairs if isinstance(state, GrowingState)]
        # Of one row all or none: what replaces a checkpoint replaces the fields of all states.
        anew = [
            any(state.begins_anew(places, value, row) for state, value in growing) for row in range(len(places.writes))
        ]
        return [state.grown(places, value, anew) for state, value in growing]

    def load(self, slots: Sequence[int], states: Sequence[Mapping[str, Tensor]]) -> None:
        """Puts checkpoints into slots: all of them or, if a state does not fit, none. Raises ModelError."""
        for state in self.states:
            # All are checked before one is put, so that a refused checkpoint changes nothing.
            for checkpoint in states:
                check_checkpoint(state.spec, checkpoint.get(state.spec.input_name))
        places = [self.place(slot) for slot in slots]
        for state in self.states:
            state.put(places, [checkpoint[state.spec.input_name] for checkpoint in states])

    def drop(self, slot: int) -> None:
        for state in self.states:
            state.drop(FIRST_SLOT + slot)

    def describe(self, slot: int) -> str:
        """One line: each state's name, dtype, shape, mean and norm."""
        return described({state.spec.input_name: state.tensor(self.place(slot)) for state in self.states})


def _state(
    spec: StateSpec, places: int, initial: Tensor, device: torch.device, bytes_max: int
) -> FixedState | LooseState | TextState | GrowingState:
    if spec.datatype == "BYTES":
        return TextState(spec, initial, bytes_max)
    if spec.growth_axis is not None:
        return GrowingState(spec, initial, device, bytes_max)
    if -1 in spec.dims:
        return LooseState(spec, initial, device, bytes_max)
    return FixedState(spec, places, initial, device)


class FixedState:
    """A state whose shape never changes: `[places, *dims]` on the device. Of every kind of state a batch's new value is
    used once `problem` has found nothing wrong with it.
    """

    def __init__(self, spec: StateSpec, places: int, initial: Tensor, device: torch.device) -> None:
        self.spec = spec
        self._dtype = TORCH_TYPE[spec.datatype]
        self._storage = STORAGE_TYPE.get(self._dtype, self._dtype)
        self._rows = torch.zeros((places, *spec.dims), dtype=self._storage, device=device)
        self._rows[INITIAL_PLACE] = tensor_of([initial.raw], spec.datatype, spec.dims, device).view(self._storage)

    @property
    def byte_size(self) -> int:
        """Bytes of all places together."""
        return self._rows.nbytes

    def grow(self, places: int) -> None:
        """Makes room for so many places, if there is less."""
        missing = max(0, places - len(self._rows))
        added = torch.zeros((missing, *self.spec.dims), dtype=self._storage, device=self._rows.device)
        self._rows = torch.cat((self._rows, added))

    def shape(self, place: int) -> None:
        """The shape of the state at a place, if rows of a batch may differ in it; None: they cannot."""

    def gather(self, places: Places) -> torch.Tensor:
        """The batch's state, [rows, *dims]; a copy that the model may write to."""
        rows = self._rows.index_select(0, places.read_index)
        return rows if self._storage is self._dtype else rows.view(self._dtype)

    def problem(self, value: object, rows: int) -> str | None:
        """What is wrong with a model's output state for a batch of that many rows; None if nothing is."""
        return tensor_problem(self.spec, value, rows)

    def scatter(self, places: Places, value: torch.Tensor) -> None:
        """Writes the batch's new states into its slots."""
        stored = value if self._storage is self._dtype else value.contiguous().view(self._storage)
        self._rows.index_copy_(0, places.write_index, stored)

    def tensors(self, value: torch.Tensor, rows: int, pieces: Pieces) -> list[Tensor]:
        """A batch's state as one tensor per row for the checkpoints: by input name, without the batch dimension."""
        return row_tensors(self.spec, value, rows, self.spec.dims, pieces)

    def put(self, places: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Sets the states at places. The tensors are already checked against the specification."""
        count = max(1, PUT_BYTES_MAX // max(1, self._rows[0].nbytes))
        for begin in range(0, len(places), count):
            parts = [tensor.raw for tensor in tensors[begin : begin + count]]
            rows = tensor_of(parts, self.spec.datatype, (len(parts), *self.spec.dims), self._rows.device)
            index = on_device(torch.tensor(places[begin : begin + count]), self._rows.device)
            self._rows.index_copy_(0, index, rows.view(self._storage))

    def drop(self, place: int) -> None:
        """Nothing: START reads the initial state, whatever the row holds."""

    def tensor(self, place: int) -> Tensor:
        return wire_form(self.spec, self._rows[place].view(self._dtype))


class LooseState(SlotTensors[torch.Tensor]):
    """A state of variable shape."""

    def _at(self, place: int) -> torch.Tensor:
        return self._slots.get(place, self._initial)

    def scatter(self, places: Places, value: torch.Tensor) -> None:
        for row, place in enumerate(places.writes):
            if place >= FIRST_SLOT:
                # A copy of its own: a view would keep the whole batch's tensor in memory.
                self._slots[place] = value[row].clone()

    def tensors(self, value: torch.Tensor, rows: int, pieces: Pieces) -> list[Tensor]:
        return row_tensors(self.spec, value, rows, tuple(value.shape[1:]), pieces)

    def put(self, places: Sequence[int], tensors: Sequence[Tensor]) -> None:
        for place, tensor in zip(places, tensors, strict=True):
            self._slots[place] = tensor_of([tensor.raw], self.spec.datatype, tensor.shape, self._device)


class TextState:
    """A BYTES state: TorchScript takes and returns it as `List[str]`, every row's elements after each other."""

    def __init__(self, spec: StateSpec, initial: Tensor, bytes_max: int) -> None:
        self.spec = spec
        self._bytes_max = bytes_max
        self._initial = initial
        try:
            _strings(initial)
        except UnicodeDecodeError as error:
            raise LoadError(f"the initial state of '{spec.input_name}' must be UTF-8: {error}") from error
        self._slots: dict[int, Tensor] = {}

    def shape(self, place: int) -> shapes.Shape:
        return self.tensor(place).shape

    def tensor(self, place: int) -> Tensor:
        return self._slots.get(place, self._initial)

    def gather(self, places: Places) -> Texts:
        real = next(place for place in places.reads if place != NULL_PLACE)
        shape = self.tensor(real).shape
        null = [""] * element_count(shape)
        strings: list[str] = []
        for place in places.reads:
            strings += null if place == NULL_PLACE else _strings(self.tensor(place))
        return Texts(strings, (len(places.reads), *shape))

    def problem(self, value: object, rows: int) -> str | None:
        if not isinstance(value, list):
            return f"expected List[str], got {type(value).__name__}"
        strings = cast("list[str]", value)
        if len(strings) % rows:
            return f"{len(strings)} strings cannot be divided among {rows} rows"
        try:
            text_shape(self.spec.dims, strings, rows)
        except ValueError as error:
            return str(error)
        return self._size_problem(strings, rows)

    def _size_problem(self, strings: list[str], rows: int) -> str | None:
        # An upper bound: four bytes of length before each string, and at most four per character. Only beyond it the
        # exact size is computed.
        if 4 * (len(strings) + sum(map(len, strings))) <= self._bytes_max:
            return None
        return size_problem(max(len(tensor.raw) for tensor in self._tensors(strings, rows)), self._bytes_max)

    def scatter(self, places: Places, value: list[str]) -> None:
        for place, tensor in zip(places.writes, self._tensors(value, len(places.writes)), strict=True):
            if place >= FIRST_SLOT:
                self._slots[place] = tensor

    def tensors(self, value: list[str], rows: int, pieces: Pieces) -> list[Tensor]:
        return self._tensors(value, rows)

    def _tensors(self, value: list[str], rows: int) -> list[Tensor]:
        count = len(value) // rows
        shape = text_shape(self.spec.dims, value, rows)
        return [
            Tensor(self.spec.input_name, "BYTES", shape, pack_bytes(value[row * count : (row + 1) * count]))
            for row in range(rows)
        ]

    def put(self, places: Sequence[int], tensors: Sequence[Tensor]) -> None:
        self._slots.update(zip(places, tensors, strict=True))

    def drop(self, place: int) -> None:
        self._slots.pop(place, None)


def _strings(tensor: Tensor) -> list[str]:
    return [element.decode() for element in bytes_elements(tensor.raw)]


def text_shape(dims: Sequence[int], strings: list[str], rows: int) -> shapes.Shape:
    """The shape of one row's strings, of which each row has as many. A plain list tells only their number.
    Raises ValueError if they do not fit, or their number does not determine the shape.
    """
    if isinstance(strings, Texts):
        if strings.shape[:1] == (rows,) and shapes.fits(strings.shape[1:], dims):
            return strings.shape[1:]
        raise ValueError(f"strings of shape {shape_text(strings.shape)} are not {shape_text((rows, *dims))}")
    count = len(strings) // rows
    known = math.prod(dim for dim in dims if dim != -1)
    variable = sum(1 for dim in dims if dim == -1)
    if variable == 0 and known == count:
        return tuple(dims)
    if variable == 1 and known and count % known == 0:
        return tuple(count // known if dim == -1 else dim for dim in dims)
    raise ValueError(f"{count} strings per row do not fill the shape {shape_text(dims)}")
