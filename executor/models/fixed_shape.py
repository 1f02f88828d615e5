"""Tests whether an instance keeps the promise of `fixed_shape` on this machine: a row's outputs and states are the
same, bit by bit, whatever other rows share its batch, and wherever in the batch the row stands.

At load, made-up rows are run in many batches: first all of them together; then in other places and slots, alone, among
null rows, among other rows, and among rows of NaN and infinities; and with weights and inputs at other addresses, as
another executor has them. If padded batches do not keep the promise, each row runs alone. If even then one row has
different results, the model is random (or keeps something from call to call) and is not loaded. The result depends only
on model, kernels and thread count, not on time or load, so machines of one kind agree.

The rows go to the engine itself, as those of warm-up do; the states that they leave are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from executor.core.controls import ControlTensors
from executor.engine import shapes
from executor.engine.base import Engine, FixesShape, Row, RowError, RowResult
from executor.engine.null_rows import NULL_ROW
from executor.models.slots import any_slot
from shared.contract.errors import Code, LoadError
from shared.contract.model_config import FixedShape, ModelConfig
from shared.contract.tensors import FLOATS, NUMPY_TYPE, Tensor, element_count, float_bytes, pack_bytes
from shared.process import logs

TRIALS = 12
"""Batches that are compared with a round's first batch; each puts every row in another place."""
ROUNDS = 4
"""Rounds, each with other rows and other addresses. One is not enough: even different kernels round most rows alike."""
ALIGNMENT_BYTES = 64
ADDRESSES = 64
"""Aligned places in a page."""
WARM_RUNS = 3
"""Runs before the first comparison: TorchScript compiles what it has seen twice, and its first calls may round
otherwise.
"""
ALONE_TESTED = 4
"""Rows of a trial where each row runs alone, so that only the model itself can differ."""
_SEED = 0


_POISON = np.array([np.nan, np.inf, -np.inf])


class TrialResult(Enum):
    SAME = "every row has the same result in every batch"
    DIFFERENT = "results depend on the other rows of a batch"
    FAILED = "the model fails on made-up rows"


def settle_shape(engine: Engine, config: ModelConfig, instance: str, slots: int) -> None:
    """Chooses how the instance runs its batches, and says so in the log. Does nothing without `fixed_shape`.

    slots   of the instance, as it was loaded
    raises  LoadError for a backend that does not know the mode, and for a model whose results are not repeatable
    """
    if config.fixed_shape is FixedShape.OFF:
        return
    if not isinstance(engine, FixesShape):
        raise LoadError(f"parameter 'fixed_shape' is not supported by the backend of model '{config.name}'")
    found = _settled(engine, config, slots) if engine.is_testable else None
    if found is TrialResult.DIFFERENT:
        raise LoadError(
            f"model '{config.name}' cannot have fixed_shape: even alone, the same row has different results from call "
            "to call",
            Code.INVALID_ARG,
        )
    logs.info(
        "fixed shape",
        model=config.name,
        instance=instance,
        rows=engine.batch_rows,
        tested=found is TrialResult.SAME,
        alone=engine.alone_because,
    )


def _settled(engine: FixesShape, config: ModelConfig, slots: int) -> TrialResult:
    """Tests padded batches, and if they fail, rows alone."""
    if not engine.alone_because:
        found = trials(engine, config, config.max_batch_size, slots)
        if found is TrialResult.SAME:
            return found
        engine.run_rows_alone(found.value)
    return trials(engine, config, ALONE_TESTED, slots)


def trials(engine: FixesShape, config: ModelConfig, rows: int, slots: int) -> TrialResult:
    """Runs made-up rows in different batches of at most `rows`. The arena's slots are free afterwards.
    slots: of the instance; a batch never has more rows
    """
    chance = np.random.default_rng(_SEED)
    made = _Maker(config, chance)
    count = max(1, min(rows, config.max_batch_size, slots))
    table = _Table(engine, config, chance, slots)
    try:
        for number in range(ROUNDS):
            found = _round(table, made, count, chance, warm_runs=0 if number else WARM_RUNS)
            if found is not TrialResult.SAME:
                return found
    finally:
        table.leave(count)
    return TrialResult.SAME


def _round(table: _Table, made: _Maker, count: int, chance: np.random.Generator, *, warm_runs: int) -> TrialResult:
    tested = [made.sequence(number) for number in range(count)]
    for _ in range(warm_runs):
        table.run(tested)
    expected = table.run(tested)
    if any(isinstance(result, RowError) for result in expected):
        return TrialResult.FAILED
    table.move()
    for trial in range(TRIALS):
        numbers = chance.permutation(count)
        seated: list[_Sequence | None] = [tested[number] for number in numbers]
        for place in _given_away(trial, count, chance):
            seated[place] = made.company(trial)
        results = table.run(seated)
        for number, sequence, result in zip(numbers, seated, results, strict=True):
            if sequence is tested[number] and result != expected[number]:
                return TrialResult.DIFFERENT
    return TrialResult.SAME


def _given_away(trial: int, count: int, chance: np.random.Generator) -> Sequence[int]:
    """The places of a trial's batch that tested rows do not get: none, about half, or all but one."""
    share = (0, count // 2, count - 1)[trial % 3]
    return [int(place) for place in chance.permutation(count)[:share]]


@dataclass(frozen=True, slots=True, eq=False)
class _Sequence:
    """A made-up sequence before one of its steps. states: after the step before; not used for a first step"""

    inputs: Mapping[str, Tensor]
    states: Mapping[str, Tensor]
    starts: bool


class _Maker:
    """Makes up sequences. Integers and strings are zeros and ones, which most models accept."""

    def __init__(self, config: ModelConfig, chance: np.random.Generator) -> None:
        self._inputs = config.inputs
        self._states = config.states
        self._leading = (1,) if config.max_batch_size > 0 else ()
        self._chance = chance

    def sequence(self, number: int, *, scale: float = 1.0, poisoned: bool = False) -> _Sequence:
        """A sequence with usual values, large ones (`scale`), or NaN and infinities (`poisoned`). Every third is at its
        first step.
        """
        inputs = {
            spec.name: self._tensor(spec.name, spec.datatype, (*self._leading, *shapes.smallest(spec.dims)), scale)
            for spec in self._inputs
        }
        states = {
            state.input_name: self._tensor(state.input_name, state.datatype, shapes.smallest(state.dims), scale)
            for state in self._states
        }
        if poisoned:
            inputs, states = self._poisoned(inputs), self._poisoned(states)
        return _Sequence(inputs, states, starts=number % 3 == 2)

    def company(self, trial: int) -> _Sequence | None:
        """A sequence that is not tested; None for a null row."""
        match trial // 3 % 4:
            case 0:
                return None
            case 1:
                return self.sequence(int(self._chance.integers(3)))
            case 2:
                return self.sequence(int(self._chance.integers(3)), scale=1e3)
            case _:
                return self.sequence(int(self._chance.integers(3)), poisoned=True)

    def _tensor(self, name: str, datatype: str, shape: shapes.Shape, scale: float) -> Tensor:
        count = element_count(shape)
        if datatype == "BYTES":
            raw = pack_bytes([b"%d" % bit for bit in self._chance.integers(2, size=count)])
        elif datatype in FLOATS:
            raw = float_bytes(datatype, self._chance.standard_normal(count) * scale)
        else:
            raw = self._chance.integers(2, size=count).astype(NUMPY_TYPE[datatype]).tobytes()
        return Tensor(name, datatype, shape, raw)

    def _poisoned(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._poison(tensor) if tensor.datatype in FLOATS else tensor for name, tensor in tensors.items()}

    def _poison(self, tensor: Tensor) -> Tensor:
        values = self._chance.choice(_POISON, element_count(tensor.shape))
        return Tensor(tensor.name, tensor.datatype, tensor.shape, float_bytes(tensor.datatype, values))


class _Table:
    """Runs made-up sequences in an engine's batches: in random slots, or where slots are rows, in that of the place."""

    def __init__(self, engine: FixesShape, config: ModelConfig, chance: np.random.Generator, slots: int) -> None:
        self._engine = engine
        self._chance = chance
        self._slot_is_row = config.is_direct and not any_slot(config, slots)
        self._beside: list[bytearray] = []
        controls = ControlTensors(config)
        self._controls = {starts: controls.of_nobody(start=starts, end=False) for starts in (False, True)}

    def move(self) -> None:
        """Moves the weights, and the memory of later batches, to other addresses."""
        offset = int(self._chance.integers(ADDRESSES)) * ALIGNMENT_BYTES
        self._engine.move_weights(offset)
        self._beside = [bytearray(int(size)) for size in self._chance.integers(1, 4096, size=8)]

    def leave(self, count: int) -> None:
        """Gives the weights the same alignment on every executor, and frees the first `count` slots."""
        self._engine.move_weights(0)
        for slot in range(count):
            self._engine.drop_state(slot)

    def run(self, seated: Sequence[_Sequence | None]) -> list[RowResult | RowError | None]:
        """Runs one step of each sequence; the results by place, with states."""
        slots = range(len(seated)) if self._slot_is_row else map(int, self._chance.permutation(len(seated)))
        rows = [self._row(sequence, slot) for sequence, slot in zip(seated, slots, strict=True)]
        # Only a direct batch has null rows, and only where a slot is a row.
        given = [place for place, row in enumerate(rows) if self._slot_is_row or not row.null]
        ran = self._engine.run([rows[place] for place in given], [not rows[place].null for place in given])
        results: list[RowResult | RowError | None] = [None] * len(seated)
        for place, result in zip(given, ran.rows, strict=True):
            late = result.late if isinstance(result, RowResult) else None
            results[place] = result if late is None else late.wait()
        return results

    def _row(self, sequence: _Sequence | None, slot: int) -> Row:
        if sequence is None:
            return NULL_ROW
        if not sequence.starts and sequence.states:
            self._engine.load_states([slot], [sequence.states])
        return Row(inputs=sequence.inputs, controls=self._controls[sequence.starts], slot=slot, start=sequence.starts)
