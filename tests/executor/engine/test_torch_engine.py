"""The torch engine: batches equal single rows, state belongs to its sequence, a bad row is alone with its error."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch

from executor.engine.base import Engine, FixesShape, LoadRequest, MeasuresMemory, Row, RowError, RowResult
from executor.engine.pytorch import arena
from executor.engine.pytorch.arena import FixedState, StateArena
from executor.engine.pytorch.call import Layout
from executor.engine.pytorch.outputs import Outputs
from executor.engine.pytorch.running_batch import Pieces
from shared.contract.errors import LoadError, ModelError
from shared.contract.model_config import (
    ControlKind,
    ControlSpec,
    ModelConfig,
    Oldest,
    SequenceBatching,
    StateSpec,
    TensorSpec,
)
from shared.contract.tensors import ELEMENT_BYTES, Tensor, pack_bytes, to_numpy
from tests.executor.engine import torch_modules
from tests.executor.engine.model_workshop import (
    Workshop,
    array,
    error,
    find_backend,
    fp32,
    fp32_state,
    plain_config,
    raws,
    results,
    sequence_config,
    wire,
)

CELL_STATES = (fp32_state("h", 3), fp32_state("c", 3))


def cell_config(*, direct: bool = False) -> ModelConfig:
    return sequence_config(
        "cell", "pytorch", inputs=[fp32("x", 3)], outputs=[fp32("y", 3)], states=CELL_STATES, direct=direct
    )


def cell_row(slot: int, step: int) -> Row:
    return Row({"x": wire("x", [[slot + step / 8, -slot, step]])}, slot=slot, start=step == 0)


def total_config(name: str, dims: tuple[int, ...] = (1,), **state: Any) -> ModelConfig:
    states = [fp32_state("total", 1, **state)]
    return sequence_config(name, "pytorch", inputs=[fp32("x", *dims)], outputs=[fp32("y", 1)], states=states)


def test_a_batch_gives_every_row_what_it_gets_alone(workshop: Workshop) -> None:
    workshop.script("cell", torch_modules.Cell())
    together, alone = workshop.load(cell_config()), workshop.load(cell_config())

    for step in range(4):
        rows = [cell_row(slot, step) for slot in (5, 0, 3, 1)]
        expected = [results(alone, [row])[0] for row in rows]

        assert list(map(raws, expected)) == list(map(raws, results(together, rows)))


MIXING = [
    (torch_modules.Coupled, "rows that share a call change each other's results"),
    (torch_modules.Limited, "rows that share a call change each other's results"),
    (torch_modules.Touched, "rows that share a call change each other's results"),
    (torch_modules.Numbered, "the results of a row depend on its place in a call, or on the number of rows"),
    (torch_modules.Shared, "the results of a row depend on its place in a call, or on the number of rows"),
    (torch_modules.Choosing, "the module chooses what to compute by a number of a tensor, one for all rows of a call"),
]


@pytest.mark.parametrize(("module", "reason"), MIXING, ids=lambda value: getattr(value, "__name__", ""))
def test_a_model_whose_rows_mix_runs_each_alone_unless_it_is_told_otherwise(
    workshop: Workshop, caplog: pytest.LogCaptureFixture, module: Callable[[], torch.nn.Module], reason: str
) -> None:
    workshop.script("mixing", module())
    config = total_config("mixing")
    rows = [Row({"x": wire("x", [[number]])}, slot=slot, start=True) for slot, number in enumerate((1, 2000, np.nan))]

    found = results(workshop.load(config), rows)

    assert f"model 'mixing': each row is a call of its own, because {reason}." in caplog.text
    assert 1 == array(found[0], "y").item()
    told = msgspec.structs.replace(config, parameters={"fixed_shape": "false"})
    assert list(map(raws, found)) != list(map(raws, results(workshop.load(told), rows)))


def test_a_random_model_is_believed_to_have_batches(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    workshop.script("random", torch_modules.Random())

    engine = workshop.load(total_config("random"))

    assert isinstance(engine, FixesShape)
    assert "" == engine.alone_because
    assert "a call of its own" not in caplog.text


def test_a_sequence_resumed_from_a_checkpoint_goes_on_as_if_never_stopped(workshop: Workshop) -> None:
    workshop.script("cell", torch_modules.Cell())
    first, second = workshop.load(cell_config()), workshop.load(cell_config())
    before = [results(first, [cell_row(2, step)])[0] for step in range(3)]
    second.load_states([6], [before[-1].states])
    moved = Row(cell_row(2, 3).inputs, slot=6)

    assert raws(results(first, [cell_row(2, 3)])[0]) == raws(results(second, [moved])[0])


@pytest.mark.parametrize("bytes_max", [1, 1 << 20])
def test_many_sequences_are_resumed_in_one_call(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, bytes_max: int
) -> None:
    monkeypatch.setattr(arena, "PUT_BYTES_MAX", bytes_max)
    workshop.script("cell", torch_modules.Cell())
    first, second = workshop.load(cell_config()), workshop.load(cell_config(), slots=1000)
    before = results(first, [cell_row(slot, 0) for slot in range(4)])
    moved = [40, 500, 7, 999]

    second.load_states(moved, [result.states for result in before])

    went_on = results(first, [cell_row(slot, 1) for slot in range(4)])
    rows = [Row(cell_row(slot, 1).inputs, slot=place) for slot, place in enumerate(moved)]
    assert list(map(raws, went_on)) == list(map(raws, results(second, rows)))


def test_a_checkpoint_is_taken_by_an_arena_that_has_grown(workshop: Workshop) -> None:
    workshop.script("cell", torch_modules.Cell())
    first, second = workshop.load(cell_config(), slots=1000), workshop.load(cell_config(), slots=1000)
    before = results(first, [cell_row(2, 0)])[0]
    results(second, [cell_row(500, 0)])

    second.load_states([6], [before.states])

    moved = Row(cell_row(2, 1).inputs, slot=6)
    assert raws(results(first, [cell_row(2, 1)])[0]) == raws(results(second, [moved])[0])


def test_the_arena_grows_with_the_slots_that_are_used(workshop: Workshop) -> None:
    """And what it holds stays what it was, the initial state too."""
    workshop.script("cell", torch_modules.Cell())
    small, large = workshop.load(cell_config()), workshop.load(cell_config(), slots=1000)
    assert isinstance(large, MeasuresMemory)
    before = large.memory_usage()
    for step in range(3):
        for slot, far in ((0, 0), (1, 999), (2, 300)):
            moved = Row(cell_row(slot, step).inputs, slot=far, start=step == 0)
            assert raws(results(small, [cell_row(slot, step)])[0]) == raws(results(large, [moved])[0])

    assert before[0].byte_size < large.memory_usage()[0].byte_size


def test_how_much_memory_a_module_holds_is_not_read_from_it_while_it_may_run(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchScript sets attributes without Python's lock: the executor's report has ended its process by reading one."""
    workshop.script("weighted", torch_modules.Weighted())
    x, total, y = (TensorSpec(name, "FP32", (1,)) for name in ("x", "total", "y"))
    engine = workshop.load(plain_config("weighted", "pytorch", inputs=[x, total], outputs=[y]))
    assert isinstance(engine, MeasuresMemory)
    reads = Mock()
    monkeypatch.setattr(torch.nn.Module, "named_parameters", reads)
    monkeypatch.setattr(torch.nn.Module, "named_buffers", reads)

    (use,) = engine.memory_usage()

    assert 4 == use.byte_size
    assert not reads.called


def test_null_rows_change_no_result_and_no_state(workshop: Workshop) -> None:
    workshop.script("cell", torch_modules.Cell())
    padded, plain = workshop.load(cell_config(direct=True)), workshop.load(cell_config(direct=True))
    for engine in (padded, plain):
        results(engine, [cell_row(0, 0), cell_row(1, 0), cell_row(2, 0)])
    null = Row({}, null=True)

    ran = padded.run([null, cell_row(1, 1), null], [True] * 3).rows

    assert ran[0] is None
    assert ran[2] is None
    assert isinstance(ran[1], RowResult)
    assert raws(results(plain, [cell_row(1, 1)])[0]) == raws(ran[1])
    assert plain.describe_state(0) == padded.describe_state(0)
    assert plain.describe_state(2) == padded.describe_state(2)


def test_a_batch_of_null_rows_alone_runs_nothing(workshop: Workshop) -> None:
    workshop.script("cell", torch_modules.Cell())
    engine = workshop.load(cell_config(direct=True))

    assert [None, None] == list(engine.run([Row({}, null=True)] * 2, [False] * 2).rows)


def test_with_the_direct_strategy_a_row_s_position_is_its_slot(workshop: Workshop) -> None:
    """Even where rows run apart because their shapes differ."""
    workshop.script("placed", torch_modules.Placed())
    config = sequence_config(
        "placed", "pytorch", inputs=[fp32("x", -1)], outputs=[fp32("y", -1)], states=[fp32_state("s", 1)], direct=True
    )
    engine = workshop.load(config)
    rows = [Row({"x": wire("x", [[0.0] * (1 + slot % 2)])}, slot=slot, start=True) for slot in range(4)]

    assert [0, 1, 2, 3] == [array(result, "y").flat[0] for result in results(engine, rows)]


def test_start_begins_from_zeros_whatever_the_slot_held(workshop: Workshop) -> None:
    workshop.script("cell", torch_modules.Cell())
    engine = workshop.load(cell_config())
    first = results(engine, [cell_row(4, 0)])[0]
    results(engine, [cell_row(4, 1)])

    assert raws(first) == raws(results(engine, [cell_row(4, 0)])[0])


def test_the_initial_state_comes_from_its_file_and_a_longer_file_is_cut(workshop: Workshop) -> None:
    workshop.script("folding", torch_modules.Folding())
    directory = workshop.directory / "folding" / "initial_state"
    directory.mkdir()
    (directory / "seven").write_bytes(np.array([7, 99], "<f4").tobytes())
    config = total_config("folding", (-1,), initial_file="seven")

    (result,) = results(workshop.load(config), [Row({"x": wire("x", [[1, 2]])}, slot=0, start=True)])

    assert 10 == array(result, "y").item()


def test_a_short_file_of_initial_state_is_refused_at_load_in_triton_s_words(workshop: Workshop) -> None:
    workshop.script("folding", torch_modules.Folding())
    directory = workshop.directory / "folding" / "initial_state"
    directory.mkdir()
    (directory / "short").write_bytes(b"abc")
    config = total_config("folding", (-1,), initial_file="short")

    with pytest.raises(LoadError, match="expects 4 bytes, but the data provided from shortonly has 3 bytes"):
        workshop.load(config)


@pytest.mark.parametrize("module", [torch_modules.CrossedStates, torch_modules.CrossedTuple])
def test_states_are_paired_by_declared_names_never_by_sorted_order(
    workshop: Workshop, module: type[torch.nn.Module]
) -> None:
    workshop.script("crossed", module())
    config = sequence_config(
        "crossed",
        "pytorch",
        inputs=[fp32("x", 1)],
        outputs=[fp32("y", 1)],
        states=[StateSpec("alpha", "zz_alpha", "FP32", (1,)), StateSpec("beta", "aa_beta", "FP32", (1,))],
    )
    engine = workshop.load(config)

    for step, expected in enumerate([0, 110, 220]):
        (result,) = results(engine, [Row({"x": wire("x", [[1]])}, slot=0, start=step == 0)])

        assert expected == array(result, "y").item()
        assert {"alpha": step + 1, "beta": 10 * (step + 1)} == {
            name: to_numpy(state).item() for name, state in result.states.items()
        }


def test_a_failing_row_fails_alone_and_no_neighbour_notices(workshop: Workshop) -> None:
    workshop.script("picky", torch_modules.Picky())
    engine = workshop.load(total_config("picky"))
    rows = [Row({"x": wire("x", [[value]])}, slot=value, start=True) for value in (1, 2, 3)]
    results(engine, rows)
    bad = Row({"x": wire("x", [[-5]])}, slot=2)

    ran = engine.run([Row(rows[0].inputs, slot=1), bad, Row(rows[2].inputs, slot=3)], [True] * 3).rows

    assert isinstance(ran[1], RowError)
    assert "INTERNAL" == ran[1].code
    assert "PyTorch execute failure: " in ran[1].message
    assert "negative number" in ran[1].message
    assert [2, 6] == [array(row, "y").item() for row in (ran[0], ran[2]) if isinstance(row, RowResult)]
    assert 4 == array(results(engine, [Row(rows[1].inputs, slot=2)])[0], "y").item()


def test_a_failing_start_leaves_the_slot_s_state_as_it_was(workshop: Workshop) -> None:
    workshop.script("picky", torch_modules.Picky())
    engine = workshop.load(total_config("picky"))
    results(engine, [Row({"x": wire("x", [[5]])}, slot=0, start=True)])

    error(engine, Row({"x": wire("x", [[-1]])}, slot=0, start=True))

    assert 6 == array(results(engine, [Row({"x": wire("x", [[1]])}, slot=0)])[0], "y").item()


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (Tensor("x", "FP32", (1, 1), b"\0\0\0"), "has 3 bytes of data, but its shape asks for 4"),
        (Tensor("x", "FP32", (1, 2), bytes(8)), r"unexpected shape for input 'x' for model 'picky'"),
        (Tensor("x", "INT32", (1, 1), bytes(4)), "data-type is 'INT32', but model 'picky' expects 'FP32'"),
        (Tensor("other", "FP32", (1, 1), bytes(4)), "input 'x' of model 'picky' is missing"),
    ],
)
def test_a_wrong_input_is_its_own_row_s_error(workshop: Workshop, tensor: Tensor, text: str) -> None:
    workshop.script("picky", torch_modules.Picky())
    engine = workshop.load(total_config("picky"))
    good = Row({"x": wire("x", [[1]])}, slot=0, start=True)

    bad, fine = engine.run([Row({tensor.name: tensor}, slot=1, start=True), good], [True] * 2).rows

    assert isinstance(bad, RowError)
    assert "INVALID_ARG" == bad.code
    assert text in bad.message
    assert isinstance(fine, RowResult)


def test_rows_of_different_lengths_run_in_groups_and_keep_their_order(workshop: Workshop) -> None:
    workshop.script("folding", torch_modules.Folding())
    engine = workshop.load(total_config("folding", (-1,)))
    rows = [Row({"x": wire("x", [[1] * n])}, slot=slot, start=True) for slot, n in enumerate([3, 5, 3, 1])]

    assert [3, 5, 3, 1] == [array(result, "y").item() for result in results(engine, rows)]


def growing_config() -> ModelConfig:
    return sequence_config(
        "growing", "pytorch", inputs=[fp32("x", -1)], outputs=[fp32("y", 1)], states=[fp32_state("seen", -1)]
    )


def test_a_state_of_variable_shape_grows_per_slot_and_resumes(workshop: Workshop) -> None:
    workshop.script("growing", torch_modules.Growing())
    engine, other = workshop.load(growing_config()), workshop.load(growing_config())
    rows = [Row({"x": wire("x", [[slot + 1] * (slot + 1)])}, slot=slot, start=True) for slot in range(3)]

    first = results(engine, rows)
    second = results(engine, [Row(row.inputs, slot=row.slot) for row in rows])

    assert [1, 4, 9] == [array(result, "y").item() for result in first]
    assert [(3,), (5,), (7,)] == [result.states["seen"].shape for result in second]
    other.load_states([7], [first[2].states])
    assert raws(second[2]) == raws(results(other, [Row(rows[2].inputs, slot=7)])[0])
    engine.drop_state(1)
    assert 4 == array(results(engine, [Row(rows[1].inputs, slot=1)])[0], "y").item()


def texts_config(**state: Any) -> ModelConfig:
    return sequence_config(
        "texts",
        "pytorch",
        inputs=[TensorSpec("text", "BYTES", (1,))],
        outputs=[TensorSpec("joined", "BYTES", (1,))],
        states=[StateSpec("last", "last_next", "BYTES", (1,), **state)],
    )


def test_bytes_inputs_outputs_and_states_are_lists_of_strings(workshop: Workshop) -> None:
    workshop.script("texts", torch_modules.Texts())
    config = texts_config()
    engine = workshop.load(config)

    def rows(texts: list[str], *, start: bool) -> list[Row]:
        return [
            Row({"text": Tensor("text", "BYTES", (1, 1), pack_bytes([text]))}, slot=slot, start=start)
            for slot, text in enumerate(texts)
        ]

    results(engine, rows(["a", "äß"], start=True))
    second = results(engine, rows(["b", ""], start=False))

    assert [b"ab", "äß".encode()] == [array(result, "joined").item() for result in second]
    assert [pack_bytes(["b"]), pack_bytes([""])] == [result.states["last"].raw for result in second]

    bad = Row({"text": Tensor("text", "BYTES", (1, 1), pack_bytes([b"\xff"]))}, slot=0)
    fine, failed = engine.run([rows(["x", "c"], start=False)[1], bad], [False] * 2).rows
    assert isinstance(failed, RowError)
    assert "UTF-8" in failed.message
    assert isinstance(fine, RowResult)
    assert b"c" == array(fine, "joined").item()


def test_strings_of_an_initial_state_must_be_utf_8(workshop: Workshop) -> None:
    folder = workshop.script("texts", torch_modules.Texts()).parents[1] / "initial_state"
    folder.mkdir()
    (folder / "first").write_bytes(pack_bytes([b"\xff"]))
    config = texts_config(initial_dims=(1,), initial_file="first")

    bad_load(workshop, config, "the initial state of 'last' must be UTF-8")


@pytest.mark.parametrize("datatype", ELEMENT_BYTES)
def test_every_datatype_passes_through_input_state_and_output_bit_by_bit(workshop: Workshop, datatype: str) -> None:
    workshop.script("identity", torch_modules.Identity())
    config = sequence_config(
        "identity",
        "pytorch",
        inputs=[TensorSpec("x", datatype, (2, 2))],
        outputs=[TensorSpec("y", datatype, (2, 2))],
        states=[StateSpec("s", "s_next", datatype, (2, 2))],
    )
    engine, other = workshop.load(config), workshop.load(config)
    size = 4 * ELEMENT_BYTES[datatype]
    contents = [bytes([1, 0] * size)[:size] if datatype == "BOOL" else bytes(range(k, k + size)) for k in (1, 40)]
    rows = [
        Row({"x": Tensor("x", datatype, (1, 2, 2), raw)}, slot=slot, start=True) for slot, raw in enumerate(contents)
    ]

    ran = results(engine, rows)

    assert contents == [result.outputs[0].raw for result in ran]
    assert [datatype] * 2 == [result.outputs[0].datatype for result in ran]
    assert [Tensor("s", datatype, (2, 2), raw) for raw in contents] == [result.states["s"] for result in ran]
    other.load_states([1], [ran[0].states])
    assert engine.describe_state(0) == other.describe_state(1)


def test_bf16_is_computed_with_as_such(workshop: Workshop) -> None:
    workshop.script("doubled", torch_modules.Doubled())
    config = plain_config(
        "doubled", "pytorch", inputs=[TensorSpec("x", "BF16", (2,))], outputs=[TensorSpec("y", "BF16", (2,))]
    )
    values, doubled = (np.array([numbers], dtype=ml_dtypes.bfloat16) for numbers in ([1.5, -3.25], [3.0, -6.5]))

    (result,) = results(workshop.load(config), [Row({"x": Tensor("x", "BF16", (1, 2), values.tobytes())})])

    assert doubled.tobytes() == result.outputs[0].raw


def test_arguments_and_results_are_found_by_name_and_by_index_together(workshop: Workshop) -> None:
    workshop.script("indexed", torch_modules.Indexed())
    config = sequence_config(
        "indexed",
        "pytorch",
        inputs=[fp32("second", 1), fp32("first", 1)],
        outputs=[fp32("OUT__0", 1)],
        states=[StateSpec("STATE__2", "NEXT__1", "FP32", (1,))],
    )
    inputs = {"second": wire("second", [[2]]), "first": wire("first", [[10]])}

    (result,) = results(workshop.load(config), [Row(inputs, slot=0, start=True)])

    assert 8 == array(result, "OUT__0").item()
    assert 10 == to_numpy(result.states["STATE__2"]).item()


def test_inputs_of_other_names_are_given_in_the_order_of_the_configuration(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    """`first` is an argument, but not the only name: as in Triton, the order decides for all."""
    workshop.script("indexed", torch_modules.Indexed())
    names = ("minuend", "first", "added")
    config = plain_config(
        "indexed",
        "pytorch",
        inputs=[TensorSpec(name, "FP32", (1,)) for name in names],
        outputs=[fp32("difference", 1), fp32("sum", 1)],
    )
    inputs = {name: wire(name, [[value]]) for name, value in zip(names, (10, 4, 1), strict=True)}

    (result,) = results(workshop.load(config), [Row(inputs)])

    assert [6, 11] == [array(result, name).item() for name in ("difference", "sum")]
    assert "they are given in the order of the configuration" in caplog.text


def test_outputs_of_which_one_has_another_name_are_read_in_order(workshop: Workshop) -> None:
    workshop.script("indexed", torch_modules.Indexed())
    config = plain_config(
        "indexed",
        "pytorch",
        inputs=[TensorSpec(f"IN__{index}", "FP32", (1,)) for index in range(3)],
        outputs=[fp32("OUT__1", 1), fp32("sum", 1)],
    )
    inputs = {f"IN__{index}": wire(f"IN__{index}", [[value]]) for index, value in enumerate((10, 4, 1))}

    (result,) = results(workshop.load(config), [Row(inputs)])

    assert [6, 11] == [array(result, name).item() for name in ("OUT__1", "sum")]


def test_a_state_listed_among_the_outputs_is_given_to_the_caller_too(workshop: Workshop) -> None:
    workshop.script("folding", torch_modules.Folding())
    config = sequence_config(
        "folding",
        "pytorch",
        inputs=[fp32("x", -1)],
        outputs=[fp32("y", 1), fp32("total_next", 1)],
        states=[fp32_state("total", 1)],
    )

    (result,) = results(workshop.load(config), [Row({"x": wire("x", [[4]])}, slot=0, start=True)])

    assert ["y", "total_next"] == [tensor.name for tensor in result.outputs]


def test_control_tensors_are_arguments_and_null_rows_get_the_false_value(workshop: Workshop) -> None:
    workshop.script("controlled", torch_modules.WithControls())
    config = sequence_config(
        "controlled",
        "pytorch",
        inputs=[fp32("x", 1)],
        outputs=[fp32("y", 1)],
        states=[fp32_state("s", 1)],
        controls=[
            ControlSpec("start", ControlKind.START, "FP32", (0, 1)),
            ControlSpec("ready", ControlKind.READY, "FP32", (0, 1)),
        ],
        direct=True,
    )
    engine = workshop.load(config)

    def row(slot: int, *, start: bool) -> Row:
        given = {"start": wire("start", [[float(start)]]), "ready": wire("ready", [[1]])}
        return Row({"x": wire("x", [[slot]])}, given, slot=slot, start=start)

    first = results(engine, [Row({}, null=True), row(1, start=True), row(2, start=True)])
    second = results(engine, [Row({}, null=True), Row({}, null=True), row(2, start=False)])

    assert [1001, 1002] == [array(result, "y").item() for result in first]
    assert [4] == [array(result, "y").item() for result in second]


def test_an_absent_optional_input_leaves_the_argument_s_default(workshop: Workshop) -> None:
    workshop.script("optional", torch_modules.WithOptional())
    config = plain_config(
        "optional", "pytorch", inputs=[fp32("x", 1), fp32("bias", 1, optional=True)], outputs=[fp32("y", 1)]
    )
    x, bias = wire("x", [[1]]), wire("bias", [[10]])

    ran = results(workshop.load(config), [Row({"x": x, "bias": bias}), Row({"x": x})])

    assert [11, 1] == [array(result, "y").item() for result in ran]


def test_stateless_requests_with_several_rows_are_taken_apart_again(workshop: Workshop) -> None:
    workshop.script("doubled", torch_modules.Doubled())
    config = plain_config("doubled", "pytorch", inputs=[fp32("x", 2)], outputs=[fp32("y", 2)])
    contents = [[[1, 2], [3, 4], [5, 6]], [[7, 8]], [[9, 10], [11, 12]]]

    ran = results(workshop.load(config), [Row({"x": wire("x", content)}) for content in contents])

    assert [(np.array(content) * 2).tolist() for content in contents] == [array(row, "y").tolist() for row in ran]


def test_a_model_without_batch_dimension_runs_row_by_row(workshop: Workshop) -> None:
    workshop.script("unbatched", torch_modules.Unbatched())
    config = sequence_config(
        "unbatched",
        "pytorch",
        inputs=[fp32("x", 2)],
        outputs=[fp32("y", 2)],
        states=[fp32_state("s", 2)],
        max_batch_size=0,
    )
    engine = workshop.load(config, slots=1)
    rows = [Row({"x": wire("x", [1, 2])}, slot=0, start=start) for start in (True, False)]

    ran = [results(engine, [row])[0] for row in rows]

    assert [[1, 2], [2, 4]] == [array(result, "y").tolist() for result in ran]
    assert (2,) == ran[1].states["s"].shape


def test_reshape_holds_between_client_and_model_both_ways(workshop: Workshop) -> None:
    workshop.script("doubled", torch_modules.Doubled())
    config = plain_config(
        "doubled", "pytorch", inputs=[fp32("x", -1, 1, reshape=(1, -1))], outputs=[fp32("y", -1, reshape=(1, -1))]
    )

    (result,) = results(workshop.load(config), [Row({"x": wire("x", [[[1], [2], [3]]])})])

    assert [[2, 4, 6]] == array(result, "y").tolist()


@pytest.mark.parametrize("asked", [["b", "", "a"], ["b", ""], ["", "b"], ["b", "b"]])
def test_only_outputs_asked_for_are_returned_row_by_row(workshop: Workshop, asked: list[str]) -> None:
    """A row that names none gets all, whatever its neighbours name."""
    workshop.script("indexed", torch_modules.Indexed())
    config = plain_config(
        "indexed",
        "pytorch",
        inputs=[TensorSpec(name, "FP32", (1,)) for name in ("first", "second", "third")],
        outputs=[fp32("a", 1), fp32("b", 1)],
    )
    inputs = {name: wire(name, [[1]]) for name in ("first", "second", "third")}

    ran = results(workshop.load(config), [Row(inputs, outputs=(name,) if name else ()) for name in asked])

    expected = [[name] if name else ["a", "b"] for name in asked]
    assert expected == [[tensor.name for tensor in result.outputs] for result in ran]


def test_state_is_returned_only_where_it_is_wanted(workshop: Workshop) -> None:
    workshop.script("cell", torch_modules.Cell())
    engine = workshop.load(cell_config())

    ran = engine.run([cell_row(0, 0), cell_row(1, 0)], [False, True]).rows

    assert [set(), {"h", "c"}] == [set(row.states) for row in ran if isinstance(row, RowResult)]


@pytest.mark.parametrize(
    ("module", "outputs", "text"),
    [
        (torch_modules.HalfPrecision, ["y"], r"wrong output 'y': expected FP32 [1,2], got FP16 [1,2]"),
        (torch_modules.Shorter, ["y"], r"wrong output 'y': expected FP32 [1,2], got FP32 [0,2]"),
        (
            torch_modules.Sparse,
            ["y"],
            "wrong output 'y': expected FP32 [1,2], got a tensor of the layout torch.sparse_coo",
        ),
        (torch_modules.Doubled, ["y", "z"], "wrong output 'z': expected a value at position 1, got 1 values"),
    ],
)
def test_a_wrong_output_names_what_was_expected_and_what_came(
    workshop: Workshop, module: type[torch.nn.Module], outputs: list[str], text: str
) -> None:
    workshop.script("wrong", module())
    config = plain_config(
        "wrong", "pytorch", inputs=[fp32("x", 2)], outputs=[TensorSpec(name, "FP32", (2,)) for name in outputs]
    )

    failed = error(workshop.load(config), Row({"x": wire("x", [[1, 2]])}))

    assert "INTERNAL" == failed.code
    assert f"model 'wrong' returned a {text}" == failed.message


def test_a_wrong_state_moves_no_state(workshop: Workshop) -> None:
    workshop.script("growing", torch_modules.Growing())
    config = sequence_config(
        "growing", "pytorch", inputs=[fp32("x", 1)], outputs=[fp32("y", 1)], states=[fp32_state("seen", 1)]
    )
    engine = workshop.load(config)
    before = engine.describe_state(0)

    failed = error(engine, Row({"x": wire("x", [[1]])}, slot=0, start=True))

    assert "wrong state 'seen_next': expected FP32 [1,1], got FP32 [1,2]" in failed.message
    assert before == engine.describe_state(0)


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ({}, "no state 'h'"),
        (
            {"h": wire("h", [1, 2, 3]), "c": wire("c", [1, 2])},
            r"state 'c' is FP32 \[2\], but the model's is FP32 \[3\]",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_whole(
    workshop: Workshop, states: dict[str, Tensor], text: str
) -> None:
    workshop.script("cell", torch_modules.Cell())
    engine = workshop.load(cell_config())
    before = engine.describe_state(0)

    with pytest.raises(ModelError, match=text):
        engine.load_states([0], [states])

    assert before == engine.describe_state(0)


def test_a_state_is_described_by_dtype_shape_mean_and_norm(workshop: Workshop) -> None:
    workshop.script("cell", torch_modules.Cell())
    engine = workshop.load(cell_config())
    engine.load_states([0], [{"h": wire("h", [3, 0, 0]), "c": wire("c", [3, 4, 2])}])

    assert "h FP32 [3] mean 1 norm 3; c FP32 [3] mean 3 norm 5.38516" == engine.describe_state(0)


def bad_load(workshop: Workshop, config: ModelConfig, text: str) -> None:
    with pytest.raises(LoadError, match=text):
        workshop.load(config)


def test_a_name_that_fits_no_argument_is_refused_with_the_arguments_names(workshop: Workshop) -> None:
    workshop.script("indexed", torch_modules.Indexed())
    config = sequence_config(
        "indexed",
        "pytorch",
        inputs=[fp32("first", 1), fp32("second", 1)],
        outputs=[fp32("a", 1)],
        states=[StateSpec("nobody", "b", "FP32", (1,))],
    )

    bad_load(workshop, config, "'nobody' is no argument of forward.*the arguments are 'first', 'second', 'third'")


def test_more_inputs_than_arguments_are_refused_with_the_arguments_names(workshop: Workshop) -> None:
    workshop.script("indexed", torch_modules.Indexed())
    config = plain_config(
        "indexed",
        "pytorch",
        inputs=[TensorSpec(name, "FP32", (1,)) for name in ("first", "second", "third", "nobody")],
        outputs=[fp32("a", 1)],
    )

    bad_load(workshop, config, "there are more of them than arguments, which are 'first', 'second', 'third'")


def test_an_argument_that_nothing_fits_is_refused(workshop: Workshop) -> None:
    workshop.script("indexed", torch_modules.Indexed())
    config = plain_config("indexed", "pytorch", inputs=[fp32("first", 1)], outputs=[fp32("a", 1)])

    bad_load(workshop, config, "nothing in the configuration is argument 'second', 'third' of forward")


def test_two_names_of_one_argument_are_refused(workshop: Workshop) -> None:
    workshop.script("doubled", torch_modules.Doubled())
    config = plain_config("doubled", "pytorch", inputs=[fp32("IN__0", 1), fp32("ALSO__0", 1)], outputs=[fp32("y", 1)])

    bad_load(workshop, config, "'ALSO__0' and 'IN__0' are both argument 'x' of forward")


def test_two_outputs_of_one_place_are_refused(workshop: Workshop) -> None:
    workshop.script("doubled", torch_modules.Doubled())
    config = plain_config("doubled", "pytorch", inputs=[fp32("x", 1)], outputs=[fp32("y__0", 1), fp32("OUT__0", 1)])

    bad_load(workshop, config, "outputs 'y__0' and 'OUT__0' both mean value 0")


def test_a_damaged_model_file_is_a_load_error(workshop: Workshop) -> None:
    (workshop.version_dir("doubled") / "model.pt").write_bytes(b"not a model")
    config = plain_config("doubled", "pytorch", inputs=[fp32("x", 1)], outputs=[fp32("y", 1)])

    bad_load(workshop, config, "failed to load model")


def test_a_file_of_weights_alone_is_refused_with_the_remedy(workshop: Workshop) -> None:
    torch.save(torch.nn.Linear(1, 1).state_dict(), workshop.version_dir("doubled") / "model.pt")
    config = plain_config("doubled", "pytorch", inputs=[fp32("x", 1)], outputs=[fp32("y", 1)])

    bad_load(workshop, config, r"was written by torch\.save and has no code; write it with torch\.jit\.save")


def test_a_module_without_a_forward_of_its_own_is_refused_with_the_remedy(workshop: Workshop) -> None:
    """A recurrent module of torch has several forwards, and what is saved of it alone has none."""
    workshop.script("alone", torch.nn.LSTM(1, 1))
    config = plain_config("alone", "pytorch", inputs=[fp32("x", 1)], outputs=[fp32("y", 1)])

    bad_load(workshop, config, r"no method forward; script a module of yours that calls it in a forward of its own")


def test_a_package_of_compiled_code_is_refused_with_the_remedy(workshop: Workshop) -> None:
    with zipfile.ZipFile(workshop.version_dir("compiled") / "model.pt2", "w") as archive:
        archive.writestr("model/data/aotinductor/model/code.wrapper.so", b"")
        archive.writestr("model/archive_format", "pt2")
    config = plain_config("compiled", "pytorch", inputs=[fp32("x", 1)], outputs=[fp32("y", 1)])

    bad_load(workshop, config, r"compiled by AOTInductor, which is not served; write .* with torch\.export\.save")


def test_a_missing_model_file_is_a_load_error_that_names_what_was_looked_for(workshop: Workshop) -> None:
    workshop.version_dir("doubled")
    config = plain_config("doubled", "pytorch", inputs=[fp32("x", 1)], outputs=[fp32("y", 1)])

    bad_load(workshop, config, "there is no model.pt or model.pt2 in ")


def test_an_exported_program_gives_what_the_script_gives(workshop: Workshop) -> None:
    workshop.script("cell", torch_modules.Cell())
    script = workshop.load(cell_config())
    (workshop.version_dir("cell") / "model.pt").unlink()
    workshop.program("cell", torch_modules.Cell(), tuple(torch.zeros(2, 3) for _ in range(3)))
    program = workshop.load(cell_config())

    for step in range(3):
        rows = [cell_row(slot, step) for slot in (5, 0, 3)]
        assert list(map(raws, results(script, rows))) == list(map(raws, results(program, rows)))


def test_a_program_exported_for_one_batch_size_is_refused_with_the_remedy(workshop: Workshop) -> None:
    workshop.program("cell", torch_modules.Cell(), tuple(torch.zeros(2, 3) for _ in range(3)), dynamic=False)

    bad_load(
        workshop, cell_config(), r"fixed batch of 2, but max_batch_size is 8; export it with a dynamic dimension 0"
    )


@pytest.mark.parametrize(
    ("spec", "given"),
    [
        (fp32("x", 4), r"FP32 \[-1,4\]"),
        (fp32("x", 3, 1), r"FP32 \[-1,3,1\]"),
        (TensorSpec("x", "FP64", (3,)), r"FP64 \[-1,3\]"),
    ],
)
def test_an_input_that_a_program_was_not_exported_for_is_refused(
    workshop: Workshop, spec: TensorSpec, given: str
) -> None:
    """One more dimension, or another datatype, gives other numbers without an error."""
    workshop.program("cell", torch_modules.Cell(), tuple(torch.zeros(2, 3) for _ in range(3)))
    config = sequence_config("cell", "pytorch", inputs=[spec], outputs=[fp32("y", 3)], states=CELL_STATES)

    bad_load(workshop, config, rf"'x' is {given} by the configuration, but argument 'x' was exported as FP32 \[-1,3\]")


def test_a_program_exported_for_smaller_batches_says_so(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    workshop.program("cell", torch_modules.Cell(), tuple(torch.zeros(2, 3) for _ in range(3)), batch_max=4)

    engine = workshop.load(cell_config())
    found = results(engine, [cell_row(slot, 0) for slot in range(6)])

    assert "argument 'x' was exported for batches of at most 4 rows" in caplog.text
    assert 1 == caplog.text.count("at most 4 rows")
    assert [2.0 * slot for slot in range(6)] == [array(row, "y")[0, 0] for row in found]


@pytest.mark.parametrize(("named", "plain", "nested"), [(True, "y", "pair"), (False, "OUTPUT__0", "OUTPUT__1")])
def test_a_nested_value_of_a_program_is_refused_at_load_if_it_is_an_output(
    workshop: Workshop, plain: str, nested: str, *, named: bool
) -> None:
    workshop.program("nested", torch_modules.Nested(named=named), (torch.zeros(2, 1),))
    inputs, outputs = [fp32("x", 1)], [TensorSpec(plain, "FP32", (1,))]
    engine = workshop.load(plain_config("nested", "pytorch", inputs=inputs, outputs=outputs))

    assert 6 == array(results(engine, [Row({"x": wire("x", [[3]])})])[0], plain).item()

    outputs.append(TensorSpec(nested, "FP32", (1,)))
    bad_load(
        workshop,
        plain_config("nested", "pytorch", inputs=inputs, outputs=outputs),
        f"forward returns a nested value as '{nested}'",
    )


@pytest.mark.parametrize(
    ("place", "what"), [(1, "None"), (2, "a number"), (3, "a number"), (4, "a tensor of torch.complex64")]
)
def test_what_a_program_returns_and_is_no_output_is_refused_at_load(workshop: Workshop, place: int, what: str) -> None:
    workshop.program("unfit", torch_modules.Unfit(), (torch.zeros(2, 1),))
    inputs = [fp32("x", 1)]
    outputs = [TensorSpec(f"OUTPUT__{each}", "FP32", (1,)) for each in (0, place)]

    assert workshop.load(plain_config("unfit", "pytorch", inputs=inputs, outputs=outputs[:1]))
    bad_load(
        workshop,
        plain_config("unfit", "pytorch", inputs=inputs, outputs=outputs),
        f"forward returns {what} as 'OUTPUT__{place}'; it must be one tensor of FP32",
    )


@pytest.mark.parametrize("named", [True, False])
def test_an_output_of_another_datatype_than_the_program_returns_is_refused_at_load(
    workshop: Workshop, *, named: bool
) -> None:
    """It was READY, and each request failed."""
    name = "y" if named else "OUTPUT__0"
    workshop.program("nested", torch_modules.Nested(named=named), (torch.zeros(2, 1),))
    inputs, outputs = [fp32("x", 1)], [TensorSpec(name, "FP64", (1,))]

    bad_load(
        workshop,
        plain_config("nested", "pytorch", inputs=inputs, outputs=outputs),
        f"forward returns FP32 as '{name}'; it must be one tensor of FP64",
    )


def test_the_configured_file_name_is_used(workshop: Workshop) -> None:
    workshop.script("doubled", torch_modules.Doubled()).rename(workshop.version_dir("doubled") / "other.pt")
    config = plain_config(
        "doubled", "pytorch", inputs=[fp32("x", 1)], outputs=[fp32("y", 1)], default_model_filename="other.pt"
    )

    assert 4 == array(results(workshop.load(config), [Row({"x": wire("x", [[2]])})])[0], "y").item()


def test_what_torch_cannot_read_of_a_batch_fails_the_guilty_row_alone(workshop: Workshop) -> None:
    """As it is where a GPU has no memory for a copy."""
    workshop.script("unreadable", torch_modules.Unreadable())
    engine = workshop.load(total_config("unreadable"))
    rows = [Row({"x": wire("x", [[value]])}, slot=slot, start=True) for slot, value in enumerate((1, -1, 3))]

    good, bad, other = engine.run(rows, [True] * 3).rows

    assert isinstance(bad, RowError)
    assert bad.message.startswith("PyTorch execute failure: ")
    assert not bad.lost
    assert [1, 3] == [array(row, "y").item() for row in (good, other) if isinstance(row, RowResult)]
    again = [Row({"x": wire("x", [[1]])}, slot=slot) for slot in (0, 2)]
    assert [2, 4] == [array(row, "y").item() for row in results(engine, again)]


def test_a_failure_of_any_kind_stays_with_its_row_and_moves_no_state(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the batch's other groups have moved on when it comes."""
    workshop.script("folding", torch_modules.Folding())
    engine = workshop.load(total_config("folding", (-1,)))

    def rows(*, start: bool) -> list[Row]:
        return [Row({"x": wire("x", [[1] * (slot + 1)])}, slot=slot, start=start) for slot in range(3)]

    results(engine, rows(start=True))
    split = Outputs.columns

    def fails_for_pairs(outputs: Outputs, returned: object, layout: Layout, pieces: Pieces) -> dict[str, list[Tensor]]:
        if (1, 2) in [row.inputs["x"].shape for row in layout.batch]:
            raise KeyError("no such thing")
        return split(outputs, returned, layout, pieces)

    with monkeypatch.context() as patched:
        patched.setattr(Outputs, "columns", fails_for_pairs)
        good, bad, other = engine.run(rows(start=False), [False] * 3).rows

    assert isinstance(bad, RowError)
    assert "no such thing" in bad.message
    assert not bad.lost
    assert [2, 6] == [array(row, "y").item() for row in (good, other) if isinstance(row, RowResult)]
    assert [3, 4, 9] == [array(row, "y").item() for row in results(engine, rows(start=False))]


@pytest.mark.parametrize("kind", ["meta", "sparse"])
def test_a_state_that_cannot_be_kept_is_its_row_s_error(workshop: Workshop, kind: str) -> None:
    workshop.script("odd", torch_modules.OddState(kind))
    engine = workshop.load(total_config("odd"))
    values = (1, -1, 3)
    results(engine, [Row({"x": wire("x", [[7]])}, slot=slot, start=True) for slot in range(3)])

    good, bad, other = engine.run(
        [Row({"x": wire("x", [[value]])}, slot=slot) for slot, value in enumerate(values)], [False] * 3
    ).rows

    assert isinstance(bad, RowError)
    assert not bad.lost
    assert [7, 7] == [array(row, "y").item() for row in (good, other) if isinstance(row, RowResult)]
    again = results(engine, [Row({"x": wire("x", [[0]])}, slot=slot) for slot in range(3)])
    assert [1, 7, 3] == [array(row, "y").item() for row in again]


@pytest.mark.parametrize("growable", [False, True])
@pytest.mark.parametrize("dims", [(1,), (-1,)])
def test_views_of_negated_numbers_are_outputs_and_states(
    workshop: Workshop, dims: tuple[int, ...], *, growable: bool
) -> None:
    workshop.script("negated", torch_modules.Negated())
    state = StateSpec("total", "total_next", "FP32", dims, same_buffer=growable, growable=growable)
    config = msgspec.structs.replace(
        total_config("negated"), sequence_batching=SequenceBatching(Oldest(8), 1_000_000, (), (state,))
    )
    engine = workshop.load(config)

    for start in (True, False):
        (result,) = results(engine, [Row({"x": wire("x", [[5]])}, slot=0, start=start)])
        assert -5 == array(result, "y").item()
        assert "mean -5" in engine.describe_state(0)


def test_an_arena_that_could_not_grow_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = StateArena(CELL_STATES, 1000, tmp_path, torch.device("cpu"), 1 << 20)
    grow = FixedState.grow

    def fails_for_one(state: FixedState, places: int) -> None:
        if state.spec.input_name == "c":
            raise torch.OutOfMemoryError("CUDA out of memory")
        grow(state, places)

    with monkeypatch.context() as patched:
        patched.setattr(FixedState, "grow", fails_for_one)
        with pytest.raises(torch.OutOfMemoryError):
            states.place(500)

    for slot in (70, 500):
        states.load([slot], [{"h": wire("h", [1, 2, 3]), "c": wire("c", [4, 5, 6])}])
        assert "c FP32 [3] mean 5" in states.describe(slot)


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("no such thing")])
def test_a_state_that_could_not_be_moved_on_is_lost_and_says_so(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    workshop.script("folding", torch_modules.Folding())
    engine = workshop.load(total_config("folding"))

    def scatter(*_: object) -> None:
        raise failure

    monkeypatch.setattr(FixedState, "scatter", scatter)

    (ran,) = engine.run([Row({"x": wire("x", [[1]])}, slot=0, start=True)], [False]).rows

    assert isinstance(ran, RowError)
    assert ran.lost


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_what_the_cpu_gives(workshop: Workshop) -> None:
    workshop.script("cell", torch_modules.Cell())
    host = workshop.load(cell_config())
    request = LoadRequest(cell_config(), "{}", workshop.directory / "cell", "1", "cell_gpu", "cuda:0", 8)
    device: Engine = find_backend("pytorch").load(request)

    for step in range(3):
        rows = [cell_row(slot, step) for slot in (5, 0, 3)]
        assert list(map(raws, results(host, rows))) == list(map(raws, results(device, rows)))


def test_a_gpu_that_is_not_there_is_a_load_error(workshop: Workshop) -> None:
    workshop.script("cell", torch_modules.Cell())
    request = LoadRequest(cell_config(), "{}", workshop.directory / "cell", "1", "cell_gpu", "cuda:99", 8)

    with pytest.raises(LoadError, match="asks for cuda:99"):
        find_backend("pytorch").load(request)
