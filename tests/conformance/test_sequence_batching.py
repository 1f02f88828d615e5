"""Which steps share a batch, and where: delays, sizes, shapes, instances, passes (triton-spec 1.1, 1.4, 1.5, 1.9-1.12).

No test here waits for a delay: the delays are longer than a test, so that only enough steps make a batch.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from shared.contract.errors import Code
from tests.conformance.calls import Answer, Caller, Gate, Step, Stream, fresh_id, neighbours, refused
from tests.conformance.conftest import MakeTarget
from tests.conformance.repository import MODELS, ModelText
from tests.conformance.targets import Target
from tests.mesh.running_mesh import PATIENCE_S


def ready(answer: Answer) -> list[bool]:
    """Which rows of an answer's batch were real."""
    return [bool(value) for value in answer.seen.values("READY")]


def lengths(answer: Answer) -> list[int]:
    """How long INPUT was in each row of an answer's batch."""
    return [row.tensors["INPUT"]["shape"][-1] for row in answer.seen.rows]


# -- delays and sizes -------------------------------------------------------------------------------------------------


async def test_direct_waits_until_enough_slots_are_ready(lone_caller: Caller) -> None:
    caller = lone_caller.of("utilised")
    ids = neighbours("utilised", 2)

    for start, end in ((True, False), (False, True)):
        answers = await asyncio.gather(*(caller(identity, 1, start=start, end=end) for identity in ids))

        assert 1 == len({answer.seen.call for answer in answers})
        assert [[True, True]] * 2 == [ready(answer) for answer in answers]


async def test_oldest_waits_for_a_preferred_size(lone_caller: Caller) -> None:
    caller = lone_caller.of("preferred")
    ids = neighbours("preferred", 2)

    for start, end in ((True, False), (False, True)):
        answers = await asyncio.gather(*(caller(identity, 1, start=start, end=end) for identity in ids))

        assert 1 == len({answer.seen.call for answer in answers})
        assert [2, 2] == [len(answer.seen.rows) for answer in answers]


# -- shapes -----------------------------------------------------------------------------------------------------------


async def test_direct_leaves_out_steps_of_other_shapes(target: Target, gate: Gate) -> None:
    model = "variable_direct"
    short, long, held = neighbours(model, 3)
    async with Stream(target, model) as stream:
        stream.send(*(Step(identity, 1, start=True) for identity in (short, long, held)))
        await stream.answers(3)
        stream.send(Step(held, 1, end=True, parameters=gate.parameters))
        await gate.entered()
        stream.send(Step(short, 1), Step(long, (1, 1)), Step(short, 1, end=True), Step(long, (1, 1), end=True))
        gate.open()
        await stream.receive()
        answers = await stream.answers(4)

    for answer in answers:
        wanted = lengths(answer)[answer.seen.row]
        assert {wanted} == set(lengths(answer)), "null rows are shaped like the others"
    longs = [answer for answer in answers if lengths(answer)[0] == 2]
    assert [1, 1] == [answer.seen.row for answer in longs]
    assert [[False, True]] * 2 == [ready(answer) for answer in longs]
    assert 4 == len({answer.seen.call for answer in answers})


async def test_oldest_closes_a_batch_at_another_shape(target: Target, gate: Gate) -> None:
    model = "variable_oldest"
    ids = neighbours(model, 4)
    values: list[int | tuple[int, ...]] = [1, 1, (1, 1), 1]
    async with Stream(target, model) as stream:
        stream.send(Step(ids[0], 1, start=True, parameters=gate.parameters))
        await gate.entered()
        stream.send(*(Step(identity, 1, start=True) for identity in ids[1:]))
        gate.open()
        await stream.answers(4)
        stream.send(*(Step(identity, value, end=True) for identity, value in zip(ids, values, strict=True)))
        answers = await stream.answers(4)

    assert all(len(set(lengths(answer))) == 1 for answer in answers)
    calls = [answer.seen.call for answer in answers]
    assert calls == sorted(calls)
    assert calls[1] < calls[2] < calls[3], "the longer one runs alone, in its turn"


# -- instances --------------------------------------------------------------------------------------------------------


async def test_instances_fill_evenly_and_low_slots_first(lone_caller: Caller) -> None:
    caller = lone_caller.of("twins")
    ids = neighbours("twins", 4)

    places = [(await caller(identity, 1, start=True)).seen for identity in ids]
    ends = [await caller(identity, 1, end=True) for identity in ids]

    assert [0, 0, 1, 1] == [seen.row for seen in places]
    assert [2, 2] == sorted(Counter(seen.instance for seen in places).values())
    assert [(seen.instance, seen.row) for seen in places] == [(end.seen.instance, end.seen.row) for end in ends]


# -- iterative sequences ----------------------------------------------------------------------------------------------


def passes(answer: Answer) -> list[dict[str, int]]:
    """What the iterative model saw of the request, each time."""
    return json.loads(answer.outputs["SEEN"].item())


async def test_a_request_is_given_to_an_iterative_model_until_it_answers(caller: Caller) -> None:
    answer = await caller.of("iterative").infer(Step(value=3, request_id="whole"))

    assert 3 == answer.total
    assert [(1, 1), (0, 0), (0, 0)] == [(seen["flags"], seen["start"]) for seen in passes(answer)]
    assert 1 == len({seen["id"] for seen in passes(answer)})
    assert passes(answer)[0]["id"] != 0
    assert "whole" == answer.request_id


async def test_many_iterative_requests_go_side_by_side(caller: Caller) -> None:
    """More than there are slots: each keeps an id of its own, and none waits for ever."""
    wanted = [1, 2, 3, 4, 5, 6, 7, 8, 40, 1]

    answers = await asyncio.gather(*(caller.of("iterative").infer(Step(value=value)) for value in wanted))

    assert wanted == [answer.total for answer in answers]
    assert len(wanted) == len({passes(answer)[0]["id"] for answer in answers})


async def test_an_iterative_model_fails_one_request_and_serves_the_next(caller: Caller) -> None:
    with refused(Code.INTERNAL, "", "less than never"):
        await caller.of("iterative").infer(Step(value=-1))

    assert 2 == (await caller.of("iterative").infer(Step(value=2))).total


async def test_an_iterative_request_that_names_its_sequence_is_the_whole_of_it(caller: Caller) -> None:
    caller, identity = caller.of("iterative"), fresh_id()

    first = await caller(identity, 2, start=True)
    with refused(Code.INVALID_ARG, f"inference request for sequence {identity} to model 'iterative' must specify"):
        await caller(identity, 2)
    second = await caller(identity, 3, start=True)

    assert [1, 0] == [seen["flags"] for seen in passes(first)]
    assert [1, 0, 0] == [seen["flags"] for seen in passes(second)]
    assert {identity} == {seen["id"] for seen in [*passes(first), *passes(second)]}


async def test_callers_who_leave_free_the_slots_of_requests_without_an_end(lone_caller: Caller) -> None:
    caller = lone_caller.of("iterative")
    endless = [caller.begin(Step(value=1 << 30)) for _ in range(4)]
    waiting = caller.begin(Step(value=1))
    while waiting in (await asyncio.wait([waiting], timeout=0.3))[0]:
        waiting = caller.begin(Step(value=1))

    for request in endless:
        request.cancel()

    async with asyncio.timeout(PATIENCE_S):
        assert 1 == (await waiting).total


@pytest.mark.mesh_only("2.51 forgets the id at END, cannot schedule the request again, and never answers it")
async def test_an_iterative_request_may_say_end(caller: Caller) -> None:
    answer = await caller.of("iterative")(fresh_id(), 3, start=True, end=True)

    assert [3, 0, 0] == [seen["flags"] for seen in passes(answer)]


@pytest.mark.mesh_only("2.51's python backend logs the refusal and never answers the request")
async def test_a_model_that_is_not_iterative_cannot_want_a_request_again(make_target: MakeTarget) -> None:
    source = MODELS / "iterative"
    config = (source / "config.pbtxt").read_text().replace("iterative_sequence: true", "")
    target = make_target([ModelText("refused", without_name(config), {"1/model.py": model_source(source)})])

    async with Caller("http", target, "refused") as caller:
        with refused(
            Code.INVALID_ARG,
            "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to "
            "handle such a flag.",
        ):
            await caller(fresh_id(), 2, start=True)


def without_name(config: str) -> str:
    return "\n".join(line for line in config.splitlines() if not line.startswith("name:"))


def model_source(model: Path) -> str:
    return (model / "1" / "model.py").read_text()


# -- debug variables --------------------------------------------------------------------------------------------------

HELD_OLDEST = "oldest { max_candidate_sequences: 6 preferred_batch_size: 3 max_queue_delay_microseconds: 100000000 }"


async def test_the_debug_variables_hold_back_the_first_batch(make_target: MakeTarget) -> None:
    """Direct: until its four slots and the backlog have what the variables say. Oldest: until four are ready, of which
    a batch takes three."""
    direct = without_name((MODELS / "variable_direct" / "config.pbtxt").read_text())
    # A Triton may or may not add the fourth to a batch of preferred size before it runs; so there is no room for it.
    oldest = direct.replace("direct { }", HELD_OLDEST).replace("max_batch_size: 4", "max_batch_size: 3")
    target = make_target(
        [ModelText("held_direct", direct), ModelText("held_again", direct), ModelText("held_oldest", oldest)],
        env={"TRITONSERVER_DELAY_SCHEDULER": "4", "TRITONSERVER_BACKLOG_DELAY_SCHEDULER": "2"},
    )

    ids = neighbours("held_direct", 6)
    async with Stream(target, "held_direct") as stream:
        stream.send(*(Step(identity, 1, start=True) for identity in ids[:4]))
        stream.send(*(Step(identity, 1, start=True, end=True) for identity in ids[4:]))
        first = await stream.answers(4)
        stream.send(*(Step(identity, 1, end=True) for identity in ids[:4]))
        rest = await stream.answers(6)

    assert [(1, row) for row in range(4)] == [(answer.seen.call, answer.seen.row) for answer in first]
    assert [[True] * 4] * 4 == [ready(answer) for answer in first]
    assert [1, 1, 2, 2, 2, 2] == [answer.total for answer in rest]

    # Two more runs under the id of a sequence that has its slot yet wait in the backlog too.
    ids = neighbours("held_again", 4)
    async with Stream(target, "held_again") as stream:
        stream.send(*(Step(identity, 1, start=True, end=identity == ids[0]) for identity in ids))
        stream.send(*(Step(ids[0], 1, start=True, end=True) for _ in range(2)))
        answers = await stream.answers(6)
        stream.send(*(Step(identity, 1, end=True) for identity in ids[1:]))
        await stream.answers(3)

    assert [(1, row) for row in range(4)] == sorted((answer.seen.call, answer.seen.row) for answer in answers)[:4]
    assert [2, 3] == sorted(answer.seen.call for answer in answers)[4:]

    ids = neighbours("held_oldest", 6)
    async with Stream(target, "held_oldest") as stream:
        stream.send(*(Step(identity, 1, start=True) for identity in ids[:4]))
        first = await stream.answers(3)
        stream.send(*(Step(identity, 1, start=True) for identity in ids[4:]))
        second = await stream.answers(3)
        stream.send(*(Step(identity, 1, end=True) for identity in ids))
        await stream.answers(6)

    assert [(1, 3)] * 3 == [(answer.seen.call, len(answer.seen.rows)) for answer in first]
    assert [(2, 3)] * 3 == [(answer.seen.call, len(answer.seen.rows)) for answer in second]
