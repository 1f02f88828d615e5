"""Makes commits from answers: reply, checkpoint, counts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from executor.core.actions import Commit, HowAnswered, StepAnswer
from executor.core.state import QueuedStep, VoidCause
from executor.engine.base import BatchResult, RowError, RowResult
from executor.reporting.statistics import StatisticsRecorder, together
from executor.sequences.checkpoints import begins_anew, checkpoint_fields
from executor.sequences.rows import RowMaker
from executor.sequences.written_states import WrittenStates
from executor.workers.answers import answer, cancelled_answer, given_up_answer, void_answer
from shared.contract.ids import ExecutorId
from shared.contract.messages import START, StepFlag
from shared.contract.model_config import ModelConfig
from shared.process import logs
from shared.statistics.tally import FailureReason, Response
from shared.store.script_values import StepCommit, StepOutcome


@dataclass(frozen=True, slots=True)
class FinishedBatch:
    """A batch that has run. Times are wall clock, ns.

    gained  rows that it gained by waiting for them; None if it did not wait
    responses  of a decoupled model: the answers to its only row
    """

    result: BatchResult
    began_ns: int
    ended_ns: int
    gained: int | None = None
    responses: Sequence[Response] = ()


class StepCommits:
    """Makes the commits of one instance's steps.

    A batch's own counts go with the first step that it answers. A batch of an iterative model may answer no step,
    because all requests want another pass; its counts then go with the next batch that answers one.
    """

    def __init__(
        self,
        statistics: StatisticsRecorder,
        config: ModelConfig,
        rows: RowMaker,
        version: str,
        executor: ExecutorId,
        answer_bytes_max: int,
    ) -> None:
        self._statistics = statistics
        self._config = config
        self._rows = rows
        self._version = version
        self._executor = executor
        self._answer_bytes_max = answer_bytes_max
        self._executed = b""
        self.written = WrittenStates(config.states)

    def of(self, commit: Commit, batch: FinishedBatch | None) -> list[StepCommit]:
        """The commits of answered steps. batch: which the model ran, if it ran any of them"""
        if commit.batch and batch is not None:
            self._count(batch)
        return [
            self._ran(given, batch) if given.how is HowAnswered.RAN and batch is not None else self._not_run(given)
            for given in commit.answers
        ]

    def _count(self, batch: FinishedBatch) -> None:
        """Counts one run of the model, null rows included."""
        rows = batch.result.rows
        counts = self._statistics.execution(
            batch_size=len(rows),
            timings=batch.result.timings,
            ended_ns=batch.ended_ns,
            null_rows=rows.count(None),
            gained=batch.gained,
        )
        self._executed = together(self._executed, counts)

    def _ran(self, given: StepAnswer, batch: FinishedBatch) -> StepCommit:
        row = batch.result.rows[given.row]
        assert row is not None, "a null row has no answer"
        counts = self._statistics.answered(
            row,
            rows=1,
            arrived_ns=given.queued.message.arrived_ns,
            began_ns=batch.began_ns,
            ended_ns=batch.ended_ns,
            timings=batch.result.timings,
            responses=batch.responses,
        )
        if given.change.recoverable is False:
            step = given.queued.step
            remedy = self._config.loss_remedy
            logs.warning(
                "sequence not recoverable: its log is full", sequence=step.sequence, step=step.step, remedy=remedy
            )
            counts = self._statistics.with_full_log(counts)
        return self._answered(given, row, counts)

    def _answered(self, given: StepAnswer, row: RowResult | RowError, counts: bytes) -> StepCommit:
        message = given.queued.message
        reply = answer(
            row,
            version=self._version,
            executor=self._executor,
            # A request that is a sequence of its own has no step number for its caller.
            step=0 if message.own_sequence else given.number,
            bytes_max=self._answer_bytes_max,
        )
        if isinstance(row, RowResult):
            outcome = StepOutcome.DONE
        else:
            outcome = StepOutcome.LOST if row.lost else StepOutcome.FAILED
        execution, self._executed = self._executed, b""
        return self._commit(given, outcome, reply, counts, row, execution)

    def _not_run(self, given: StepAnswer) -> StepCommit:
        """The commit of a step that was answered without the model."""
        queued, sequence = given.queued, given.queued.step.sequence
        version, executor, last_step = self._version, self._executor, max(0, given.number - 1)
        match given.how:
            case HowAnswered.GIVEN_UP:
                outcome, reason = StepOutcome.GIVEN_UP, FailureReason.BACKEND
                reply = given_up_answer(sequence, version=version, executor=executor, last_step=last_step)
            case HowAnswered.CANCELLED:
                outcome, reason = StepOutcome.CANCELLED, FailureReason.CANCELED
                reply = cancelled_answer(version=version, executor=executor, last_step=last_step)
            case HowAnswered.VOID:
                cause, remedy = given.cause or VoidCause.LOST, self._config.loss_remedy
                # If this executor found that the state is lost, the record must say so, for the next owner.
                outcome = StepOutcome.LOST if cause is VoidCause.LOST else StepOutcome.VOID
                reason = FailureReason.CANCELED if cause is VoidCause.CANCELLED else FailureReason.OTHER
                reply = void_answer(
                    cause, sequence, version=version, executor=executor, last_step=last_step, loss_remedy=remedy
                )
            case HowAnswered.REFUSED | HowAnswered.RAN:
                problem = self._rows.problem(queued.step, queued.message)
                assert problem is not None, f"{sequence}: nothing is wrong with step {queued.step.step}"
                return self._answered(given, problem, self._refused(queued, FailureReason.OTHER))
        counts = self._refused(queued, reason)
        return self._commit(given, outcome, reply, counts)

    def _refused(self, queued: QueuedStep, reason: FailureReason) -> bytes:
        return self._statistics.refused(reason, arrived_ns=queued.message.arrived_ns, now_ns=time.time_ns())

    def _commit(
        self,
        given: StepAnswer,
        outcome: StepOutcome,
        reply: bytes,
        counts: bytes,
        row: RowResult | RowError | None = None,
        execution: bytes = b"",
    ) -> StepCommit:
        """row: what the model made of the step, if it was asked"""
        step, message, change = given.queued.step, given.queued.message, given.change
        if step.flags & START:
            self.written.forget(step.sequence)
        if isinstance(row, RowResult):
            row = self.written.cut(step.sequence, row)
        return StepCommit(
            sequence=step.sequence,
            epoch=step.epoch,
            step=step.step,
            flags=step.flags | StepFlag.STREAMED if self._config.decoupled else step.flags,
            outcome=outcome,
            gateway=step.gateway,
            token=step.token,
            reply=reply,
            keep_reply=message.keep_reply,
            entries=change.entries,
            base=change.base,
            recoverable=change.recoverable,
            checkpoint=checkpoint_fields(row, message.traceparent) if row is not None else (),
            anew=row is not None and begins_anew(row),
            entry=step.entry,
            traceparent=message.traceparent if row is not None else "",
            counts=counts,
            execution=execution,
        )
