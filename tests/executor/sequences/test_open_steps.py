"""Steps of decoupled models, while they are open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from executor.core.actions import BatchMember
from executor.engine.base import Row
from executor.sequences.open_steps import OpenSteps
from executor.workers.open_rows import Numbered
from shared.contract.ids import Epoch, ExecutorId
from shared.contract.messages import StepFlag
from shared.store.work_scripts import WorkHeld
from tests.executor.core.owner import SEQUENCE, Owner, step


class Nobody:
    """Writes no answers, and hears of no end."""

    async def write(self, steps: Sequence[tuple[BatchMember, Sequence[Numbered]]]) -> Sequence[WorkHeld]:
        return [WorkHeld.HELD] * len(steps)

    def handle(self, *_: object) -> None: ...


async def test_a_cancellation_from_an_earlier_life_of_the_sequence_reaches_no_step_of_this_one() -> None:
    """Control messages may come again: behind a restart of Redis, say. Answers to a cancelled step go nowhere."""
    owner, nobody = Owner(), Nobody()
    owner.take(step(1, flags=StepFlag.START, epoch=7))
    batch = owner.begin()
    assert batch is not None
    (member,) = batch.members
    assert member is not None
    writer: Any = nobody
    steps = OpenSteps(
        version="1",
        executor=ExecutorId("a"),
        answer_bytes_max=1 << 20,
        writer=writer,
        handle=nobody.handle,
    )
    answers = steps.answering(member, Row(inputs={})).answers
    assert answers is not None

    steps.cancel(SEQUENCE, Epoch(5), 1)
    assert not answers.is_cancelled
    steps.cancel(SEQUENCE, Epoch(7), 1)
    assert answers.is_cancelled
