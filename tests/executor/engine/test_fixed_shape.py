"""`fixed_shape`: a sequence's outputs and states are the same, bit by bit, whatever shares its batches."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor.engine.base import Engine, FixesShape, Row, RowError, RowResult
from executor.engine.fixed_shape import ROWS_MULTIPLE, padded_rows
from executor.engine.null_rows import NULL_ROW
from executor.engine.pytorch.threads import use_threads
from executor.models.fixed_shape import TrialResult, trials
from shared.contract.model_config import ModelConfig, TensorSpec
from shared.contract.tensors import Tensor
from tests.executor.engine import torch_modules
from tests.executor.engine.model_workshop import (
    CONTROLS,
    Workshop,
    fp32,
    fp32_state,
    raws,
    results,
    sequence_config,
    wire,
)

READY = CONTROLS[2:3]
SLOTS = 13
STEPS = 5
STATES = (fp32_state("h", 21), fp32_state("c", 21))

GATED_PYTHON = """
    WEIGHTS = np.random.default_rng(1).standard_normal((26, 84)).astype(np.float32)

    class TritonPythonModel:
        def execute(self, requests):
            def column(name):
                return np.concatenate([pb_utils.get_input_tensor_by_name(one, name).as_numpy() for one in requests])

            i, f, g, o = np.split(np.concatenate([column("x"), column("h")], 1) @ WEIGHTS, 4, 1)
            sigmoid = lambda x: 0.5 + 0.5 * np.tanh(x / 2)
            c = sigmoid(f) * column("c") + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            return [
                pb_utils.InferenceResponse([
                    pb_utils.Tensor("y", h[row : row + 1, :3]),
                    pb_utils.Tensor("h_next", h[row : row + 1]),
                    pb_utils.Tensor("c_next", c[row : row + 1]),
                ])
                for row in range(len(requests))
            ]
"""


def gated_config(backend: str, fixed: str, *, direct: bool, **more: str) -> ModelConfig:
    return sequence_config(
        f"gated_{backend}",
        backend,
        inputs=[fp32("x", 5)],
        outputs=[fp32("y", 3)],
        states=STATES,
        direct=direct,
        max_batch_size=SLOTS,
        parameters={"fixed_shape": fixed, **more},
    )


@pytest.fixture(scope="module")
def house(house: Workshop) -> Workshop:
    """Each test's sequences begin with START."""
    house.script("gated_pytorch", torch_modules.Gated())
    house.python("gated_python", GATED_PYTHON)
    return house


Pair = tuple[Engine, Engine, bool]


@pytest.fixture(
    scope="module",
    params=[
        (backend, fixed, direct)
        for backend, fixed in (("pytorch", "true"), ("pytorch", "rows"), ("python", "true"))
        for direct in (False, True)
    ],
    ids=lambda it: f"{it[0]} {it[1]} {'direct' if it[2] else 'oldest'}",
)
def pair(request: pytest.FixtureRequest, house: Workshop) -> Pair:
    """Two executors' engines of one model, and whether its strategy is direct."""
    backend, fixed, direct = request.param
    config = gated_config(backend, fixed, direct=direct)
    return house.load(config, slots=SLOTS), house.load(config, slots=SLOTS), direct


def steps_of(seed: int) -> list[Tensor]:
    """A sequence's inputs."""
    chance = np.random.default_rng(seed)
    return [wire("x", chance.standard_normal((1, 5)) * 10.0 ** (seed % 3 - 1)) for _ in range(STEPS)]


def alone(engine: Engine, seed: int) -> list[object]:
    """What a sequence gets in slot 0 of an executor where nobody else is."""
    return [raws(results(engine, [Row({"x": x}, slot=0, start=step == 0)])[0]) for step, x in enumerate(steps_of(seed))]


class Mesh:
    """Two executors' engines, and sequences that move between them."""

    def __init__(self, pair: Pair) -> None:
        *self.engines, self.direct = pair
        self.got: dict[int, list[object]] = {}
        self._states: dict[int, Mapping[str, Tensor]] = {}
        self._home: dict[int, tuple[int, int]] = {}
        self._tenant: dict[tuple[int, int], int] = {}

    def move(self, seed: int, engine: int, slot: int) -> None:
        """By its checkpoint, unless it was there last; at its first step it simply begins there."""
        place = (engine, slot)
        stays = self._home.get(seed) == place and self._tenant.get(place) == seed
        if seed in self._states and not stays:
            self.engines[engine].load_states([slot], [self._states[seed]])
        self._home[seed] = place
        self._tenant[place] = seed

    def run(self, engine: int, seated: Sequence[tuple[int, int]]) -> None:
        """A batch of the sequences' next steps. seated: slot and sequence."""
        rows: list[Row] = []
        for slot, seed in seated:
            step = len(self.got.setdefault(seed, []))
            rows.append(Row({"x": steps_of(seed)[step]}, slot=slot, start=step == 0))
        given = rows
        if self.direct:
            given = [NULL_ROW] * (max(slot for slot, _ in seated) + 1)
            for row in rows:
                assert row.slot is not None
                given[row.slot] = row
        ran = self.engines[engine].run(given, [not row.null for row in given]).rows
        by_slot = {row.slot: result for row, result in zip(given, ran, strict=True)}
        for slot, seed in seated:
            result = by_slot[slot]
            assert isinstance(result, RowResult), result
            self.got[seed].append(raws(result))
            self._states[seed] = result.states


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_every_sequence_gets_what_it_gets_alone_whatever_its_company_slot_and_moves(pair: Pair, seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(1, SLOTS + 3)
    mesh = Mesh(pair)
    waiting = dict.fromkeys(range(count), 0)
    while waiting:
        size = chance.randint(1, min(len(waiting), SLOTS))
        seated = list(zip(chance.sample(range(SLOTS), size), chance.sample(sorted(waiting), size), strict=True))
        engine = chance.randrange(2)
        for slot, sequence in seated:
            mesh.move(sequence, engine, slot)
        mesh.run(engine, seated)
        for _, sequence in seated:
            waiting[sequence] += 1
            if waiting[sequence] == STEPS:
                del waiting[sequence]

    for sequence in range(count):
        assert alone(pair[0], sequence) == mesh.got[sequence]


def test_the_trials_find_the_dependence_where_the_mode_is_off(house: Workshop) -> None:
    """They are able to: the same model without the mode is told to differ."""
    off, on = (house.load(gated_config("pytorch", fixed, direct=False), slots=SLOTS) for fixed in ("false", "true"))

    assert isinstance(off, FixesShape)
    assert isinstance(on, FixesShape)
    assert TrialResult.DIFFERENT is trials(off, gated_config("pytorch", "false", direct=False), SLOTS, SLOTS)
    assert TrialResult.SAME is trials(on, gated_config("pytorch", "true", direct=False), SLOTS, SLOTS)


def shape_of(house: Workshop, config: ModelConfig) -> tuple[int, str]:
    engine = house.load(config, slots=SLOTS)
    assert isinstance(engine, FixesShape)
    return engine.batch_rows, engine.alone_because


def test_batches_are_padded_only_where_every_shape_is_fixed_and_no_tensor_is_cut(house: Workshop) -> None:
    gated = gated_config("pytorch", "true", direct=False)

    assert (ROWS_MULTIPLE, "") == shape_of(house, gated)
    assert (0, "") == shape_of(house, gated_config("pytorch", "false", direct=False))
    threaded = shape_of(house, gated_config("pytorch", "true", direct=False, torch_threads="2"))
    assert threaded == ((1, "torch_threads is 2") if house.device == "cpu" else (ROWS_MULTIPLE, ""))
    assert (1, "so the parameter fixed_shape says") == shape_of(house, gated_config("pytorch", "rows", direct=False))
    torch_loose = sequence_config(
        "loose",
        "pytorch",
        inputs=[fp32("x", -1)],
        outputs=[fp32("y", 1)],
        states=[fp32_state("total", 1)],
        parameters={"fixed_shape": "true"},
    )
    house.script("loose", torch_modules.Folding())
    assert (1, "the shape of 'x' varies") == shape_of(house, torch_loose)
    assert (1, "a python model is given one request at a time") == shape_of(
        house, gated_config("python", "true", direct=False)
    )


def test_a_state_that_grows_has_the_same_bits_in_any_company(house: Workshop) -> None:
    """Its rows run alone, though their shapes are equal here."""
    house.script("growing", torch_modules.Growing())
    config = sequence_config(
        "growing",
        "pytorch",
        inputs=[fp32("x", 1)],
        outputs=[fp32("y", 1)],
        states=[fp32_state("seen", -1)],
        parameters={"fixed_shape": "true"},
    )
    together, apart = house.load(config), house.load(config)
    assert (1, "the shape of 'seen' varies") == (together.batch_rows, together.alone_because)  # type: ignore[attr-defined]
    for step in range(30):
        rows = [Row({"x": wire("x", [[0.1 * slot + step / 3]])}, slot=slot, start=step == 0) for slot in range(5)]

        expected = [raws(results(apart, [row])[0]) for row in rows]

        assert expected == [raws(result) for result in results(together, rows)]


def test_a_row_that_fails_does_not_change_its_neighbours_by_a_bit(house: Workshop) -> None:
    """They run again, one by one, in batches of the same shape."""
    house.script("picky", torch_modules.Picky())
    config = sequence_config(
        "picky",
        "pytorch",
        inputs=[fp32("x", 1)],
        outputs=[fp32("y", 1)],
        states=[fp32_state("total", 1)],
        parameters={"fixed_shape": "true"},
    )
    engine, apart = house.load(config), house.load(config)
    rows = [Row({"x": wire("x", [[value]])}, slot=slot, start=True) for slot, value in enumerate((0.1, -1, 0.3))]

    ran = engine.run(rows, [True] * 3).rows

    assert isinstance(ran[1], RowError)
    for place in (0, 2):
        expected, result = results(apart, [rows[place]])[0], ran[place]
        assert isinstance(result, RowResult)
        assert raws(expected) == raws(result)


def test_a_python_model_that_knows_rows_by_place_keeps_its_place_in_calls_of_one_length(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path)
    workshop.python(
        "placed",
        """
        class TritonPythonModel:
            def execute(self, requests):
                ready = [pb_utils.get_input_tensor_by_name(one, "READY").as_numpy().item() for one in requests]
                says = np.array([[len(requests), ready.index(1), sum(ready)]], np.int32)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("y", says)]) for _ in requests]
        """,
    )
    config = sequence_config(
        "placed",
        "python",
        inputs=[fp32("x", 1)],
        outputs=[TensorSpec("y", "INT32", (3,))],
        controls=READY,
        direct=True,
        parameters={"fixed_shape": "true"},
    )
    engine = workshop.load(config)
    rows = [Row({"x": wire("x", [[0]])}, {"READY": wire("READY", [[1]], "<i4")}, slot) for slot in range(3)]
    rows[1] = NULL_ROW

    ran = engine.run(rows, [False] * 3).rows
    workshop.close()

    assert ran[1] is None
    for place in (0, 2):
        result = ran[place]
        assert isinstance(result, RowResult)
        assert [8, place, 1] == np.frombuffer(result.outputs[0].raw, "<i4").tolist()


@pytest.mark.parametrize(("given", "expected"), [(1, 64), (64, 64), (65, 128), (256, 256)])
def test_a_padded_batch_has_a_multiple_of_rows(given: int, expected: int) -> None:
    assert expected == padded_rows(given)


def test_an_engine_s_threads_are_its_own() -> None:
    """Other threads compute with what they had, and new ones with what they would have had."""
    usual = torch.get_num_threads()
    with ThreadPoolExecutor(1) as engine, ThreadPoolExecutor(1) as other, ThreadPoolExecutor(1) as new:
        before = other.submit(torch.get_num_threads).result()
        engine.submit(use_threads, 3).result()

        assert 3 == engine.submit(torch.get_num_threads).result()
        assert before == other.submit(torch.get_num_threads).result()
        assert before == new.submit(torch.get_num_threads).result()
    assert usual == torch.get_num_threads()
