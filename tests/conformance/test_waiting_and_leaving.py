"""Sequences that wait for a slot or follow one another in it, and callers who leave (triton-spec 1.3, 1.7, 1.8).

The model `sole` has one slot: a sequence that holds it keeps all others waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from shared.contract.errors import Code
from shared.contract.ids import CorrelationId, sequence_id
from tests.conformance.calls import Answer, Caller, Gate, Step, Stream, fresh_id, refused
from tests.conformance.targets import Target
from tests.mesh.running_mesh import eventually

MODEL = "sole"
START_NEEDED = "inference request for sequence {} to model 'sole' must specify the START flag on the first request"
TIMED_OUT = "timeout of the corresponding sequence has been expired"
LEAVING = pytest.mark.parametrize(
    "caller",
    [pytest.param("http", marks=pytest.mark.mesh_only("2.51 does not see an HTTP connection close")), "grpc"],
    indirect=True,
)
TRITON_PAUSE_S = 2.0
"""A Triton does not tell what it has queued or noticed: it is given time instead."""


class Backstage:
    """What the server has accepted, and noticed, of a sequence; a mesh's Redis tells it."""

    def __init__(self, target: Target) -> None:
        self._mesh = target.mesh

    async def accepted(self, identity: CorrelationId, steps: int) -> None:
        """Returns when so many steps of a sequence have been accepted since it began to wait."""
        await self._until(lambda: self._field(identity, "nx") >= steps, f"{steps} steps of {identity} are accepted")

    async def gave_up(self, identity: CorrelationId) -> None:
        """Returns when a waiting sequence is gone."""
        await self._until(lambda: not self._record(identity), f"sequence {identity} is gone")

    async def told_the_owner(self, identity: CorrelationId, step: int) -> None:
        """Returns when the executor knows that a step's caller has left."""
        await self._until(lambda: self._field(identity, "ca") == step, f"the caller of step {step} has left")
        await self._until(lambda: not self._untold(), "the executor has heard of it")

    async def _until(self, condition: Any, what: str) -> None:
        if self._mesh is None:
            await asyncio.sleep(TRITON_PAUSE_S)
        else:
            await eventually(condition, what)

    def _record(self, identity: CorrelationId) -> dict[bytes, bytes]:
        assert self._mesh is not None
        return self._mesh.redis.hgetall(self._mesh.keys.sequence(sequence_id(MODEL, "", identity)).record)

    def _field(self, identity: CorrelationId, name: str) -> int:
        return int(self._record(identity).get(name.encode(), 0))

    def _untold(self) -> list[bytes]:
        assert self._mesh is not None
        inboxes = [
            inbox
            for shard in self._mesh.keys.shards
            for inbox in self._mesh.redis.keys(f"{self._mesh.keys.base(shard)}inbox:*")
        ]
        return [entry for inbox in inboxes for entry, fields in self._mesh.redis.xrange(inbox) if b"k" in fields]


@pytest.fixture
def backstage(target: Target) -> Backstage:
    return Backstage(target)


async def test_a_timeout_counts_while_the_sequence_waits_and_not_once_it_has_its_slot(caller: Caller) -> None:
    caller, holder, late = caller.of(MODEL), fresh_id(), fresh_id()
    await caller(holder, 1, start=True)

    with refused(Code.UNAVAILABLE, TIMED_OUT):
        await caller.infer(Step(late, start=True, timeout_us=200_000))
    with refused(Code.INVALID_ARG, START_NEEDED.format(late)):
        await caller(late, 1)
    answer = await caller.infer(Step(holder, 2, end=True, timeout_us=1))

    assert 3 == answer.total


async def test_the_least_patient_of_the_queued_requests_ends_the_waiting_sequence(
    lone_caller: Caller, target: Target
) -> None:
    caller, holder, late, patient = lone_caller.of(MODEL), fresh_id(), fresh_id(), fresh_id()
    await caller(holder, 1, start=True)
    async with Stream(target, MODEL) as stream:
        stream.send(Step(late, start=True), Step(late), Step(late, timeout_us=200_000))
        for _ in range(3):
            with refused(Code.UNAVAILABLE, TIMED_OUT):
                await stream.receive()
        waiting = caller.begin(Step(patient, 5, start=True, end=True, timeout_us=100_000_000))
        await caller(holder, 1, end=True)

        assert 5 == (await waiting).total
        stream.send(Step(late, 7, start=True, end=True))
        assert 7 == (await stream.receive()).total


@LEAVING
async def test_a_caller_who_leaves_takes_the_waiting_sequence_with_him(caller: Caller, backstage: Backstage) -> None:
    caller, holder, gone, patient = caller.of(MODEL), fresh_id(), fresh_id(), fresh_id()
    await caller(holder, 1, start=True)
    first = caller.begin(Step(gone, start=True))
    await backstage.accepted(gone, 1)
    second = caller.begin(Step(gone))
    await backstage.accepted(gone, 2)
    waiting = caller.begin(Step(patient, 5, start=True, end=True))
    await backstage.accepted(patient, 1)

    first.cancel()
    await backstage.gave_up(gone)
    await caller(holder, 1, end=True)

    with refused(Code.CANCELLED, ""):
        await second
    assert 5 == (await waiting).total
    with refused(Code.INVALID_ARG, START_NEEDED.format(gone)):
        await caller(gone, 1)


@LEAVING
async def test_a_caller_who_leaves_before_his_step_runs_takes_all_that_are_queued_with_him(
    caller: Caller, backstage: Backstage, gate: Gate
) -> None:
    caller, identity, patient = caller.of(MODEL), fresh_id(), fresh_id()
    running = caller.begin(Step(identity, 1, start=True, parameters=gate.parameters))
    await gate.entered()
    leaving = caller.begin(Step(identity, 2))
    await backstage.accepted(identity, 2)
    behind = caller.begin(Step(identity, 3))
    await backstage.accepted(identity, 3)
    waiting = caller.begin(Step(patient, 5, start=True, end=True))
    await backstage.accepted(patient, 1)

    leaving.cancel()
    await backstage.told_the_owner(identity, 2)
    gate.open()

    assert 1 == (await running).total
    with refused(Code.CANCELLED, ""):
        await behind
    assert 5 == (await waiting).total, "the slot is free"
    with refused(Code.INVALID_ARG, START_NEEDED.format(identity)):
        await caller(identity, 1)


async def test_a_step_that_runs_is_not_disturbed_by_its_caller_leaving(
    caller: Caller, backstage: Backstage, gate: Gate
) -> None:
    caller, identity = caller.of(MODEL), fresh_id()
    running = caller.begin(Step(identity, 1, start=True, parameters=gate.parameters))
    await gate.entered()

    running.cancel()
    await backstage.told_the_owner(identity, 1)
    gate.open()

    assert 3 == (await caller(identity, 2, end=True)).total


async def test_cancelling_a_stream_cancels_what_it_brought(
    lone_caller: Caller, target: Target, backstage: Backstage
) -> None:
    caller, holder, gone, patient = lone_caller.of(MODEL), fresh_id(), fresh_id(), fresh_id()
    await caller(holder, 1, start=True)
    with contextlib.suppress(ConnectionAbortedError):
        async with Stream(target, MODEL) as stream:
            stream.send(Step(gone, start=True), Step(gone))
            await backstage.accepted(gone, 2)
            raise ConnectionAbortedError("the stream is cancelled on leaving it so")
    await backstage.gave_up(gone)
    waiting = caller.begin(Step(patient, 5, start=True, end=True))
    await caller(holder, 1, end=True)

    assert 5 == (await waiting).total
    with refused(Code.INVALID_ARG, START_NEEDED.format(gone)):
        await caller(gone, 1)


async def test_who_waited_too_long_is_counted_as_rejected_and_who_left_as_canceled(
    lone_caller: Caller, target: Target, backstage: Backstage
) -> None:
    caller, holder, late, gone = lone_caller.of(MODEL), fresh_id(), fresh_id(), fresh_id()
    await caller(holder, 1, start=True)
    before = failures(target)

    with refused(Code.UNAVAILABLE, TIMED_OUT):
        await caller.infer(Step(late, start=True, timeout_us=200_000))
    first = caller.begin(Step(gone, start=True))
    await backstage.accepted(gone, 1)
    second = caller.begin(Step(gone))
    await backstage.accepted(gone, 2)
    second.cancel()
    await backstage.gave_up(gone)
    await caller(holder, 1, end=True)
    with refused(Code.CANCELLED, ""):
        await first

    assert {"REJECTED": 1, "CANCELED": 2} == {
        reason: count - before[reason] for reason, count in failures(target).items()
    }


def failures(target: Target) -> dict[str, int]:
    """Requests of the model that were rejected and canceled, by the metrics page."""
    lines = target.metrics_page().splitlines()
    mine = [line for line in lines if line.startswith("nv_inference_request_failure{") and f'"{MODEL}"' in line]
    return {
        reason: sum(int(float(line.rsplit(" ", 1)[1])) for line in mine if f'"{reason}"' in line)
        for reason in ("REJECTED", "CANCELED")
    }


async def test_a_connection_that_is_closed_between_steps_changes_nothing(target: Target) -> None:
    identity, totals = fresh_id(), list[int]()
    for step, protocol in enumerate(("http", "grpc", "http")):
        async with Caller(protocol, target, MODEL) as caller:
            totals.append((await caller(identity, 1 + step, start=step == 0, end=step == 2)).total)

    assert [1, 3, 6] == totals


# -- one after the other in the same slot -----------------------------------------------------------------------------


async def test_a_start_while_it_waits_is_queued_behind_what_waits(caller: Caller, backstage: Backstage) -> None:
    caller, holder, identity = caller.of(MODEL), fresh_id(), fresh_id()
    await caller(holder, 1, start=True)
    queued: list[asyncio.Task[Answer]] = []
    for step in (
        Step(identity, 1, start=True),
        Step(identity, 2),
        Step(identity, 10, start=True),
        Step(identity, 20, end=True),
    ):
        queued.append(caller.begin(step))
        await backstage.accepted(identity, len(queued))
    await caller(holder, 1, end=True)

    assert [1, 3, 10, 30] == [answer.total for answer in await asyncio.gather(*queued)]


async def test_a_sequence_is_over_when_its_end_is_accepted_and_its_id_free_for_the_next(
    caller: Caller, backstage: Backstage, gate: Gate
) -> None:
    """Also while the END has not run yet; the next sequence of the id waits for the slot."""
    caller, identity = caller.of(MODEL), fresh_id()
    await caller(identity, 1, start=True)
    running = caller.begin(Step(identity, 2, parameters=gate.parameters))
    await gate.entered()
    ending = caller.begin(Step(identity, 3, end=True))
    await backstage.accepted(identity, 3)

    with refused(Code.INVALID_ARG, START_NEEDED.format(identity)):
        await caller(identity, 4)
    anew = caller.begin(Step(identity, 5, start=True))
    await backstage.accepted(identity, 4)
    gate.open()

    assert [3, 6, 5] == [answer.total for answer in await asyncio.gather(running, ending, anew)]
    assert 11 == (await caller(identity, 6, end=True)).total


@pytest.mark.mesh_only("a START that fails keeps its slot there until the idle time is over")
async def test_a_start_that_fails_gives_its_slot_back(caller: Caller) -> None:
    caller, identity = caller.of(MODEL), fresh_id()

    with refused(Code.INTERNAL, "no luck"):
        await caller.infer(Step(identity, start=True, parameters={"fail": "no luck"}))

    assert 5 == (await caller(fresh_id(), 5, start=True, end=True)).total
    with refused(Code.INVALID_ARG, START_NEEDED.format(identity)):
        await caller(identity, 1)
    assert 7 == (await caller(identity, 7, start=True, end=True)).total


@pytest.mark.parametrize("identity", [(1 << 63) - 1, (1 << 63) + 5, (1 << 64) - 1, "\u00e9" * 64, "0", " "])
async def test_ids_are_numbers_of_64_bits_or_texts(caller: Caller, identity: CorrelationId) -> None:
    if caller.protocol == "grpc" and isinstance(identity, int) and identity >= 1 << 63:
        pytest.skip("tritonclient's gRPC library puts a number into int64_param")
    caller = caller.of(MODEL)

    answers = [await caller(identity, 1, start=True), await caller(identity, 2, end=True)]

    assert [1, 3] == [answer.total for answer in answers]
    assert identity == answers[0].seen.mine.correlation_id
