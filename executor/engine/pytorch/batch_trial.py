"""Tries whether the sequences of a model may share a call.

A model was written for one sequence, or for a batch: its code does not say. It may take its rows for time, or norm them
by their mean; then each sequence would be answered by what others sent. So made-up sequences are run over several
steps: together, then one half of them and the other among strangers, then beside NaN. Rows may share calls if every
output and every state comes out equal. The calls have one shape, and a sequence has the same row in them: no kernel
rounds otherwise. What depends on the row or on the number of rows alone (a row's number is added, say) is found by
running one sequence in another row and by itself, too; there results may differ by what kernels round. With the direct
strategy a row is a slot, and may matter.

A module that keeps its state in attributes has to prove that its rows may share calls. A model that takes its states as
arguments claims it, by `max_batch_size`: the trial must disprove it. A random model, and one that refuses what was made
up, is believed. `fixed_shape: "false"` spares such a model the trial.

The log tells of a made-up step that fails alone: a state, or an output, may not be what the configuration says.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from executor.core.controls import ControlTensors
from executor.engine import shapes
from executor.engine.base import Row, RowError, RowResult
from executor.engine.null_rows import zeros
from executor.engine.pytorch.engine import TorchEngine
from executor.engine.pytorch.kept_state import KeptForward
from shared.contract.model_config import ModelConfig
from shared.contract.tensors import FLOATS, NUMPY_TYPE, Tensor, as_float, element_count, float_bytes

ROWS = 4
STEPS = 3
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
"""How far equal numbers may lie apart: some kernels add up in any order."""
_ROUNDED = 0.05
"""The same of calls of other shapes, in parts of the tensor's largest number: kernels round otherwise there, those of
short types coarsely, and every step adds to it.
"""
_SIZE = 5
"""Of a variable dimension."""
_LARGE, _STRANGE = 16, 1000
"""How much larger than ordinary numbers large ones are, and those of strangers."""
_NAN = -1
"""The number of a sequence of NaN. They reach all that is computed of them."""
_MIX = "rows that share a call change each other's results"
_DECIDES = "the module chooses what to compute by a number of a tensor, one for all rows of a call"

log = logging.getLogger(__name__)


def settle_batches(
    engine: TorchEngine, config: ModelConfig, slots: int, *, kept: KeptForward | None = None, decides: bool = False
) -> None:
    """Has the engine of a sequence model run each row alone unless its rows may share calls.

    kept     the model's state lies in attributes
    decides  as of `attributes.Changes`
    """
    rows = min(ROWS, config.max_batch_size, slots)
    is_spared = kept is None and "fixed_shape" in config.parameters
    if engine.alone_because or rows <= 1 or config.sequence_batching is None or is_spared:
        return
    because = _DECIDES if decides else _tried(engine, config, rows, kept)
    if because:
        engine.run_rows_alone(because)
    if because and kept is None:
        log.warning(
            "model '%s': each row is a call of its own, because %s. If sequences may change each other's results, the "
            "parameter fixed_shape with the value false has rows share calls",
            config.name,
            because,
        )


def _tried(engine: TorchEngine, config: ModelConfig, rows: int, kept: KeptForward | None) -> str:
    """Why each row must be a call of its own; "" if rows may share calls."""
    try:
        return _Trial(engine, config, kept).found(rows)
    except _UntoldError as untold:
        return str(untold) if kept is not None else ""
    finally:
        for slot in range(rows):
            engine.drop_state(slot)


class _UntoldError(Exception):
    """The trial proves nothing."""


class _Trial:
    """Made-up sequences, by number, on one engine."""

    def __init__(self, engine: TorchEngine, config: ModelConfig, kept: KeptForward | None) -> None:
        self._engine = engine
        self._config = config
        self._kept = kept

    def found(self, rows: int) -> str:
        """See `_tried`. Raises _UntoldError."""
        half = rows // 2
        alone, together = self._run([0]), self._run(range(rows))
        # The first sequence is in the last row as well.
        first = self._run([*range(half), *range(ROWS, ROWS + rows - half - 1), 0])
        second = self._run([*range(ROWS, ROWS + half), *range(half, rows)])
        halves = [(first if at % rows < half else second)[at] for at in range(len(together))]
        if not all(map(_close, together, halves)):
            if not all(map(_close, together, self._run(range(rows)))):
                raise _UntoldError("the module gives other results each time")
            return _MIX
        has_places = self._config.is_direct
        if not has_places and not all(map(_similar, alone * 2, [*first[::rows], *first[rows - 1 :: rows]])):
            return "the results of a row depend on its place in a call, or on the number of rows"
        if self._engine.device.type == "cuda":
            return ""  # an index that is made of NaN would end the process
        try:
            beside_nan = self._run([*range(rows - 1), _NAN])
        except _UntoldError:  # it refuses them
            return ""
        pairs = zip(together, beside_nan, strict=True)
        return "" if all(_close(*pair) for at, pair in enumerate(pairs) if at % rows < rows - 1) else _MIX

    def _run(self, numbers: Sequence[int]) -> list[RowResult]:
        """The results of sequences that share calls, step by step. Raises _UntoldError."""
        rows = (
            [_row(self._config, slot, number, step) for slot, number in enumerate(numbers)] for step in range(STEPS)
        )
        return [result for step in rows for result in self._results(step)]

    def _results(self, rows: Sequence[Row]) -> list[RowResult]:
        before = self._kept.calls if self._kept is not None else 0
        found = self._engine.run(rows, [True] * len(rows)).rows
        if len(rows) == 1 and isinstance(found[0], RowError):
            # Where a kernel has failed on a GPU, this is the last word of the process that tells why.
            level = logging.WARNING if self._kept is not None or self._engine.device.type == "cuda" else logging.INFO
            log.log(level, "model '%s' failed on a made-up step at load: %s", self._config.name, found[0].message)
        results = [result for result in found if isinstance(result, RowResult)]
        if len(results) != len(rows) or (self._kept is not None and self._kept.calls != before + 1):
            raise _UntoldError("the module fails when rows share a call, or on made-up rows")
        return results


def _tensors(result: RowResult) -> list[Tensor]:
    return [*result.outputs, *result.states.values(), *(state.added for state in result.grown)]


def _close(one: RowResult, other: RowResult) -> bool:
    return all(_is_close(mine, given) for mine, given in zip(_tensors(one), _tensors(other), strict=True))


def _is_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.datatype not in FLOATS:
        return one == other
    return np.allclose(as_float(one), as_float(other), _RELATIVE, _ABSOLUTE, equal_nan=True)


def _similar(one: RowResult, other: RowResult) -> bool:
    """Whether two results differ by rounding alone. What a model chooses by rounded numbers may be anything."""
    pairs = zip(_tensors(one), _tensors(other), strict=True)
    return all(_is_similar(as_float(mine), as_float(given)) for mine, given in pairs if mine.datatype in FLOATS)


def _is_similar(one: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    largest = np.abs(one[np.isfinite(one)]).max(initial=_ABSOLUTE)
    return one.shape == other.shape and np.allclose(one, other, 0, _ROUNDED * largest, equal_nan=True)


def _row(config: ModelConfig, slot: int, number: int, step: int) -> Row:
    """A step of a made-up sequence, other for each number and step."""
    chance = np.random.default_rng((abs(number), step))
    scale = _scale(number) if step == STEPS - 1 else 0
    inputs: dict[str, Tensor] = {}
    for spec in config.inputs:
        dims = tuple(_SIZE if dim == -1 else dim for dim in spec.dims)
        inputs[spec.name] = Tensor(spec.name, spec.datatype, (1, *dims), _content(spec.datatype, dims, chance, scale))
    controls = ControlTensors(config).of_nobody(start=step == 0, end=False, number=number + 1)
    return Row(inputs, controls, slot=slot, start=step == 0, correlation_id=number + 1)


def _scale(number: int) -> float:
    """Of a sequence's large numbers, which show what is chosen by the largest or least one of a call; 0 if its numbers
    are ordinary.
    """
    if number == _NAN:
        return np.nan
    if number >= ROWS:
        return -_STRANGE if number % 2 else _STRANGE
    return {0: _LARGE, 1: -_LARGE}.get(number, 0)


def _content(datatype: str, dims: shapes.Shape, chance: np.random.Generator, scale: float) -> bytes:
    """scale: of large numbers; 0 for ordinary ones"""
    if datatype == "BYTES":
        return zeros(datatype, dims)
    if datatype in FLOATS:
        numbers = chance.standard_normal(element_count(dims))
        return float_bytes(datatype, scale * np.abs(numbers) if scale else numbers)
    # Small, because a number may be a word of a vocabulary.
    return chance.integers(0, 2, element_count(dims)).astype(NUMPY_TYPE[datatype]).tobytes()
