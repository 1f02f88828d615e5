"""Steps of decoupled models, while they are open."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from executor.core.actions import BatchMember, RunBatch
from executor.core.events import BatchDone, RowEnd, StepEnded
from executor.engine.base import NO_TIME, Answers, BatchResult, Row, RowResult
from executor.sequences.open_steps import OpenSteps
from executor.sequences.step_commits import FinishedBatch
from executor.workers.open_rows import Numbered
from shared.contract.ids import Epoch, ExecutorId, StepNumber
from shared.contract.messages import InboxCancelled, StepFlag
from shared.store.work_scripts import WorkHeld
from tests.executor.core.owner import SEQUENCE, Owner, step
from tests.executor.patience import PATIENCE_S


class Nobody:
    """Writes no answers."""

    async def run(self) -> None: ...

    async def write(self, steps: Sequence[tuple[BatchMember, Sequence[Numbered]]]) -> Sequence[WorkHeld]:
        return [WorkHeld.HELD] * len(steps)


async def test_a_cancellation_from_an_earlier_life_of_the_sequence_reaches_no_step_of_this_one() -> None:
    """Control messages may come again: behind a restart of Redis, say. Answers to a cancelled step go nowhere."""
    owner, steps = Owner(), open_steps()
    owner.take(step(1, flags=StepFlag.START, epoch=7))
    answers = answers_of(steps, begun(owner))

    steps.cancel(SEQUENCE, Epoch(5), 1)
    assert not answers.is_cancelled
    steps.cancel(SEQUENCE, Epoch(7), 1)
    assert answers.is_cancelled


async def test_a_step_has_one_row_over_all_passes_and_leaves_none_if_it_is_cancelled_between_two() -> None:
    """What stays would hold the request's inputs, and whoever ends the model would wait for it."""
    owner, steps = Owner(), open_steps()
    owner.take(step(1, flags=StepFlag.START))
    owner.take(step(2, flags=StepFlag.START))
    first = begun(owner)
    answers = answers_of(steps, first)
    owner.end(first, RowEnd.AGAIN)
    second = begun(owner)
    assert answers is answers_of(steps, second)
    owner.end(second, RowEnd.AGAIN)
    owner.take(InboxCancelled("9-9", SEQUENCE, Epoch(1), StepNumber(1)))

    assert answers is not answers_of(steps, begun(owner))
    assert 1 == len(cast("Any", steps)._rows)


async def test_a_step_ends_with_the_answer_of_its_last_pass() -> None:
    heard: asyncio.Queue[object] = asyncio.Queue()
    owner, steps = Owner(), open_steps(heard)
    running = asyncio.create_task(steps.run())
    owner.take(step(1, flags=StepFlag.START))
    for row in (RowResult((), again=True), RowResult(())):
        batch = begun(owner)
        answers_of(steps, batch)
        leave(steps, owner, batch, row)

    ended = await asyncio.wait_for(heard.get(), PATIENCE_S)

    assert isinstance(ended, StepEnded)
    assert (batch.members[0], RowEnd.DONE) == (ended.member, ended.end)
    running.cancel()


async def test_a_batch_from_an_earlier_life_of_the_sequence_ends_no_step_of_this_one() -> None:
    heard: asyncio.Queue[object] = asyncio.Queue()
    owner, steps = Owner(), open_steps(heard)
    running = asyncio.create_task(steps.run())
    lives: list[RunBatch] = []
    for epoch in (1, 3):
        owner.take(step(1, flags=StepFlag.START, epoch=epoch))
        steps.drop(SEQUENCE)
        lives.append(begun(owner))
        answers_of(steps, lives[-1])

    before, now = lives
    leave(steps, owner, before, RowResult(()))
    for _ in range(10):
        await asyncio.sleep(0)
    assert heard.empty()
    leave(steps, owner, now, RowResult(()))
    ended = await asyncio.wait_for(heard.get(), PATIENCE_S)

    assert isinstance(ended, StepEnded)
    assert now.members[0] is ended.member
    running.cancel()


def leave(steps: OpenSteps, owner: Owner, batch: RunBatch, row: RowResult) -> None:
    """A batch of one row has run."""
    ends = steps.ends([row])
    owner.take(BatchDone(batch, ends))
    steps.left(batch.members, ends, FinishedBatch(BatchResult([row], NO_TIME), 0, 0))


def open_steps(heard: asyncio.Queue[object] | None = None) -> OpenSteps:
    """heard: gets the events"""
    writer: Any = Nobody()
    events = heard or asyncio.Queue()

    def handle(event: object, _: object) -> None:
        events.put_nowait(event)

    return OpenSteps(version="1", executor=ExecutorId("a"), answer_bytes_max=1 << 20, writer=writer, handle=handle)


def begun(owner: Owner) -> RunBatch:
    batch = owner.begin()
    assert batch is not None
    return batch


def answers_of(steps: OpenSteps, batch: RunBatch) -> Answers:
    """Where the answers to the only row of a batch go."""
    (member,) = batch.members
    assert member is not None
    answers = steps.answering(member, Row(inputs={})).answers
    assert answers is not None
    return answers
