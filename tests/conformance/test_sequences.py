"""Sequences as clients see them: START, END, ids of every type, controls, null rows, refusals (triton-spec 1.2-1.4)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from shared.contract.errors import Code
from shared.contract.ids import CorrelationId
from tests.conformance.calls import (
    Answer,
    Caller,
    Gate,
    Row,
    Step,
    Stream,
    fresh_id,
    fresh_text,
    neighbours,
    refused,
)
from tests.conformance.targets import Target
from tests.conformance.test_dynamic_batching import waiting
from tests.mesh.running_mesh import PATIENCE_S

START_NEEDED = "inference request for sequence {} to model '{}' must specify the START flag on the first request"
NewId = Callable[[], CorrelationId]
BATCHING = ["direct", "oldest"]


def controls(row: Row) -> tuple[object, ...]:
    """START, READY and END of a row."""
    return row.value("START"), row.value("READY"), row.value("END")


@pytest.mark.parametrize("model", BATCHING)
@pytest.mark.parametrize("new_id", [fresh_id, fresh_text])
async def test_a_sequence_sums_up_from_start_to_end(
    caller: Caller, model: str, new_id: Callable[[], CorrelationId]
) -> None:
    caller, identity = caller.of(model), new_id()

    answers = [
        await caller(identity, 5, start=True),
        await caller(identity, 6),
        await caller(identity, 7, end=True),
    ]

    assert [5, 11, 18] == [answer.total for answer in answers]
    assert [(1, 1, False), (0, 1, False), (0, 1, True)] == [controls(answer.seen.mine) for answer in answers]
    assert [identity] * 3 == [answer.seen.mine.correlation_id for answer in answers]
    with refused(Code.INVALID_ARG, START_NEEDED.format(identity, model)):
        await caller(identity, 8)


@pytest.mark.parametrize("model", BATCHING)
async def test_start_and_end_in_one_request_is_a_whole_sequence(caller: Caller, model: str) -> None:
    caller, identity = caller.of(model), fresh_id()

    answers = [await caller(identity, value, start=True, end=True) for value in (3, 4)]

    assert [3, 4] == [answer.total for answer in answers]
    assert [(1, 1, True)] * 2 == [controls(answer.seen.mine) for answer in answers]


@pytest.mark.parametrize("model", BATCHING)
async def test_start_on_a_live_id_starts_it_anew(caller: Caller, model: str) -> None:
    caller, identity = caller.of(model), fresh_id()
    await caller(identity, 5, start=True)

    again = await caller(identity, 20, start=True)
    last = await caller(identity, 1, end=True)

    assert [20, 21] == [again.total, last.total]
    assert (1, 1, False) == controls(again.seen.mine)


@pytest.mark.parametrize("model", BATCHING)
async def test_a_number_and_the_same_digits_as_text_are_two_sequences(caller: Caller, model: str) -> None:
    caller, number = caller.of(model), fresh_id()
    await caller(number, 1, start=True)
    await caller(str(number), 100, start=True)

    ends = [await caller(number, 1, end=True), await caller(str(number), 100, end=True)]

    assert [2, 200] == [answer.total for answer in ends]
    assert [number, str(number)] == [answer.seen.mine.correlation_id for answer in ends]


async def test_a_sequence_belongs_to_its_model(caller: Caller) -> None:
    identity = fresh_id()
    await caller.of("direct")(identity, 1, start=True)

    with refused(Code.INVALID_ARG, START_NEEDED.format(identity, "oldest")):
        await caller.of("oldest")(identity, 1)
    await caller.of("direct")(identity, 1, end=True)


@pytest.mark.parametrize("model", [*BATCHING, "unbatched"])
async def test_what_is_refused_before_it_reaches_the_model(caller: Caller, model: str) -> None:
    caller = caller.of(model)

    with refused(
        Code.INVALID_ARG,
        f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID",
    ):
        await caller.infer(sole_step(model, 0))
    for end in (False, True):
        identity = fresh_text()
        with refused(Code.INVALID_ARG, START_NEEDED.format(identity, model)):
            await caller.infer(replace(sole_step(model, identity), start=False, end=end))


async def test_a_request_is_one_row(caller: Caller) -> None:
    two_rows = {"INPUT": np.ones([2, 1], np.int32)}

    with refused(
        Code.INVALID_ARG,
        "inference request to model 'direct' must specify batch-size 1 due to requirements of sequence batcher",
    ):
        await caller.of("direct").infer(Step(fresh_id(), start=True, inputs=two_rows))


@pytest.mark.parametrize("name", ["START", "READY", "CORRID"])
async def test_a_client_cannot_send_a_control(caller: Caller, name: str) -> None:
    model = "corrid_int32"
    inputs = {"INPUT": np.ones([1, 1], np.int32), name: np.ones([1, 1], np.int32)}

    with refused(Code.INVALID_ARG):
        await caller.of(model).infer(Step(fresh_id(), start=True, inputs=inputs))


TEXT_CONTROL = (
    "2.51 gives a model a STRING control of 128 bytes whatever the id's length, and its own backend fails on it"
)
WIDE_ID = (1 << 40) + (1 << 31) + 7


@pytest.mark.parametrize(
    ("model", "identity", "carried"),
    [
        ("corrid_uint64", WIDE_ID, WIDE_ID),
        ("corrid_int64", WIDE_ID + 1, WIDE_ID + 1),
        ("corrid_uint32", WIDE_ID + 2, (1 << 31) + 9),
        ("corrid_int32", WIDE_ID + 3, 10 - (1 << 31)),
        pytest.param("corrid_string", "grüße", "grüße", marks=pytest.mark.mesh_only(TEXT_CONTROL)),
        ("unbatched", "s" * 128, "s" * 128),
    ],
)
async def test_the_correlation_id_reaches_the_model_in_the_type_of_its_control(
    caller: Caller, model: str, identity: CorrelationId, carried: CorrelationId
) -> None:
    answer = await caller.of(model).infer(sole_step(model, identity))

    assert carried == answer.seen.mine.value("CORRID")
    assert identity == answer.seen.mine.correlation_id
    shape = [1] if model == "unbatched" else [1, 1]
    assert {shape_of(answer, name) for name in ("CORRID", "START", "READY", "END")} == {tuple(shape)}


def sole_step(model: str, identity: CorrelationId, value: int = 1) -> Step:
    """A whole sequence in one request."""
    shape = [1] if model == "unbatched" else [1, 1]
    return Step(identity, start=True, end=True, inputs={"INPUT": np.full(shape, value, np.int32)})


def shape_of(answer: Answer, name: str) -> tuple[int, ...]:
    """Of a tensor that the model saw."""
    return tuple(answer.seen.mine.tensors[name]["shape"])


@pytest.mark.parametrize(
    ("model", "new_id", "text"),
    [
        ("corrid_uint64", fresh_text, "data-type is 'BYTES', but model 'corrid_uint64' expects 'UINT64'"),
        ("corrid_int32", fresh_text, "data-type is 'BYTES', but model 'corrid_int32' expects 'INT32'"),
        ("corrid_string", fresh_id, "data-type is 'UINT64', but model 'corrid_string' expects 'BYTES'"),
    ],
)
@pytest.mark.mesh_only(
    "2.51 gives the model the first bytes of the text as a number, so that sequences may mix, or fails"
)
async def test_an_id_of_the_wrong_kind_for_the_control_is_refused(
    caller: Caller, model: str, new_id: NewId, text: str
) -> None:
    with refused(Code.INVALID_ARG, "", "sequence batching control 'CORRID'", text):
        await caller.of(model).infer(sole_step(model, new_id()))


async def test_a_text_of_more_than_128_characters_is_refused(caller: Caller) -> None:
    with refused(Code.UNSUPPORTED, "", "string correlation ID cannot be longer than 128 characters"):
        await caller.of("direct")("s" * 129, 1, start=True)


# -- direct: position is slot, the others are null rows ---------------------------------------------------------------


async def lowest_row_taken(caller: Caller, *, text: bool) -> Answer:
    """The answer to a new sequence of one step with the value 9, in the lowest row. The mesh's first sequences may find
    others: those that were laid out for them before a lower one was free.
    """
    async with asyncio.timeout(PATIENCE_S):
        while True:
            newcomer = await caller(neighbours(caller.model, 1, text=text)[0], 9, start=True, end=True)
            if newcomer.seen.row == 0:
                return newcomer


async def lowest_rows_taken(caller: Caller, sequences: Sequence[int | str]) -> None:
    """Begins these sequences, each with the value 1, in the lowest rows in their order; see `lowest_row_taken`."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            starts = [await caller(identity, 1, start=True) for identity in sequences]
            if [answer.seen.row for answer in starts] == [*range(len(sequences))]:
                return
            for identity in sequences:
                await caller(identity, 0, end=True)


@pytest.mark.parametrize(
    ("model", "text"),
    [("rows", False), pytest.param("rows_text", True, marks=pytest.mark.mesh_only(TEXT_CONTROL))],
)
async def test_direct_keeps_positions_and_fills_up_with_null_rows(lone_caller: Caller, model: str, text: bool) -> None:
    caller = lone_caller.of(model)
    first, second, third = neighbours(model, 3, text=text)
    nobody = "" if text else 0

    await lowest_rows_taken(caller, (first, second, third))
    alone = await caller(third, 2)
    middle = await caller(second, 3)
    await caller(first, 1, end=True)
    newcomer = await lowest_row_taken(caller, text=text)
    ends = [await caller(identity, 1, end=True) for identity in (second, third)]

    assert [3, 4] == [alone.total, middle.total]
    assert 2 == alone.seen.row
    assert [(0, 0, False), (0, 0, False), (0, 1, False)] == [controls(row) for row in alone.seen.rows]
    assert [nobody, nobody, third] == alone.seen.values("CORRID")
    assert [(1, 1)] * 3 == [tuple(row.tensors["INPUT"]["shape"]) for row in alone.seen.rows]
    assert 2 == len(middle.seen.rows), "rows above the highest ready one are left out"
    assert (0, 9) == (newcomer.seen.row, newcomer.total)
    assert [(5, 1), (4, 2)] == [(answer.total, answer.seen.row) for answer in ends]


async def test_steps_that_came_meanwhile_share_a_batch(target: Target, gate: Gate) -> None:
    model = "rows"
    ids = neighbours(model, 3)
    async with Stream(target, model) as stream:
        stream.send(*(Step(identity, 1, start=True) for identity in ids))
        first, second, third = [answer.seen.row for answer in await stream.answers(3)]
        stream.send(Step(ids[0], 1, parameters=gate.parameters))
        await gate.entered()
        stream.send(Step(ids[0], 1, end=True), *(Step(identity, 1) for identity in ids[1:]))
        stream.send(*(Step(identity, 1, end=True) for identity in ids[1:]))
        await waiting(target, model, 5)
        gate.open()
        held, *rest = await stream.answers(6)

    assert [2, 3, 2, 2, 3, 3] == [held.total, *(answer.total for answer in rest)]
    assert len({answer.seen.call for answer in rest[:3]}) <= 2
    assert [first, second, third, second, third] == [answer.seen.row for answer in rest]


# -- one gRPC stream --------------------------------------------------------------------------------------------------


async def test_a_failing_request_leaves_the_stream_open(target: Target) -> None:
    one, other = neighbours("direct", 2)
    async with Stream(target, "direct") as stream:
        stream.send(
            Step(one, 1, start=True, request_id="first"),
            Step(other, 1, request_id="no start"),
            Step(one, 2, request_id="second"),
            Step(0, 1, request_id="no id"),
            Step(one, 3, end=True, request_id="last"),
        )
        first = await stream.receive()
        with refused(Code.INVALID_ARG, START_NEEDED.format(other, "direct")):
            await stream.receive()
        second = await stream.receive()
        with refused(Code.INVALID_ARG, "", "non-zero or non-empty correlation ID"):
            await stream.receive()
        last = await stream.receive()

    assert ["first", "second", "last"] == [answer.request_id for answer in (first, second, last)]
    assert [1, 3, 6] == [answer.total for answer in (first, second, last)]


# -- what only the mesh has -------------------------------------------------------------------------------------------


@pytest.mark.mesh_only("Triton's python backend has no implicit state")
async def test_declared_state_goes_in_and_comes_out(caller: Caller) -> None:
    caller, identity = caller.of("stated"), fresh_id()

    answers = [await caller(identity, 1, start=step == 0, end=step == 2) for step in range(3)]

    assert [0, 1, 2] == [answer.seen.mine.value("COUNT_IN") for answer in answers]
    assert ["", "+", "++"] == [answer.seen.mine.value("TEXT_IN") for answer in answers]


async def test_two_executors_serve_as_many_sequences_as_both_have_slots(wide_target: Target) -> None:
    ids = neighbours("rows", 8)
    async with Caller("grpc", wide_target, "rows") as caller:
        places = [(await caller(identity, 1, start=True)).seen for identity in ids]
        ends = [await caller(identity, 1, end=True) for identity in ids]

    assert [2] * 8 == [answer.total for answer in ends]
    assert 8 == len({(seen.instance, seen.row) for seen in places} if not wide_target.is_mesh else set(ids))
