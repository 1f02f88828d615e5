"""Makes a commit from a step and its result: reply, checkpoint, counts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from executor.core.recovery import Change
from executor.core.sequences import OwnedSequence, QueuedStep, VoidCause
from executor.engine.base import BatchResult, RowError, RowResult
from executor.reporting.statistics import StatisticsRecorder
from executor.sequences.checkpoints import checkpoint_fields
from executor.workers.answers import answer, cancelled_answer, given_up_answer, void_answer
from shared.contract.ids import ExecutorId, StepNumber
from shared.contract.tensors import Tensor
from shared.statistics.tally import FailureReason, added, packed, unpacked
from shared.store.scripts import StepCommit, StepOutcome


class StepCommits:
    """Makes the commits of one instance's steps.

    A batch's own counts go with the first step that it answers. A batch of an iterative model may answer no step,
    because all requests want another pass; its counts then go with the next batch that answers one.
    """

    def __init__(
        self,
        statistics: StatisticsRecorder,
        version: str,
        executor: ExecutorId,
        answer_bytes_max: int,
        loss_remedy: str,
    ) -> None:
        """loss_remedy: advice in the answer when a state is lost"""
        self._statistics = statistics
        self._version = version
        self._executor = executor
        self._answer_bytes_max = answer_bytes_max
        self._loss_remedy = loss_remedy
        self._executed = b""

    def executed(self, result: BatchResult, *, batch_size: int, ended_ns: int) -> None:
        """Counts one run of the model. batch_size: with null rows"""
        counts = self._statistics.execution(batch_size=batch_size, timings=result.timings, ended_ns=ended_ns)
        left = self._executed
        self._executed = packed(added((unpacked(left), unpacked(counts)))) if left else counts

    def run(
        self,
        owned: OwnedSequence,
        queued: QueuedStep,
        row: RowResult | RowError,
        counts: bytes,
        change: Change,
    ) -> StepCommit:
        """The commit of a step that the model ran, or could not take."""
        # A request that is a sequence of its own has no step number for its caller.
        counted = owned.start_step and not queued.message.own_sequence
        since_start = queued.step.step - owned.start_step + 1 if counted else 0
        execution, self._executed = self._executed, b""
        return _commit(
            queued,
            _outcome(row),
            answer(
                row,
                version=self._version,
                executor=self._executor,
                step=since_start,
                bytes_max=self._answer_bytes_max,
            ),
            entries=change.entries,
            base=change.base,
            recoverable=change.recoverable,
            checkpoint=_checkpoint(row, queued.message.traceparent),
            traceparent=queued.message.traceparent,
            counts=counts,
            execution=execution,
        )

    def void(self, owned: OwnedSequence, queued: QueuedStep, cause: VoidCause, entries: Sequence[str]) -> StepCommit:
        """The commit of a step that was not run, because its sequence has no state."""
        reply = void_answer(
            cause,
            queued.step.sequence,
            version=self._version,
            executor=self._executor,
            last_step=_last_step(owned, queued),
            loss_remedy=self._loss_remedy,
        )
        reason = FailureReason.CANCELED if cause is VoidCause.CANCELLED else FailureReason.OTHER
        # If this executor found that the state is lost, the record must say so, for the next owner.
        outcome = StepOutcome.LOST if cause is VoidCause.LOST else StepOutcome.VOID
        return _commit(queued, outcome, reply, entries=entries, counts=self.refused(queued, reason))

    def cancelled(self, owned: OwnedSequence, queued: QueuedStep, entries: Sequence[str]) -> StepCommit:
        """The commit of a step that was not run, because its caller has gone."""
        last_step = _last_step(owned, queued)
        reply = cancelled_answer(version=self._version, executor=self._executor, last_step=last_step)
        counts = self.refused(queued, FailureReason.CANCELED)
        return _commit(queued, StepOutcome.CANCELLED, reply, entries=entries, counts=counts)

    def given_up(self, owned: OwnedSequence, queued: QueuedStep, entries: Sequence[str]) -> StepCommit:
        """The commit of a step that was not run, because it is likely to kill its executor."""
        reply = given_up_answer(
            queued.step.sequence,
            version=self._version,
            executor=self._executor,
            last_step=_last_step(owned, queued),
        )
        counts = self.refused(queued, FailureReason.BACKEND)
        return _commit(queued, StepOutcome.GIVEN_UP, reply, entries=entries, counts=counts)

    def refused(self, queued: QueuedStep, reason: FailureReason) -> bytes:
        """The counts of a step that is answered without the model."""
        return self._statistics.refused(reason, arrived_ns=queued.message.arrived_ns, now_ns=time.time_ns())


def _last_step(owned: OwnedSequence, queued: QueuedStep) -> int:
    """The number of the step before this one, counted since its START; 0 if the START is unknown."""
    return queued.step.step - owned.start_step if owned.start_step else 0


def _outcome(row: RowResult | RowError) -> StepOutcome:
    if isinstance(row, RowResult):
        return StepOutcome.DONE
    return StepOutcome.LOST if row.lost else StepOutcome.FAILED


def _checkpoint(row: RowResult | RowError, traceparent: str) -> Sequence[tuple[str, bytes]]:
    states: Mapping[str, Tensor] = row.states if isinstance(row, RowResult) else {}
    return checkpoint_fields(states, row.model_state, traceparent)


def _commit(
    queued: QueuedStep,
    outcome: StepOutcome,
    reply: bytes,
    *,
    entries: Sequence[str],
    counts: bytes,
    base: StepNumber | None = None,
    recoverable: bool | None = None,
    checkpoint: Sequence[tuple[str, bytes]] = (),
    traceparent: str = "",
    execution: bytes = b"",
) -> StepCommit:
    step, message = queued.step, queued.message
    return StepCommit(
        sequence=step.sequence,
        epoch=step.epoch,
        step=step.step,
        flags=step.flags,
        outcome=outcome,
        gateway=step.gateway,
        token=step.token,
        reply=reply,
        keep_reply=message.keep_reply,
        entries=entries,
        base=base,
        recoverable=recoverable,
        checkpoint=checkpoint,
        traceparent=traceparent,
        counts=counts,
        execution=execution,
    )
