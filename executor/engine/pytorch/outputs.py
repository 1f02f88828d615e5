"""Splits what a module returned into one tensor per row and output, checked against the configuration."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from executor.engine import shapes
from executor.engine.base import Row
from executor.engine.batch_tensors import scattered_shape
from executor.engine.pytorch.arena import text_shape
from executor.engine.pytorch.call import BatchFailedError, Layout
from executor.engine.pytorch.datatypes import DATATYPE, TORCH_TYPE
from executor.engine.pytorch.running_batch import Pieces
from executor.engine.pytorch.state_values import Texts
from executor.engine.ragged import request_shapes
from shared.contract.errors import Code
from shared.contract.model_config import ModelConfig, TensorSpec
from shared.contract.tensors import Tensor, element_count, pack_bytes, shape_text


class Outputs:
    """Splits what one module returns. Raises BatchFailedError, because a wrong output is wrong for all rows."""

    def __init__(self, config: ModelConfig, places: Mapping[str, int]) -> None:
        """places: the position of each output and state, for models that return them in order"""
        self._config = config
        self._batched = config.max_batch_size > 0
        self._places = places
        self._cut_by = {name: output.source for output in config.batch_outputs for name in output.names}

    def columns(self, returned: Any, layout: Layout, pieces: Pieces) -> dict[str, list[Tensor]]:
        """Each row's tensor, by output, in the order of the configuration. Only outputs that some row asked for."""
        batch, counts, positions, total = layout
        asked = [batch[position] for position in positions]
        every = not all(row.outputs for row in asked)
        names = set[str]() if every else {name for row in asked for name in row.outputs}
        columns: dict[str, list[Tensor]] = {}
        for spec in self._config.outputs:
            if not every and spec.name not in names:
                continue
            value = self.value(returned, spec.name)
            if spec.name in self._cut_by:
                columns[spec.name] = self._scattered(spec, value, batch, pieces)
            elif spec.datatype == "BYTES":
                columns[spec.name] = self._text_column(spec, value, counts, total)
            else:
                shape = self._checked(spec, value, total)
                columns[spec.name] = self._sliced(spec, value, shape, counts, total, pieces)
        return columns

    def row(self, row: Row, columns: Mapping[str, list[Tensor]], position: int) -> list[Tensor]:
        """The outputs that one row asked for."""
        if not row.outputs:
            return [column[position] for column in columns.values()]
        return [column[position] for name, column in columns.items() if name in row.outputs]

    def value(self, returned: Any, name: str) -> Any:
        """The returned value of one output or state, unchecked."""
        if isinstance(returned, dict):
            by_key = cast("dict[str, Any]", returned)
            if name not in by_key:
                raise self._wrong(name, "a value under that key", f"keys {', '.join(map(str, by_key))}")
            return by_key[name]
        values = several(returned)
        position = self._places[name]
        if position >= len(values):
            raise self._wrong(name, f"a value at position {position}", f"{len(values)} values")
        return values[position]

    def _wrong(self, name: str, expected: str, got: str) -> BatchFailedError:
        return BatchFailedError(
            f"model '{self._config.name}' returned a wrong output '{name}': expected {expected}, got {got}"
        )

    def _checked(self, spec: TensorSpec, value: Any, total: int) -> shapes.Shape:
        """The output's row shape as the client sees it."""
        dims = shapes.declared_by_model(spec)
        expected = f"{spec.datatype} {shape_text((total, *dims) if self._batched else dims)}"
        shape = tuple(self._strided(spec, value, expected).shape)
        row_shape = shape[1:] if self._batched else shape
        leading = not self._batched or (len(shape) > 0 and shape[0] == total)
        if value.dtype is not TORCH_TYPE[spec.datatype] or not leading or not shapes.fits(row_shape, dims):
            raise self._wrong(spec.name, expected, f"{DATATYPE.get(value.dtype, value.dtype)} {shape_text(shape)}")
        return shapes.for_client(spec, row_shape)

    def _strided(self, spec: TensorSpec, value: Any, expected: str) -> torch.Tensor:
        """The value, if it is a tensor that has its elements one by one: no sparse one."""
        if not isinstance(value, torch.Tensor):
            raise self._wrong(spec.name, expected, type(value).__name__)
        if value.layout is not torch.strided:
            raise self._wrong(spec.name, expected, f"a tensor of the layout {value.layout}")
        return value

    def _sliced(
        self,
        spec: TensorSpec,
        value: torch.Tensor,
        shape: shapes.Shape,
        counts: Sequence[int],
        total: int,
        pieces: Pieces,
    ) -> list[Tensor]:
        name, datatype = spec.name, spec.datatype
        if not self._batched:
            return [Tensor(name, datatype, shape, raw) for raw in pieces(value, 1, [(0, 1)])]
        raws = pieces(value, total, _spans(counts))
        if sum(counts) == len(counts):
            row_shape = (1, *shape)
            return [Tensor(name, datatype, row_shape, raw) for raw in raws]
        return [Tensor(name, datatype, (count, *shape), raw) for count, raw in zip(counts, raws, strict=True)]

    def _scattered(self, spec: TensorSpec, value: Any, batch: Sequence[Row], pieces: Pieces) -> list[Tensor]:
        """Each row's part of an output of the whole batch, in which the parts lie one after the other."""
        source = self._cut_by[spec.name]
        if any(source not in row.inputs for row in batch if not row.null):
            raise BatchFailedError(
                f"model '{self._config.name}': output '{spec.name}' cannot be cut without input '{source}'",
                Code.INVALID_ARG,
            )
        cut = [scattered_shape(spec.dims, shape, batched=self._batched) for shape in request_shapes(source, batch)]
        counts = [element_count(shape) for shape in cut]
        if spec.datatype == "BYTES":
            raws = self._cut_strings(spec, value, counts)
        else:
            raws = self._cut(spec, value, counts, pieces)
        return [Tensor(spec.name, spec.datatype, shape, raw) for shape, raw in zip(cut, raws, strict=True)]

    def _cut(self, spec: TensorSpec, value: Any, counts: Sequence[int], pieces: Pieces) -> list[bytes]:
        expected = f"{spec.datatype} with {sum(counts)} elements"
        tensor = self._strided(spec, value, expected)
        if tensor.dtype is not TORCH_TYPE[spec.datatype] or tensor.numel() != sum(counts):
            got = f"{DATATYPE.get(tensor.dtype, tensor.dtype)} {shape_text(tensor.shape)}"
            raise self._wrong(spec.name, expected, got)
        # An element is a row.
        return pieces(tensor.reshape(-1), max(1, tensor.numel()), _spans(counts))

    def _cut_strings(self, spec: TensorSpec, value: Any, counts: Sequence[int]) -> list[bytes]:
        if not isinstance(value, list):
            raise self._wrong(spec.name, "List[str]", type(value).__name__)
        strings = cast("list[str]", value)
        if len(strings) != sum(counts):
            raise self._wrong(spec.name, f"{sum(counts)} strings", f"{len(strings)} strings")
        return [pack_bytes(strings[begin:end]) for begin, end in _spans(counts)]

    def _text_column(self, spec: TensorSpec, value: Any, counts: Sequence[int], total: int) -> list[Tensor]:
        dims = shapes.declared_by_model(spec)
        if not isinstance(value, list):
            raise self._wrong(spec.name, "List[str]", type(value).__name__)
        strings = value.in_batch if isinstance(value, Texts) and not self._batched else cast("list[str]", value)
        if len(strings) % total:
            raise self._wrong(spec.name, f"the same number for each of {total} rows", f"{len(strings)} strings")
        per_row = len(strings) // total
        try:
            shape = shapes.for_client(spec, text_shape(dims, strings, total))
        except ValueError as error:
            raise self._wrong(spec.name, shape_text(dims), str(error)) from error
        return [
            Tensor(
                spec.name,
                "BYTES",
                (end - begin, *shape) if self._batched else shape,
                pack_bytes(strings[begin * per_row : end * per_row]),
            )
            for begin, end in _spans(counts)
        ]


def _spans(counts: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Where each of the pieces, which lie one after the other, begins and ends."""
    return itertools.pairwise(itertools.accumulate(counts, initial=0))


def several(returned: Any) -> Sequence[Any]:
    """What forward returned as a sequence of values; one tensor, or one list of strings, is one value."""
    if isinstance(returned, tuple):
        return cast("tuple[Any, ...]", returned)
    values = cast("list[Any]", returned) if isinstance(returned, list) else []
    if values and not isinstance(values[0], str):
        return values
    return [returned]
