"""Checks that a row's inputs are what the configuration declares, and tells which rows can share a tensor.

Pure. The gateway has checked the same already. It is checked again because a batch is one buffer per input: a row with
a byte too few would shift every later row into its neighbour's result.
"""

from __future__ import annotations

from dataclasses import dataclass

from executor.engine import shapes
from executor.engine.base import Row, RowError
from shared.contract.errors import Code
from shared.contract.model_config import ModelConfig, TensorSpec
from shared.contract.tensors import ELEMENT_BYTES, Tensor, bytes_elements, element_count, shape_text

KNOWN_SHAPES = 1024
"""Combinations of shapes remembered per engine. At the bound all are forgotten, so that odd requests cost no memory."""

InputShapes = tuple[shapes.Shape | None, ...]
"""Per declared input, the shape with its batch dimension; None for an optional input that is absent."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a combination of input shapes means.

    key      equal for rows that can be concatenated: the shapes without batch dimension
    rows     how many rows of the batch the request brings
    sizes    (input, datatype, bytes) of each present input; bytes is 0 for BYTES, whose size the shape does not tell
    problem  why the row cannot be run; "" if it can
    """

    key: InputShapes
    rows: int = 1
    sizes: tuple[tuple[str, str, int], ...] = ()
    problem: str = ""


class RowShapes:
    """Judges the rows of one model; remembers its verdicts by shape."""

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.name
        self._specs = config.inputs
        self._names = tuple(spec.name for spec in config.inputs)
        self._batched = config.max_batch_size > 0
        self._known: dict[InputShapes, Verdict] = {}

    def judge(self, row: Row) -> Verdict | RowError:
        """The verdict on a row that is not null, or the error that the row ends with."""
        inputs = row.inputs
        given = tuple([tensor.shape if (tensor := inputs.get(name)) is not None else None for name in self._names])
        verdict = self._known.get(given)
        if verdict is None:
            if len(self._known) >= KNOWN_SHAPES:
                self._known.clear()
            verdict = self._known[given] = self._verdict(given)
        if verdict.problem:
            return RowError(Code.INVALID_ARG, verdict.problem)
        for name, datatype, size in verdict.sizes:
            tensor = inputs[name]
            if tensor.datatype != datatype:
                return RowError(Code.INVALID_ARG, self._wrong_type(name, tensor.datatype, datatype))
            if datatype == "BYTES":
                if (problem := self._text_problem(tensor)) is not None:
                    return RowError(Code.INVALID_ARG, problem)
            elif len(tensor.raw) != size:
                return RowError(Code.INVALID_ARG, self._wrong_size(name, len(tensor.raw), size))
        return verdict

    def _verdict(self, given: InputShapes) -> Verdict:
        key: list[shapes.Shape | None] = []
        counts: set[int] = set()
        sizes: list[tuple[str, str, int]] = []
        for spec, shape in zip(self._specs, given, strict=True):
            if shape is None:
                if not spec.optional:
                    return Verdict((), problem=f"input '{spec.name}' of model '{self._model}' is missing")
                key.append(None)
                continue
            if not self._is_allowed(spec, shape):
                return Verdict((), problem=self._wrong_shape(spec, shape))
            counts.add(shape[0] if self._batched else 1)
            key.append(shape[1:] if self._batched else shape)
            sizes.append((spec.name, spec.datatype, ELEMENT_BYTES.get(spec.datatype, 0) * element_count(shape)))
        if len(counts) > 1:
            return Verdict((), problem=f"inputs of model '{self._model}' have different batch sizes")
        return Verdict(tuple(key), counts.pop() if counts else 1, tuple(sizes))

    def _is_allowed(self, spec: TensorSpec, shape: shapes.Shape) -> bool:
        if not self._batched:
            return shapes.fits(shape, spec.dims)
        return len(shape) > 0 and shape[0] > 0 and shapes.fits(shape[1:], spec.dims)

    def _wrong_shape(self, spec: TensorSpec, shape: shapes.Shape) -> str:
        expected = (-1, *spec.dims) if self._batched else spec.dims
        return (
            f"unexpected shape for input '{spec.name}' for model '{self._model}'. "
            f"Expected {shape_text(expected)}, got {shape_text(shape)}"
        )

    def _wrong_type(self, name: str, got: str, expected: str) -> str:
        return f"inference input '{name}' data-type is '{got}', but model '{self._model}' expects '{expected}'"

    def _text_problem(self, tensor: Tensor) -> str | None:
        try:
            count = sum(1 for _ in bytes_elements(tensor.raw))
        except ValueError as error:
            return f"{error} in input '{tensor.name}' of model '{self._model}'"
        if count != element_count(tensor.shape):
            return (
                f"input '{tensor.name}' of model '{self._model}' has {count} elements, but its shape "
                f"{shape_text(tensor.shape)} asks for {element_count(tensor.shape)}"
            )
        return None

    def _wrong_size(self, name: str, got: int, expected: int) -> str:
        return f"input '{name}' of model '{self._model}' has {got} bytes of data, but its shape asks for {expected}"
