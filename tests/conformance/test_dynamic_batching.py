"""Requests without a sequence: batches, priorities, queue policies, order of answers, batch strategies (triton-spec 3).

What is to share a batch, or to be ordered, gathers while a request before it is held in the model.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from shared.contract.errors import Code
from tests.conformance.calls import Answer, Caller, Gate, Step, Stream, refused
from tests.conformance.targets import Target
from tests.mesh.running_mesh import eventually


def pending(target: Target, model: str) -> int:
    """How many requests of a model wait to be run, as its metric says; -1 while it says nothing."""
    found = re.search(
        rf'^nv_inference_pending_request_count{{model="{model}".*}} (\S+)$', target.metrics_page(), re.MULTILINE
    )
    return int(float(found[1])) if found else -1


async def waiting(target: Target, model: str, count: int) -> None:
    """Returns when so many requests of a model wait."""
    await eventually(lambda: pending(target, model) == count, f"{count} requests of {model} wait")


async def held(stream: Stream, gate: Gate) -> None:
    """Sends a request that keeps the model's only instance busy until the gate is opened."""
    stream.send(Step(value=0, parameters=gate.parameters))
    await gate.entered()


def in_order_of_running(answers: list[Answer]) -> list[int]:
    """The requests' values, as the model ran them."""
    return [answer.seen.mine.value() for answer in sorted(answers, key=lambda answer: answer.seen.call)]


# -- batches ----------------------------------------------------------------------------------------------------------


async def test_what_waits_runs_together_up_to_the_largest_batch(target: Target, gate: Gate) -> None:
    async with Stream(target, "gathering") as stream:
        await held(stream, gate)
        stream.send(*(Step(value=value) for value in (1, 2, 3, 4, 5)))
        await waiting(target, "gathering", 5)
        gate.open()
        answers = (await stream.answers(6))[1:]

    assert [[1, 2, 3, 4]] * 4 + [[5]] == [answer.seen.values() for answer in answers]
    assert [1, 2, 3, 4, 5] == [answer.total for answer in answers]


async def test_a_batch_ends_where_shapes_differ(target: Target, gate: Gate) -> None:
    async with Stream(target, "gathering") as stream:
        await held(stream, gate)
        stream.send(Step(value=1), Step(value=2), Step(value=(3, 3)), Step(value=4))
        await waiting(target, "gathering", 4)
        gate.open()
        answers = (await stream.answers(5))[1:]

    assert [2, 2, 1, 1] == [len(answer.seen.rows) for answer in answers]


async def test_a_preferred_size_does_not_wait_and_what_is_less_does(target: Target) -> None:
    async with Stream(target, "pairs") as stream:
        stream.send(Step(value=1), Step(value=2))
        first = await stream.answers(2)
        stream.send(Step(value=3))
        await waiting(target, "pairs", 1)
        stream.send(Step(value=4))
        second = await stream.answers(2)

    assert [[1, 2]] * 2 + [[3, 4]] * 2 == [answer.seen.values() for answer in first + second]


async def test_what_gathers_behind_a_running_batch_leaves_nobody_to_wait(target: Target, gate: Gate) -> None:
    async with Stream(target, "pairs") as stream:
        stream.send(Step(value=0, parameters=gate.parameters), Step(value=0))
        await gate.entered()
        stream.send(*(Step(value=value) for value in (1, 2, 3)))
        await waiting(target, "pairs", 3)
        gate.open()
        answers = (await stream.answers(5))[2:]

    assert [[1, 2, 3]] * 3 == [answer.seen.values() for answer in answers]


async def test_without_a_delay_batches_have_the_preferred_size(target: Target, gate: Gate) -> None:
    async with Stream(target, "brisk") as stream:
        await held(stream, gate)
        stream.send(*(Step(value=value) for value in (1, 2, 3, 4, 5)))
        await waiting(target, "brisk", 5)
        gate.open()
        answers = (await stream.answers(6))[1:]

    assert [[1, 2]] * 2 + [[3, 4]] * 2 + [[5]] == [answer.seen.values() for answer in answers]


async def test_without_a_batcher_every_request_runs_alone(target: Target, gate: Gate) -> None:
    async with Stream(target, "stateless") as stream:
        await held(stream, gate)
        stream.send(*(Step(value=value) for value in (1, 2, 3)))
        gate.open()
        answers = await stream.answers(4)

    assert [[0], [1], [2], [3]] == [answer.seen.values() for answer in answers]


@pytest.mark.parametrize("model", ["stateless", "gathering"])
async def test_the_model_reads_sequence_parameters_that_mean_nothing_to_the_server(caller: Caller, model: str) -> None:
    caller = caller.of(model)
    borders = ((True, False), (True, True), (False, True))
    alone = await caller.infer(Step(value=2))
    named = await caller.infer(Step(71, 3))
    flagged = [await caller(f"{model}-71", 4, start=start, end=end) for start, end in borders]

    seen = [answer.seen.mine.document for answer in (alone, named, *flagged)]
    assert [0, 71, *[f"{model}-71"] * 3] == [row["correlation_id"] for row in seen]
    assert [0, 0, 1, 3, 2] == [row["flags"] for row in seen]


# -- priorities and policies ------------------------------------------------------------------------------------------


async def test_lower_levels_run_first_and_those_out_of_range_are_the_default(target: Target, gate: Gate) -> None:
    async with Stream(target, "ranked") as stream:
        await held(stream, gate)
        for value, priority in ((6, 3), (3, 2), (4, 0), (1, 1), (5, 9), (2, 1)):
            stream.send(Step(value=value, priority=priority))
        await waiting(target, "ranked", 6)
        gate.open()
        answers = (await stream.answers(7))[1:]

    assert [1, 2, 3, 4, 5, 6] == in_order_of_running(answers)


async def test_a_full_queue_refuses_by_name_of_the_request(target: Target, caller: Caller, gate: Gate) -> None:
    async with Stream(target, "bounded") as stream:
        await held(stream, gate)
        stream.send(Step(value=1), Step(value=2))
        await waiting(target, "bounded", 2)

        with refused(Code.UNAVAILABLE, "[request id: third] Exceeds maximum queue size"):
            await caller.of("bounded").infer(Step(value=3, request_id="third"))
        with refused(Code.UNAVAILABLE, "[request id: <id_unknown>] Exceeds maximum queue size"):
            await caller.of("bounded").infer(Step(value=3))
        gate.open()
        assert [0, 1, 2] == [answer.total for answer in await stream.answers(3)]


async def test_a_late_request_is_refused_while_the_model_is_busy(target: Target, caller: Caller, gate: Gate) -> None:
    async with Stream(target, "impatient") as stream:
        await held(stream, gate)

        with refused(Code.UNAVAILABLE, "Request timeout expired"):
            await caller.of("impatient").infer(Step(value=1, timeout_us=1000, request_id="late"))
        stream.send(Step(value=2, timeout_us=2_000_000_000))
        gate.open()
        assert [0, 2] == [answer.total for answer in await stream.answers(2)]


async def test_a_delayed_request_runs_after_its_levels_others_and_before_the_next_level(
    target: Target, gate: Gate
) -> None:
    async with Stream(target, "delaying") as stream:
        await held(stream, gate)
        stream.send(Step(value=3, priority=2), Step(value=2, priority=1, timeout_us=1), Step(value=1, priority=1))
        await waiting(target, "delaying", 3)
        gate.open()
        answers = (await stream.answers(4))[1:]

    assert [1, 2, 3] == in_order_of_running(answers)


# -- order of answers -------------------------------------------------------------------------------------------------


async def test_answers_leave_in_request_order_over_all_instances(wide_target: Target, tmp_path: Path) -> None:
    gates = [Gate(tmp_path) for _ in range(3)]
    done: list[int] = []

    async def infer(caller: Caller, value: int) -> None:
        done.append((await caller.infer(Step(value=value, parameters=gates[value].parameters))).total)

    async with Caller("grpc", wide_target, "ordered") as caller, asyncio.TaskGroup() as group:
        try:
            for value in (0, 1):
                group.create_task(infer(caller, value))
                await gates[value].entered()
            gates[1].open()
            group.create_task(infer(caller, 2))
            # One instance is held with 0: so the other is done with 1.
            await gates[2].entered()
            assert [] == done
        finally:
            for gate in reversed(gates):
                gate.open()

    assert [0, 1, 2] == done


# -- batch strategies -------------------------------------------------------------------------------------------------


@pytest.mark.mesh_only("Triton's batch strategies are C++ libraries")
async def test_a_batch_strategy_bounds_batches_by_volume(target: Target, gate: Gate) -> None:
    async with Stream(target, "volume") as stream:
        await held(stream, gate)
        stream.send(*(Step(value=(value, value, value)) for value in (1, 2, 3)))
        await waiting(target, "volume", 3)
        gate.open()
        answers = (await stream.answers(4))[1:]

    assert [[1, 2]] * 2 + [[3]] == [[row.flat("INPUT")[0] for row in answer.seen.rows] for answer in answers]
