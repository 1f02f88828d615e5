"""The values of states as a model takes and returns them for a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch

from executor.engine import shapes
from executor.engine.pytorch.datatypes import DATATYPE, TORCH_TYPE, raw_of
from executor.engine.pytorch.places import NULL_PLACE, Places
from executor.engine.pytorch.running_batch import Pieces
from shared.contract.model_config import StateSpec
from shared.contract.tensors import Tensor, shape_text


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
        return f"{expected}, got {DATATYPE[value.dtype]} {shape_text(value.shape)}"
    return None


def gathered(at: Callable[[int], torch.Tensor], places: Places) -> torch.Tensor:
    """A batch of states that lie apart, [rows, *dims]. at: the state at a place; null rows are zeros of its shape"""
    real = next(at(place) for place in places.reads if place != NULL_PLACE)
    null = torch.zeros_like(real)
    return torch.stack([null if place == NULL_PLACE else at(place) for place in places.reads])


def row_tensors(spec: StateSpec, value: torch.Tensor, rows: int, shape: shapes.Shape, pieces: Pieces) -> list[Tensor]:
    """A batch's state, [rows, *shape], as one tensor per row."""
    name, datatype = spec.input_name, spec.datatype
    return [Tensor(name, datatype, shape, raw) for raw in pieces(value, rows, pairwise(range(rows + 1)))]


def wire_form(spec: StateSpec, row: torch.Tensor) -> Tensor:
    """The state of one sequence, [*dims], by its input name."""
    return Tensor(spec.input_name, spec.datatype, tuple(row.shape), bytes(raw_of(row)))
