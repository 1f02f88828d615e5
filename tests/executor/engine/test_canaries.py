"""A NaN or an infinity of one sequence never reaches another, nor padding, nor whoever has its slot next.

Two engines are played the same game, seat by seat; in one of them some sequences are poisoned, by their inputs or by
the checkpoint they come with. Whatever is not poisoned must have the same bits in both.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor.engine.base import Engine, Row, RowError, RowResult
from executor.engine.null_rows import NULL_ROW
from shared.contract.model_config import StateSpec, TensorSpec
from shared.contract.tensors import Tensor, to_numpy
from tests.executor.engine import torch_modules
from tests.executor.engine.model_workshop import Workshop, raws, results, sequence_config, wire

SLOTS = 7
TURNS = 12
HIDDEN = 21
POISON = (np.nan, np.inf, -np.inf)
INPUT, OUTPUT = TensorSpec("x", "FP32", (5,)), TensorSpec("y", "FP32", (3,))
STATES = (StateSpec("h", "h_next", "FP32", (HIDDEN,)), StateSpec("c", "c_next", "FP32", (HIDDEN,)))

IN_PLACE = """
    class TritonPythonModel:
        '''Writes its states where it found them.'''

        def execute(self, requests):
            answers = []
            for request in requests:
                x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
                h, c = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in "hc")
                with np.errstate(all="ignore"):
                    h += np.tanh(x.sum()) + 0.5 * c
                    c *= 0.5
                    c += x[:, :1]
                answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", h[:, :3] * 2)]))
            return answers
"""


class Seat(msgspec.Struct):
    """A slot's sequence. poisoned: in the first engine."""

    poisoned: bool = False
    checkpoints: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None = None


Pair = tuple[Engine, Engine, bool]


@pytest.fixture(scope="module")
def house(house: Workshop) -> Workshop:
    house.script("canary_pytorch", torch_modules.Gated())
    house.python("canary_python", IN_PLACE)
    return house


@pytest.fixture(
    scope="module",
    params=[
        (backend, fixed, direct)
        for backend in ("pytorch", "python")
        for fixed in ("false", "true")
        for direct in (False, True)
    ],
    ids=lambda it: f"{it[0]} {it[1]} {'direct' if it[2] else 'oldest'}",
)
def pair(request: pytest.FixtureRequest, house: Workshop) -> Pair:
    """The engine with poison in it, the one without, and whether the strategy is direct."""
    backend, fixed, direct = request.param
    if house.device != "cpu" and (backend, fixed) == ("pytorch", "false"):
        pytest.skip("compiled for the shapes that it has seen, which are not the same ones")
    config = sequence_config(
        f"canary_{backend}",
        backend,
        inputs=[INPUT],
        outputs=[OUTPUT],
        states=[msgspec.structs.replace(state, same_buffer=backend == "python") for state in STATES],
        direct=direct,
        max_batch_size=SLOTS,
        parameters={"fixed_shape": fixed},
    )
    return house.load(config, slots=SLOTS), house.load(config, slots=SLOTS), direct


class Game:
    """One game on both engines."""

    def __init__(self, pair: Pair, chance: random.Random) -> None:
        self._poisoned, self._clean, self._direct = pair
        self._chance = chance
        self._seats: list[Seat | None] = [None] * SLOTS

    def turn(self) -> None:
        """Sequences come, move and go; then some of them make a step together."""
        for slot in range(SLOTS):
            self._leave_or_come(slot)
        poisoned: list[Row] = []
        clean: list[Row] = []
        for slot in self._chance.sample(range(SLOTS), self._chance.randint(1, SLOTS)):
            for rows, row in zip((poisoned, clean), self._step(slot), strict=True):
                rows.append(row)
        self._compare(self._run(self._poisoned, poisoned), self._run(self._clean, clean))

    def _leave_or_come(self, slot: int) -> None:
        """END or expiry; a move within the executor, as at a takeover; a checkpoint that is poisoned itself."""
        seat = self._seats[slot]
        what = self._chance.random()
        if seat is not None and what < 0.2:
            self._forget(slot)
        elif seat is not None and seat.checkpoints is not None and what < 0.4:
            free = [other for other in range(SLOTS) if self._seats[other] is None]
            if free:
                self._load(self._chance.choice(free), seat.checkpoints, poisoned=seat.poisoned)
                self._forget(slot)
        elif seat is None and what < 0.2:
            self._load(slot, (self._checkpoint(poisoned=True), self._checkpoint(poisoned=False)), poisoned=True)

    def _forget(self, slot: int) -> None:
        self._seats[slot] = None
        # An executor tells its engine of some sequences that end, and of others not: START comes over them anyway.
        if self._chance.random() < 0.5:
            self._poisoned.drop_state(slot)
            self._clean.drop_state(slot)

    def _load(
        self, slot: int, checkpoints: tuple[Mapping[str, Tensor], Mapping[str, Tensor]], *, poisoned: bool
    ) -> None:
        self._poisoned.load_states([slot], [checkpoints[0]])
        self._clean.load_states([slot], [checkpoints[1]])
        self._seats[slot] = Seat(poisoned, checkpoints)

    def _checkpoint(self, *, poisoned: bool) -> Mapping[str, Tensor]:
        value = self._chance.choice(POISON) if poisoned else 0.25
        return {state.input_name: wire(state.input_name, [value] * HIDDEN) for state in STATES}

    def _step(self, slot: int) -> tuple[Row, Row]:
        """Its row in both engines."""
        starts = self._seats[slot] is None or self._chance.random() < 0.2
        if self._seats[slot] is not None and self._chance.random() < 0.1:
            # A step that fails changes nothing, whatever it brought.
            wrong = Row({"x": wire("x", [[self._chance.choice(POISON)] * 2])}, slot=slot, start=starts)
            return wrong, wrong
        values = [self._chance.uniform(-1, 1) for _ in range(5)]
        clean = Row({"x": wire("x", [values])}, slot=slot, start=starts)
        poisons = self._chance.random() < 0.25
        before = self._seats[slot]
        self._seats[slot] = Seat(
            poisoned=poisons or (not starts and before is not None and before.poisoned),
            checkpoints=None,
        )
        if not poisons:
            return clean, clean
        values[self._chance.randrange(5)] = self._chance.choice(POISON)
        return Row({"x": wire("x", [values])}, slot=slot, start=starts), clean

    def _run(self, engine: Engine, rows: Sequence[Row]) -> dict[int, RowResult | RowError]:
        given = list(rows)
        if self._direct:
            given = [NULL_ROW] * SLOTS
            for row in rows:
                assert row.slot is not None
                given[row.slot] = row
        ran = engine.run(given, [not row.null for row in given]).rows
        by_slot: dict[int, RowResult | RowError] = {}
        for row, result in zip(given, ran, strict=True):
            if row.slot is not None:
                assert result is not None
                by_slot[row.slot] = result
        return by_slot

    def _compare(self, poisoned: Mapping[int, RowResult | RowError], clean: Mapping[int, RowResult | RowError]) -> None:
        for slot, result in clean.items():
            other, seat = poisoned[slot], self._seats[slot]
            assert seat is not None
            if isinstance(result, RowError) or isinstance(other, RowError):
                assert result == other
                continue
            seat.checkpoints = (other.states, result.states)
            assert all(np.isfinite(to_numpy(tensor)).all() for tensor in (*result.outputs, *result.states.values()))
            if not seat.poisoned:
                assert raws(result) == raws(other)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_what_is_not_poisoned_has_the_same_bits_as_without_poison(pair: Pair, seed: int) -> None:
    """Neighbours, padding, the slot's next sequence, and the poisoned sequence itself from its next START on."""
    game = Game(pair, random.Random(seed))
    for _ in range(TURNS):
        game.turn()


def test_the_poison_is_there(pair: Pair) -> None:
    """Its own sequence keeps it until START: a canary that cannot die proves nothing."""
    engine, *_ = pair
    poisoned = Row({"x": wire("x", [[np.nan] * 5])}, slot=0, start=True)
    further = Row({"x": wire("x", [[0.5] * 5])}, slot=0)
    anew = Row(further.inputs, slot=0, start=True)

    for row, finite in ((poisoned, False), (further, False), (anew, True), (further, True)):
        (result,) = results(engine, [row])
        assert finite is bool(all(np.isfinite(to_numpy(tensor)).all() for tensor in result.states.values()))


@pytest.mark.parametrize("fixed", ["false", "true"])
@pytest.mark.parametrize("direct", [False, True])
def test_padding_that_becomes_nan_reaches_nobody(house: Workshop, fixed: str, *, direct: bool) -> None:
    """A model may divide by what a null row brings: zeros."""
    house.script("normalised", torch_modules.Normalised())
    config = sequence_config(
        "normalised",
        "pytorch",
        inputs=[TensorSpec("x", "FP32", (2,))],
        outputs=[TensorSpec("y", "FP32", (2,))],
        states=[StateSpec("total", "total_next", "FP32", (2,))],
        direct=direct,
        max_batch_size=4,
        parameters={"fixed_shape": fixed},
    )
    engine = house.load(config, slots=4)
    x = {"x": wire("x", [[1, -3]])}

    for step in range(3):
        # The second place's sequence begins anew each time; the rest of the batch is empty where it may be.
        rows = [NULL_ROW, Row(x, slot=1, start=True), NULL_ROW, Row(x, slot=3, start=step == 0)]
        begun, going = results(engine, rows if direct else [rows[1], rows[3]])

        assert [0.25, -0.75] == to_numpy(begun.outputs[0])[0].tolist()
        assert [0.25 * (step + 1), -0.75 * (step + 1)] == to_numpy(going.outputs[0])[0].tolist()
    # A warm-up row has no slot, and may be poisoned too.
    results(engine, [Row({"x": wire("x", [[np.nan, 0]])}, start=True)])
    assert [0.25, -0.75] == to_numpy(results(engine, [Row(x, slot=0, start=True)])[0].outputs[0])[0].tolist()
