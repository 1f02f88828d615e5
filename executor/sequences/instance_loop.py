"""One engine's loop: it decides which steps run together, runs them, and hands over their commits.

Order of effects: run, then commit (checkpoint, step number and reply together), then forget. The next step of a
sequence may run while the commit of the step before is on its way. Commits go out in order, and if one is refused, the
whole sequence is dropped with its later commits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from executor.clock import monotonic_us
from executor.core.batching import Wait
from executor.core.recovery import closed, recovery_of
from executor.core.sequence_batches import Batch, SlotSteps, slot_steps
from executor.core.sequences import OwnedSequence, QueuedStep, SequenceTable, VoidCause
from executor.engine.base import BatchResult, RowError, RowResult
from executor.reporting.statistics import StatisticsRecorder
from executor.sequences.committer import CommitOwner, Committer
from executor.sequences.rows import RowMaker
from executor.sequences.step_commits import StepCommits
from executor.workers.first_batch import Backlog, FirstBatch
from executor.workers.worker import EngineWorker
from shared.contract.ids import ExecutorId, SlotIndex
from shared.contract.messages import StepFlag
from shared.contract.model_config import ModelConfig, Oldest
from shared.process import logs
from shared.statistics.tally import FailureReason
from shared.store.scripts import StepCommit
from shared.traces.tracing import SpanName, Tracing, entry_time_ns, takeover_traceparent


@dataclass(frozen=True, slots=True)
class Lane:
    """What every instance of a model version shares.

    owner        is told of the instance's commits
    first_batch  holds the first batches of all instances back together; None: each instance has its own
    answer_bytes_max  largest answer that Redis takes
    """

    owner: CommitOwner
    config: ModelConfig
    version: str
    executor: ExecutorId
    table: SequenceTable
    committer: Committer
    statistics: StatisticsRecorder
    tracing: Tracing
    first_batch: FirstBatch | None
    backlog: Backlog | None
    answer_bytes_max: int


class RunningStep(msgspec.Struct, frozen=True, eq=False):
    owned: OwnedSequence
    queued: QueuedStep


class InstanceLoop:
    """Runs one engine's batches."""

    def __init__(self, lane: Lane, worker: EngineWorker) -> None:
        config = lane.config
        assert config.sequence_batching is not None
        self.worker = worker
        self._lane = lane
        self._table = lane.table
        self._steps: SlotSteps[QueuedStep] = slot_steps(config.sequence_batching, config.max_batch_size)
        self._recovery = recovery_of(config)
        strategy = config.sequence_batching.strategy
        self._ordered = isinstance(strategy, Oldest) and strategy.preserve_ordering
        self._rows = RowMaker(config)
        self._commits = StepCommits(
            lane.statistics, lane.version, lane.executor, lane.answer_bytes_max, config.loss_remedy
        )
        self._answered = 0
        self._wake = asyncio.Event()
        self._stopping = False
        self._failure: Exception | None = None
        self._between_batches = asyncio.Event()
        self._between_batches.set()

    def offer(self, owned: OwnedSequence) -> None:
        """A sequence may have become ready. Steps that are not run are answered here, without the model; then the next
        step is the head, until one can run.
        """
        while (queued := owned.head) is not None:
            if owned.head_is_cancelled:
                self._answer_cancelled(owned)
            elif owned.void is not None and (owned.replays or StepFlag.START not in queued.step.flags):
                self._answer_void(owned, owned.void)
            elif (problem := self._rows.problem(queued)) is not None:
                self._answer_refused(queued, problem)
            else:
                self._make_ready(owned, queued)
                return

    def _make_ready(self, owned: OwnedSequence, queued: QueuedStep) -> None:
        now_us = monotonic_us()
        # A further pass of an iterative step waits since now, not since the request arrived.
        arrived_us = now_us if owned.passes else queued.queued_us
        if self._steps.offer(owned.slot, queued, arrived_us=arrived_us, now_us=now_us):
            self._wake.set()

    def cancel(self, owned: OwnedSequence) -> None:
        """A step's caller has gone. If the step is the head and is not running, it is answered now, and so are the
        steps after it.

        source  Triton looks at the heads of its slots' queues only (triton-spec 1.8)
        """
        if owned.head_is_cancelled:
            self.vacate(owned.slot)
            self.offer(owned)

    def vacate(self, slot: SlotIndex) -> None:
        """The sequence in that slot is gone: its ready step is withdrawn."""
        self._steps.withdraw(slot)

    def fail(self, failure: Exception) -> None:
        """This instance cannot go on: `run` raises the failure."""
        self._failure = failure
        self._wake.set()

    async def run(self) -> None:
        """Decides and runs, for ever."""
        await self._first_batch()
        was_busy = False
        while True:
            if self._failure is not None:
                raise self._failure
            decision = self._decide(was_busy=was_busy)
            if isinstance(decision, Wait):
                await self._sleep(decision)
                was_busy = False
                continue
            self._between_batches.clear()
            try:
                await self._run_batch(decision)
            finally:
                self._between_batches.set()
            # Computing waits here while too many commits are open.
            await self._lane.committer.room()
            was_busy = True

    async def _first_batch(self) -> None:
        shared = self._lane.first_batch
        if shared is not None:
            await shared.opened(lambda: self._table.queued, self._lane.backlog)
        else:
            await self.worker.first_batch.opened(lambda: len(self._steps))

    async def stop(self) -> None:
        """Lets the running batch end and starts no other."""
        self._stopping = True
        await self._between_batches.wait()

    def _decide(self, *, was_busy: bool) -> Batch[QueuedStep] | Wait:
        return Wait() if self._stopping else self._steps.decide(monotonic_us(), was_busy=was_busy)

    async def _sleep(self, wait: Wait) -> None:
        # No await lies between the decision and this line, so no wake-up is lost.
        self._wake.clear()
        if wait.until_us is None:
            await self._wake.wait()
            return
        timer = asyncio.get_running_loop().call_later(max(0, wait.until_us - monotonic_us()) / 1e6, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    async def _run_batch(self, batch: Batch[QueuedStep]) -> None:
        members = [self._begin(queued) if queued is not None else None for queued in batch]
        rows = [
            self._rows.of(member.queued, member.owned.slot, passes=member.owned.passes) if member else self._rows.null
            for member in members
        ]
        want_state = [
            member is not None and StepFlag.END not in member.queued.step.flags and self._recovery.is_due(member.owned)
            for member in members
        ]
        began_ns = time.time_ns()
        result = await self.worker.run(rows, want_state)
        ended_ns = time.time_ns()
        if self._ordered:
            # Answers leave in the order in which steps were queued (triton-spec 1.5). Within a batch they do by
            # themselves. The last batch's commits may still be on their way to other shards, so they are waited for.
            await self._lane.committer.final(self._answered)
        self._conclude(members, result, began_ns, ended_ns)

    def _begin(self, queued: QueuedStep) -> RunningStep:
        owned = self._table.get(queued.step.sequence)
        assert owned is not None and owned.head is queued, f"{queued.step.sequence}: not the sequence's head"
        self._steps.withdraw(owned.slot)
        self._table.begin(owned)
        return RunningStep(owned, queued)

    def _conclude(
        self, members: Sequence[RunningStep | None], result: BatchResult, began_ns: int, ended_ns: int
    ) -> None:
        concluded: list[OwnedSequence] = []
        answered: list[tuple[RunningStep, RowResult | RowError]] = []
        repeats = False
        for member, row in zip(members, result.rows, strict=True):
            # A null row, or a sequence that was dropped while the batch ran: its new owner runs the step again.
            if member is None or row is None or self._table.get(member.owned.sequence) is not member.owned:
                continue
            concluded.append(member.owned)
            if isinstance(row, RowResult) and row.again:
                repeats = True
                self._table.repeat(member.owned)
            elif self._settle(member, row):
                answered.append((member, row))
        # A batch that only replayed steps is not counted: they were counted when they were answered.
        if answered or repeats:
            self._commits.executed(result, batch_size=len(members), ended_ns=ended_ns)
        commits: list[StepCommit] = []
        for member, row in answered:
            counts = self._lane.statistics.answered(
                row,
                rows=1,
                arrived_ns=member.queued.message.arrived_ns,
                began_ns=began_ns,
                ended_ns=ended_ns,
                timings=result.timings,
            )
            commits.append(self._commit(member, row, counts))
            self._trace(member, began_ns, ended_ns, len(members))
        # Before the next steps are offered: an answer without the model is put at once, and must not come first.
        self._put(commits)
        for owned in concluded:
            self.offer(owned)

    def _settle(self, member: RunningStep, row: RowResult | RowError) -> bool:
        """Concludes a step. False if the step was committed before and ran again for its state alone, without an
        answer.
        """
        ok, owned = isinstance(row, RowResult), member.owned
        begins = StepFlag.START in member.queued.step.flags
        if owned.replays:
            if isinstance(row, RowError):
                logs.error("replayed step failed", sequence=owned.sequence, step=owned.next_step, cause=row.message)
            # The step succeeded the first time. If it fails now, later steps would build on another state than their
            # caller knows.
            self._table.conclude(owned, started=begins and ok, dropped=None if ok else VoidCause.LOST)
            return False
        lost = VoidCause.LOST if isinstance(row, RowError) and row.lost else None
        self._table.conclude(owned, failed_start=begins and not ok, started=begins and ok, dropped=lost)
        return True

    def _commit(self, member: RunningStep, row: RowResult | RowError, counts: bytes) -> StepCommit:
        owned, queued = member.owned, member.queued
        if isinstance(row, RowResult):
            change = self._recovery.succeeded(owned, queued)
        elif row.lost:
            change = closed(owned, queued)
        else:
            change = self._recovery.failed(owned, queued, saved=bool(row.model_state))
        if change.recoverable is False:
            logs.warning(
                "sequence not recoverable: its log is full",
                sequence=owned.sequence,
                step=queued.step.step,
                remedy=self._lane.config.loss_remedy,
            )
            counts = self._lane.statistics.with_full_log(counts)
        return self._commits.run(owned, queued, row, counts, change)

    def _put(self, commits: Sequence[StepCommit]) -> None:
        self._answered = self._lane.committer.put(self._lane.owner, commits)

    def _answer_refused(self, queued: QueuedStep, row: RowError) -> None:
        """Fails a step that the model cannot take, as if the model had failed it."""
        member = self._begin(queued)
        if self._settle(member, row):
            self._put([self._commit(member, row, self._commits.refused(queued, FailureReason.OTHER))])

    def _answer_void(self, owned: OwnedSequence, cause: VoidCause) -> None:
        queued = self._table.begin(owned)
        is_answered_now = not owned.replays
        entries = owned.closed() if is_answered_now else ()
        self._table.conclude(owned)
        if is_answered_now:
            self._put([self._commits.void(owned, queued, cause, entries)])

    def _answer_cancelled(self, owned: OwnedSequence) -> None:
        """Answers a cancelled or given-up step. The sequence has no state from here on, until a later START."""
        queued = self._table.begin(owned)
        entries = owned.closed()
        given_up = queued.step.given_up
        self._table.conclude(owned, dropped=VoidCause.LOST if given_up else VoidCause.CANCELLED)
        answer = self._commits.given_up if given_up else self._commits.cancelled
        self._put([answer(owned, queued, entries)])

    def _trace(self, member: RunningStep, began_ns: int, ended_ns: int, batch_size: int) -> None:
        """Records the step's spans up to here; the span `checkpoint` follows when its commit comes back."""
        step, parent = member.queued.step, member.queued.message.traceparent
        if not parent:
            return
        tracing = self._lane.tracing
        delivered_ns = entry_time_ns(step.entry)
        links: list[str] = []
        # The first step after a takeover links to the takeover and to the last span of the executor before.
        if member.owned.taken_over:
            links = [takeover_traceparent(step.sequence, step.epoch), member.owned.predecessor]
            member.owned.taken_over = False
        tracing.record(parent, SpanName.SCHEDULE, member.queued.message.arrived_ns, delivered_ns)
        tracing.record(parent, SpanName.QUEUE, delivered_ns, began_ns)
        tracing.record(
            parent, SpanName.COMPUTE, began_ns, ended_ns, links, batch_size=batch_size, slot=step.slot, step=step.step
        )
