"""Ragged inputs and batch tensors: rows of any shape share a call, and each gets back its own part."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from executor.engine.base import Engine, Row, RowError, RowResult
from executor.engine.batch_tensors import batch_input_value, scattered_shape
from executor.engine.null_rows import NULL_ROW
from executor.engine.shapes import Shape
from shared.contract.errors import Code, LoadError
from shared.contract.model_config import BatchInput, BatchInputKind, BatchOutput, ModelConfig, StateSpec, TensorSpec
from shared.contract.tensors import Tensor, pack_bytes
from tests.executor.engine import torch_modules
from tests.executor.engine.model_workshop import Workshop, array, plain_config, results, sequence_config, wire

KINDS = BatchInputKind


# -- batch inputs -----------------------------------------------------------------------------------------------------


def oracle(kind: BatchInputKind, rows: list[NDArray[np.float32]]) -> list[Any]:
    """The value by the words of the configuration's documentation, from the requests' own tensors."""
    sizes = [row.size for row in rows]
    items = [list(row.shape[1:]) for row in rows for _ in row]
    return {
        KINDS.ELEMENT_COUNT: sizes,
        KINDS.ACCUMULATED_ELEMENT_COUNT: np.cumsum(sizes).tolist(),
        KINDS.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO: np.cumsum([0, *sizes]).tolist(),
        KINDS.MAX_ELEMENT_COUNT_AS_SHAPE: np.zeros(max(sizes)).tolist(),
        KINDS.ITEM_SHAPE: items,
        KINDS.ITEM_SHAPE_FLATTEN: [size for item in items for size in item],
    }[kind]


@given(
    kind=st.sampled_from(list(KINDS)),
    datatype=st.sampled_from(["INT32", "FP32"]),
    given_shapes=st.integers(1, 3).flatmap(
        lambda rank: st.lists(st.tuples(st.integers(1, 3), *[st.integers(0, 4)] * rank), min_size=1, max_size=6)
    ),
)
def test_every_kind_of_batch_input_tells_the_shapes_of_the_batch(
    kind: BatchInputKind, datatype: str, given_shapes: list[Shape]
) -> None:
    rows = [np.ones(shape, np.float32) for shape in given_shapes]

    value = batch_input_value(kind, datatype, given_shapes)

    assert oracle(kind, rows) == value.tolist()
    assert {"INT32": np.int32, "FP32": np.float32}[datatype] is value.dtype.type
    assert (2 if kind is KINDS.ITEM_SHAPE else 1) == value.ndim


def test_zeros_as_long_as_a_large_input_take_no_more_memory_than_they_have_bytes() -> None:
    tracemalloc.start()
    value = batch_input_value(KINDS.MAX_ELEMENT_COUNT_AS_SHAPE, "INT32", [(1, 1 << 20)])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert most < 2 * value.nbytes


def test_an_output_is_cut_by_the_sources_dimension_at_the_same_place() -> None:
    assert (2, 5, 3) == scattered_shape((-1, 3), (2, 5, 7), batched=True)
    assert (5, 3) == scattered_shape((-1, 3), (5, 7), batched=False)


# -- the engine -------------------------------------------------------------------------------------------------------


def segments_config(*, direct: bool) -> ModelConfig:
    config = sequence_config(
        "segments",
        "pytorch",
        inputs=[TensorSpec("x", "FP32", (-1,), allow_ragged_batch=True)],
        outputs=[TensorSpec("doubled", "FP32", (-1,)), TensorSpec("sum", "FP32", (1,))],
        states=[StateSpec("total", "total_next", "FP32", (1,))],
        direct=direct,
    )
    return msgspec.structs.replace(
        config,
        batch_inputs=(
            BatchInput(KINDS.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO, ("ends",), "FP32", "x"),
            BatchInput(KINDS.ELEMENT_COUNT, ("lengths",), "INT32", "x"),
        ),
        batch_outputs=(BatchOutput(("doubled",), "x"),),
    )


@pytest.fixture(scope="module")
def engines(house: Workshop) -> dict[bool, Engine]:
    """By whether the strategy is direct."""
    house.script("segments", torch_modules.Segments())
    return {direct: house.load(segments_config(direct=direct)) for direct in (False, True)}


def step(slot: int, numbers: list[int], *, start: bool) -> Row:
    return Row({"x": wire("x", [numbers])}, slot=slot, start=start)


Steps = dict[int, list[int]]
"""By slot, what its sequence sends."""


@given(
    direct=st.booleans(),
    batches=st.lists(
        st.dictionaries(st.integers(0, 7), st.lists(st.integers(0, 99), max_size=6), min_size=1, max_size=8),
        min_size=1,
        max_size=4,
    ),
)
def test_ragged_rows_are_concatenated_and_each_gets_its_own_part(
    engines: dict[bool, Engine], direct: bool, batches: list[Steps]
) -> None:
    """Whatever the lengths and the null rows: answers and states are those of each sequence alone."""
    totals: dict[int, int] = {}
    for batch in batches:
        slots = sorted(batch)
        rows = [step(slot, batch[slot], start=slot not in totals) for slot in slots]
        if direct:
            by_slot = dict(zip(slots, rows, strict=True))
            rows = [by_slot.get(slot, NULL_ROW) for slot in range(max(slots) + 1)]

        ran = results(engines[direct], rows)

        for slot, result in zip(slots, ran, strict=True):
            totals[slot] = totals.get(slot, 0) + sum(batch[slot])
            assert [[2 * number for number in batch[slot]]] == array(result, "doubled").tolist()
            assert totals[slot] == array(result, "sum").item()


def test_ragged_rows_run_in_one_call_unless_one_fails(engines: dict[bool, Engine]) -> None:
    rows = [step(slot, numbers, start=True) for slot, numbers in enumerate([[1, 2], [-1], [3]])]

    first, failed, last = engines[False].run(rows, [False] * 3).rows

    assert isinstance(failed, RowError)
    assert "negative number" in failed.message
    assert first is not None and last is not None
    assert not isinstance(first, RowError) and not isinstance(last, RowError)
    assert ([[2, 4]], [[6]]) == (array(first, "doubled").tolist(), array(last, "doubled").tolist())


def sentences_config(**changes: Any) -> ModelConfig:
    config = plain_config(
        "sentences",
        "pytorch",
        inputs=[TensorSpec("words", "BYTES", (-1,), allow_ragged_batch=True)],
        outputs=[TensorSpec("counted", "BYTES", (-1,))],
    )
    return msgspec.structs.replace(
        config,
        batch_inputs=(BatchInput(KINDS.ITEM_SHAPE, ("items",), "INT32", "words"),),
        batch_outputs=(BatchOutput(("counted",), "words"),),
        **changes,
    )


def test_a_shape_that_a_batch_input_cannot_tell_is_its_row_s_error(workshop: Workshop) -> None:
    """Only an input without elements can have one."""
    workshop.script("sentences", torch_modules.Sentences())
    engine = workshop.load(sentences_config(inputs=(TensorSpec("words", "BYTES", (-1, -1), allow_ragged_batch=True),)))
    endless = Row({"words": Tensor("words", "BYTES", (1, 1 << 40, 0), b"")})
    good = Row({"words": Tensor("words", "BYTES", (1, 1, 1), pack_bytes(["a"]))})

    ran, failed = engine.run([good, endless], [False] * 2).rows

    assert isinstance(ran, RowResult)
    assert isinstance(failed, RowError)
    assert Code.INVALID_ARG is failed.code
    assert "a number of input 'words' is beyond INT32" in failed.message


def test_strings_are_ragged_too_and_requests_may_bring_several_items(workshop: Workshop) -> None:
    workshop.script("sentences", torch_modules.Sentences())
    engine = workshop.load(sentences_config())
    contents = [[["a", "b"], ["c", "d"]], [["e"]], [["f", "g", "h"]]]

    ran = results(
        engine,
        [
            Row(
                {
                    "words": Tensor(
                        "words", "BYTES", (len(content), len(content[0])), pack_bytes(itertools.chain(*content))
                    )
                }
            )
            for content in contents
        ],
    )

    expected = [[[f"{word}{len(row)}".encode() for word in row] for row in content] for content in contents]
    assert expected == [array(result, "counted").tolist() for result in ran]


def test_a_batch_output_that_cannot_be_cut_is_an_error(workshop: Workshop) -> None:
    workshop.script("sentences", torch_modules.Indivisible())
    engine = workshop.load(sentences_config())
    row = Row({"words": Tensor("words", "BYTES", (1, 2), pack_bytes(["a", "b"]))})

    (failed,) = engine.run([row], [False]).rows

    assert isinstance(failed, RowError)
    assert "wrong output 'counted': expected 2 strings, got 3 strings" in failed.message


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"outputs": (TensorSpec("counted", "BYTES", (1, -1)),)},
            "dimension 1 of batch output 'counted' is variable, but its source input 'words' has only 1 dimensions",
        ),
        (
            {"max_batch_size": 0},
            "batch input 'items' tells the shapes of batch items, but max_batch_size is 0",
        ),
    ],
)
def test_batch_tensors_that_no_shape_can_fill_are_refused_at_load(
    workshop: Workshop, changes: dict[str, Any], text: str
) -> None:
    workshop.script("sentences", torch_modules.Sentences())

    with pytest.raises(LoadError, match=text):
        workshop.load(sentences_config(**changes))
