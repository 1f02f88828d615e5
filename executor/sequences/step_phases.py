"""How long the phases of steps took, for the statistics of the model and for traces."""

from __future__ import annotations

from collections.abc import Sequence

from executor.core.actions import StepAnswer
from executor.reporting.request_meter import RequestMeter
from executor.sequences.step_commits import FinishedBatch
from shared.store.script_values import CommitCode, StepCommit
from shared.traces.context import takeover_traceparent
from shared.traces.spans import SpanName
from shared.traces.tracing import Tracing, entry_time_ns


class StepPhases:
    """Of the steps of one model version."""

    def __init__(self, model: str, meter: RequestMeter, tracing: Tracing) -> None:
        self._model = model
        self._meter = meter
        self._tracing = tracing

    def ran(self, ran: Sequence[StepAnswer], finished: FinishedBatch) -> None:
        """Measures a batch's steps up to here, and records the spans of those that are traced. The checkpoint follows
        with their commits.
        """
        began_ns, ended_ns = finished.began_ns, finished.ended_ns
        self._meter.computed(len(ran), began_ns, ended_ns)
        for given in ran:
            message = given.queued.message
            delivered_ns = entry_time_ns(given.queued.step.entry, message.arrived_ns, began_ns)
            self._meter.ran(message.arrived_ns, delivered_ns, began_ns, ended_ns, message.traceparent)
        if traced := [given for given in ran if given.queued.message.traceparent]:
            self._trace(traced, finished)

    def _trace(self, ran: Sequence[StepAnswer], finished: FinishedBatch) -> None:
        batch = self._tracing.record_batch(
            [given.queued.message.traceparent for given in ran],
            finished.began_ns,
            finished.ended_ns,
            batch_size=len(finished.result.rows),
            model=self._model,
        )
        for given in ran:
            self._trace_step(given, finished, batch)

    def _trace_step(self, given: StepAnswer, finished: FinishedBatch, batch: str) -> None:
        step, message = given.queued.step, given.queued.message
        links = [batch]
        if given.predecessor is not None:
            links += [takeover_traceparent(step.sequence, step.epoch), given.predecessor]
        record, parent = self._tracing.record, message.traceparent
        delivered_ns = entry_time_ns(step.entry, message.arrived_ns, finished.began_ns)
        record(parent, SpanName.SCHEDULE, message.arrived_ns, delivered_ns)
        record(parent, SpanName.QUEUE, delivered_ns, finished.began_ns)
        record(
            parent,
            SpanName.COMPUTE,
            finished.began_ns,
            finished.ended_ns,
            links,
            batch_size=len(finished.result.rows),
            slot=step.slot,
            step=step.step,
        )

    def traced_commit(self, step: StepCommit, code: CommitCode, sent_ns: int, done_ns: int) -> None:
        self._tracing.record(step.traceparent, SpanName.CHECKPOINT, sent_ns, done_ns, outcome=code.name)
        if code is CommitCode.OVER:
            self._tracing.record_of_sequence(step.sequence, SpanName.END, sent_ns, done_ns, step=step.step)
