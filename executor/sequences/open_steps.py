"""The steps of one model version whose last answers come behind their batches.

Every step of a decoupled model is one. A step of another model is one if its batch has ended without its answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from executor.core.actions import BatchMember
from executor.core.events import ExecutorEvent, OwnershipOver, RowEnd, StepEnded
from executor.core.state import OwnedPhase
from executor.engine.base import BatchResult, Row, RowError, RowResult
from executor.sequences.step_answers import AnswerWriter
from executor.sequences.step_commits import FinishedBatch
from executor.workers.answers import answer
from executor.workers.open_rows import Numbered, OpenRow, OpenRows
from shared.contract.ids import Epoch, ExecutorId, SequenceId
from shared.store.work_scripts import WorkHeld


class OpenSteps:
    """version           of the model
    answer_bytes_max  largest value that Redis takes
    writer            writes the answers of a decoupled model; None for another model
    handle            takes what happens to an open step (`executor.sequences.sequence_model.SequenceModel.handle`)
    """

    def __init__(
        self,
        *,
        version: str,
        executor: ExecutorId,
        answer_bytes_max: int,
        writer: AnswerWriter | None,
        handle: Callable[[ExecutorEvent, FinishedBatch | None], object],
    ) -> None:
        self._version = version
        self._executor = executor
        self._answer_bytes_max = answer_bytes_max
        self._writer = writer
        self._handle = handle
        self._rows: OpenRows[BatchMember] = OpenRows(
            partial(self._written, writer) if writer is not None else None, self._step_ended, looks=False
        )
        # The open step of each sequence, over all passes.
        self._by_sequence: dict[SequenceId, OpenRow[BatchMember]] = {}

    @property
    def decoupled(self) -> bool:
        return self._writer is not None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._rows.run(), name="open steps")
            if self._writer is not None:
                group.create_task(self._writer.run(), name="answers of open steps")

    async def quiet(self) -> None:
        """Returns when none is open, or has been for too long (`executor.workers.open_rows.FINISH_S`)."""
        await self._rows.quiet()

    def answering(self, member: BatchMember, row: Row) -> Row:
        """The row of a decoupled model, with where its answers go."""
        return msgspec.structs.replace(row, answers=self._opened(member))

    def _opened(self, member: BatchMember) -> OpenRow[BatchMember]:
        """The open step of a sequence, in a new pass."""
        step, sequence = member.queued.step, member.owned.sequence
        opened = self._by_sequence.get(sequence)
        if opened is None or opened.key.queued is not member.queued:
            # A step that was cancelled between two passes is not open any more.
            self.drop(sequence)
            encode = partial(
                answer,
                version=self._version,
                executor=self._executor,
                step=0 if member.queued.message.own_sequence else member.owned.number(step.step),
                bytes_max=self._answer_bytes_max,
                more=True,
            )
            opened = self._rows.open(member, encode if self.decoupled else None, muted=member.owned.replays)
            self._by_sequence[sequence] = opened
        # Another pass of the step: its state may have become due.
        opened.key = member
        if member.queued.step.step in member.owned.cancelled:
            opened.cancel()
        return opened

    def ends(self, rows: Sequence[RowResult | RowError | None]) -> list[RowEnd | None]:
        """What the end of a batch is to the steps of its rows. Those of a decoupled model stay open."""
        ends = [_end_of(row) for row in rows]
        if not self.decoupled:
            return ends
        return [end if end is None or end is RowEnd.AGAIN else RowEnd.OPEN for end in ends]

    def left(self, members: Iterable[BatchMember | None], ends: Sequence[RowEnd | None], batch: FinishedBatch) -> None:
        """A batch has run. Steps of it that have not ended do so when their last answers have come."""
        if self.decoupled:
            self._leave(members, batch)
        elif RowEnd.OPEN in ends:
            self._await_late(members, batch)

    def _leave(self, members: Iterable[BatchMember | None], batch: FinishedBatch) -> None:
        for member, row in zip(members, batch.result.rows, strict=True):
            opened = self._by_sequence.get(member.owned.sequence) if member is not None else None
            if opened is None or opened.key is not member or (isinstance(row, RowResult) and row.again):
                continue
            # A backend without response senders gives the only answer at once.
            only = None if isinstance(row, RowResult) and row.open else row
            self._rows.conclude(opened, batch, last=only)

    def _await_late(self, members: Iterable[BatchMember | None], batch: FinishedBatch) -> None:
        for member, row in zip(members, batch.result.rows, strict=True):
            if not isinstance(row, RowResult) or row.late is None:
                continue
            if member is not None and member.owned.phase is OwnedPhase.RUNNING:
                opened = self._opened(member)
                self._rows.conclude(opened, batch)
                row.late.give(opened)
            else:  # its sequence was dropped while the batch ran
                row.late.give_up()

    async def _written(
        self, writer: AnswerWriter, steps: Sequence[tuple[BatchMember, Sequence[Numbered]]]
    ) -> Sequence[WorkHeld]:
        outcomes = await writer.write(steps)
        for (member, _), held in zip(steps, outcomes, strict=True):
            if held is WorkHeld.GONE:
                # Its sequence has another owner, or is over.
                self._handle(OwnershipOver(member.owned.sequence, member.owned.epoch), None)
        return outcomes

    def _step_ended(self, opened: OpenRow[BatchMember]) -> None:
        """The step has its last answer, and all answers before it are written."""
        batch: FinishedBatch = opened.finished
        member, last = opened.key, opened.last
        if self._by_sequence.get(member.owned.sequence) is opened:
            del self._by_sequence[member.owned.sequence]
        end = _end_of(last)
        assert end is not None, "it has a last answer"
        result = BatchResult([last], batch.result.timings)
        finished = FinishedBatch(result, batch.began_ns, time.time_ns(), responses=opened.responses)
        self._handle(StepEnded(member, end), finished)

    def cancel(self, sequence: SequenceId, epoch: Epoch, step: int) -> None:
        """Nobody waits for the step's answers any more."""
        opened = self._by_sequence.get(sequence)
        if opened is not None and opened.key.owned.epoch == epoch and opened.key.queued.step.step == step:
            opened.cancel()

    def drop(self, sequence: SequenceId) -> None:
        """The sequence is not owned here any more: answers to its open step go nowhere."""
        if (opened := self._by_sequence.pop(sequence, None)) is not None:
            self._rows.drop(opened)


def _end_of(row: RowResult | RowError | None) -> RowEnd | None:
    match row:
        case RowResult():
            return RowEnd.AGAIN if row.again else RowEnd.OPEN if row.open else RowEnd.DONE
        case RowError():
            return RowEnd.LOST if row.lost else RowEnd.SAVED if row.model_state else RowEnd.FAILED
        case None:
            return None
