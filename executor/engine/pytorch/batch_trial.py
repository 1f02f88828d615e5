"""Tries whether a module that keeps its state in attributes may be given several sequences in one call.

The module was written for one sequence, or for a batch: its code does not say. So made-up sequences are run alone and
together, over several steps, in several orders. Rows share calls from then on only if every output and every state came
out equal. A module that mixes its rows, or that fails with more than one, runs one row per call. The log tells of one
that fails with a single row: its state, or an output, may not be what the configuration says.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np

from executor.core.controls import ControlTensors
from executor.engine import shapes
from executor.engine.base import Row, RowError, RowResult
from executor.engine.null_rows import zeros
from executor.engine.pytorch.engine import TorchEngine
from executor.engine.pytorch.kept_state import KeptForward
from shared.contract.model_config import ModelConfig
from shared.contract.tensors import NUMPY_TYPE, Tensor, element_count, to_numpy

ROWS = 4
STEPS = 3
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
"""How far equal numbers may lie apart: kernels round a batch otherwise than a row, by far less than rows differ."""
_SIZE = 5
"""Of a variable dimension."""
_LARGE = 16
"""How much larger than ordinary numbers large ones are."""

log = logging.getLogger(__name__)


def settle_batches(engine: TorchEngine, forward: KeptForward, config: ModelConfig, slots: int) -> None:
    """Has the engine run each row alone unless rows together give the same."""
    rows = min(ROWS, config.max_batch_size, slots)
    if engine.alone_because or rows <= 1:
        return
    results = partial(_results, engine, forward, config.name)
    made = [[_row(config, slot, step) for slot in range(rows)] for step in range(STEPS)]
    try:
        alone = [results([row])[0] for step in made for row in step]
        together: list[RowResult] = []
        for step, order in zip(made, _orders(rows), strict=True):
            found = results([step[place] for place in order])
            together += [found[order.index(place)] for place in range(rows)]
        if not all(_equal(one, other) for one, other in zip(alone, together, strict=True)):
            engine.run_rows_alone("rows that share a call change each other's results")
    except _TrialError:
        engine.run_rows_alone("the module fails when rows share a call, or on made-up rows")
    finally:
        for slot in range(rows):
            engine.drop_state(slot)


class _TrialError(Exception):
    """A made-up row has no result."""


def _orders(rows: int) -> Sequence[Sequence[int]]:
    chance = np.random.default_rng(0)
    return [[int(place) for place in chance.permutation(rows)] for _ in range(STEPS)]


def _results(engine: TorchEngine, forward: KeptForward, model: str, rows: Sequence[Row]) -> list[RowResult]:
    """The results of rows that share a call. Raises _TrialError if they needed several."""
    before = forward.calls
    found = engine.run(rows, [True] * len(rows)).rows
    if len(rows) == 1 and isinstance(found[0], RowError):
        log.warning("model '%s' failed on a made-up step at load: %s", model, found[0].message)
    results = [result for result in found if isinstance(result, RowResult)]
    if len(results) != len(rows) or forward.calls != before + 1:
        raise _TrialError
    return results


def _equal(one: RowResult, other: RowResult) -> bool:
    return all(_close(mine, given) for mine, given in zip(_tensors(one), _tensors(other), strict=True))


def _tensors(result: RowResult) -> list[Tensor]:
    return [*result.outputs, *result.states.values(), *(state.added for state in result.grown)]


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.datatype != other.datatype:
        return False
    if one.datatype not in _FLOATS:
        return one.raw == other.raw
    return np.allclose(to_numpy(one), to_numpy(other), _RELATIVE, _ABSOLUTE, equal_nan=True)


_FLOATS = ("FP16", "FP32", "FP64")


def _row(config: ModelConfig, slot: int, step: int) -> Row:
    """A step of a made-up sequence, other for each slot and step."""
    chance = np.random.default_rng((slot, step))
    # Rows with large numbers show what is chosen by the largest or least one of a call.
    sign = (1, -1, 0, 0)[slot] if step == STEPS - 1 else 0
    inputs: dict[str, Tensor] = {}
    for spec in config.inputs:
        dims = tuple(_SIZE if dim == -1 else dim for dim in spec.dims)
        inputs[spec.name] = Tensor(spec.name, spec.datatype, (1, *dims), _content(spec.datatype, dims, chance, sign))
    controls = ControlTensors(config).of_nobody(start=step == 0, end=False, number=slot + 1)
    return Row(inputs, controls, slot=slot, start=step == 0, correlation_id=slot + 1)


def _content(datatype: str, dims: shapes.Shape, chance: np.random.Generator, sign: int) -> bytes:
    """sign: of large numbers; 0 for ordinary ones"""
    if datatype in ("BYTES", "BF16"):
        return zeros(datatype, dims)
    kind = np.dtype(NUMPY_TYPE[datatype])
    if kind.kind == "f":
        numbers = chance.standard_normal(element_count(dims))
        return (numbers if not sign else sign * _LARGE * np.abs(numbers)).astype(kind).tobytes()
    # Small, because a number may be a word of a vocabulary.
    return chance.integers(0, 2, element_count(dims)).astype(kind).tobytes()
