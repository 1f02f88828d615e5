"""The values of states as a model takes and returns them for a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import pairwise
from typing import Generic, TypeVar

import torch

from executor.engine import shapes
from executor.engine.pytorch.datatypes import DATATYPE, TORCH_TYPE, raw_of, tensor_of
from executor.engine.pytorch.places import NULL_PLACE, Places
from executor.engine.pytorch.running_batch import Pieces
from executor.engine.state_tensors import size_problem
from shared.contract.model_config import StateSpec
from shared.contract.tensors import Tensor, shape_text

T = TypeVar("T")


class Texts(list[str]):
    """The strings of a tensor, in order, with its shape. To TorchScript it is a `List[str]`, which has no shape."""

    def __init__(self, strings: Iterable[str], shape: shapes.Shape) -> None:
        super().__init__(strings)
        self.shape = shape

    @property
    def in_batch(self) -> Texts:
        """The same as the one row of a batch."""
        return Texts(self, (1, *self.shape))


def tensor_problem(spec: StateSpec, value: object, rows: int) -> str | None:
    """What is wrong with a model's output state for a batch of so many rows; None if nothing is."""
    dtype = TORCH_TYPE[spec.datatype]
    expected = f"expected {spec.datatype} {shape_text((rows, *spec.dims))}"
    if not isinstance(value, torch.Tensor):
        return f"{expected}, got {type(value).__name__}"
    if value.dtype is not dtype or value.dim() == 0 or value.shape[0] != rows:
        return f"{expected}, got {DATATYPE.get(value.dtype, str(value.dtype))} {shape_text(value.shape)}"
    if value.layout is not torch.strided:
        return f"{expected}, got a tensor of the layout {value.layout}"
    if not shapes.fits(value.shape[1:], spec.dims):
        got = f"got {DATATYPE[value.dtype]} {shape_text(value.shape)}"
        return f"{expected}, {got}; a size that varies is declared as -1 in the state's dims"
    return None


def row_tensors(spec: StateSpec, value: torch.Tensor, rows: int, shape: shapes.Shape, pieces: Pieces) -> list[Tensor]:
    """A batch's state, [rows, *shape], as one tensor per row."""
    name, datatype = spec.input_name, spec.datatype
    return [Tensor(name, datatype, shape, raw) for raw in pieces(value, rows, pairwise(range(rows + 1)))]


def wire_form(spec: StateSpec, row: torch.Tensor) -> Tensor:
    """The state of one sequence, [*dims], by its input name."""
    return Tensor(spec.input_name, spec.datatype, tuple(row.shape), bytes(raw_of(row)))


class SlotTensors(ABC, Generic[T]):
    """A state that lies in one tensor per slot, on the device (see `arena.FixedState`)."""

    def __init__(self, spec: StateSpec, initial: Tensor, device: torch.device, bytes_max: int) -> None:
        self.spec = spec
        self._device = device
        self._bytes_max = bytes_max
        self._initial = tensor_of([initial.raw], spec.datatype, initial.shape, device)
        self._slots: dict[int, T] = {}

    @abstractmethod
    def _at(self, place: int) -> torch.Tensor: ...

    def shape(self, place: int) -> shapes.Shape:
        return tuple(self._at(place).shape)

    def gather(self, places: Places) -> torch.Tensor:
        real = next(self._at(place) for place in places.reads if place != NULL_PLACE)
        null = torch.zeros_like(real)
        return torch.stack([null if place == NULL_PLACE else self._at(place) for place in places.reads])

    def problem(self, value: object, rows: int) -> str | None:
        problem = tensor_problem(self.spec, value, rows)
        if problem is None:
            assert isinstance(value, torch.Tensor)
            problem = self._size_problem(value.nbytes // rows)
        return problem

    def _size_problem(self, size: int) -> str | None:
        return size_problem(size, self._bytes_max)

    def drop(self, place: int) -> None:
        self._slots.pop(place, None)

    def tensor(self, place: int) -> Tensor:
        return wire_form(self.spec, self._at(place))
