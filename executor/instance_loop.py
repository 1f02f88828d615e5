"""One engine's loop: decide which steps run together, run them, and hand their commits on.

Order of effects: run, then commit (checkpoint, step number and reply in one), then forget. The next step of a sequence
may run while the commit of the last one is on its way: commits go out in order, and one that is refused takes the whole
sequence with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from executor.answers import answer, cancelled_answer, void_answer
from executor.checkpoints import checkpoint_fields
from executor.clock import monotonic_us
from executor.committer import CommitOwner, Committer
from executor.core.batching import Wait
from executor.core.controls import ControlTensors
from executor.core.sequence_batches import Batch, SlotSteps, slot_steps
from executor.core.sequences import OwnedSequence, QueuedStep, SequenceTable, VoidCause
from executor.engine.base import BatchResult, Row, RowError, RowResult
from executor.first_batch import Backlog, FirstBatch
from executor.statistics import ModelStatistics
from executor.worker import EngineWorker
from shared.ids import ExecutorId, SlotIndex
from shared.messages import StepFlag
from shared.model_config.values import ModelConfig
from shared.scripts import Outcome, StepCommit
from shared.tally import Reason
from shared.tracing import SpanName, Tracing, entry_time_ns, takeover_traceparent


@dataclass(frozen=True, slots=True)
class Lane:
    """What every instance of a model version shares.

    owner        who is told of its commits
    first_batch  holds all instances' first batches back together; None: each instance has its own gate
    """

    owner: CommitOwner
    config: ModelConfig
    version: str
    executor: ExecutorId
    table: SequenceTable
    committer: Committer
    statistics: ModelStatistics
    tracing: Tracing
    first_batch: FirstBatch | None
    backlog: Backlog | None


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A step in a running batch. due: a checkpoint goes with its commit."""

    owned: OwnedSequence
    queued: QueuedStep
    due: bool


class InstanceLoop:
    """One engine's batches: ready steps by slot, decide, run, conclude."""

    def __init__(self, lane: Lane, worker: EngineWorker) -> None:
        config = lane.config
        assert config.sequence_batching is not None
        self.worker = worker
        self._lane = lane
        self._table = lane.table
        self._steps: SlotSteps[QueuedStep] = slot_steps(config.sequence_batching, config.max_batch_size)
        self._interval = config.checkpoint_interval
        self._durable = config.state_in_mesh
        self._controls = ControlTensors(config)
        self._wake = asyncio.Event()
        self._stopping = False
        self._between_batches = asyncio.Event()
        self._between_batches.set()

    def offer(self, owned: OwnedSequence) -> None:
        """A sequence may have become ready. Steps of a sequence without state are answered here, without the model."""
        while (queued := owned.head) is not None:
            if owned.head_is_cancelled:
                self._answer_cancelled(owned)
                continue
            if owned.void is None or StepFlag.START in queued.step.flags:
                now_us = monotonic_us()
                arrived_us = now_us if owned.passes else queued.queued_us
                if self._steps.offer(owned.slot, queued, arrived_us=arrived_us, now_us=now_us):
                    self._wake.set()
                return
            self._answer_void(owned)

    def cancel(self, owned: OwnedSequence) -> None:
        """A step's caller has gone: if it is the head and does not run yet, it is answered, and all behind it are.

        source  Triton looks at the heads of its slots' queues only (triton-spec 1.8)
        """
        if owned.head_is_cancelled:
            self.vacate(owned.slot)
            self.offer(owned)

    def vacate(self, slot: SlotIndex) -> None:
        """Whoever had a ready step in that slot is gone."""
        self._steps.withdraw(slot)

    async def run(self) -> None:
        """Decides and runs, for ever."""
        await self._first_batch()
        while True:
            decision = self._decide()
            if isinstance(decision, Wait):
                await self._sleep(decision)
                continue
            self._between_batches.clear()
            try:
                await self._run_batch(decision)
            finally:
                self._between_batches.set()
            await self._lane.committer.room()

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

    def _decide(self) -> Batch[QueuedStep] | Wait:
        return Wait() if self._stopping else self._steps.decide(monotonic_us())

    async def _sleep(self, wait: Wait) -> None:
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
        rows = [self._row(member) for member in members]
        want_state = [
            member is not None and member.due and self._durable and StepFlag.END not in member.queued.step.flags
            for member in members
        ]
        began_ns = time.time_ns()
        result = await self.worker.run(rows, want_state)
        self._conclude(members, result, began_ns, time.time_ns())

    def _begin(self, queued: QueuedStep) -> Member:
        owned = self._table.get(queued.step.sequence)
        assert owned is not None and owned.head is queued, f"{queued.step.sequence}: not the sequence's head"
        self._steps.withdraw(owned.slot)
        self._table.begin(owned)
        ends = StepFlag.END in queued.step.flags
        due = not self._durable or ends or owned.since_checkpoint >= self._interval
        return Member(owned, queued, due)

    def _row(self, member: Member | None) -> Row:
        if member is None:
            controls = self._controls.of(start=False, end=False, ready=False, correlation_id=0)
            return Row(inputs={}, controls=controls, null=True)
        message = member.queued.message
        # The model hears the flags with a step's first pass; of the end of a request's own sequence it hears nothing.
        flags = StepFlag.NONE if member.owned.passes else member.queued.step.flags
        start, end = StepFlag.START in flags, StepFlag.END in flags and not message.own_sequence
        return Row(
            inputs={tensor.name: tensor for tensor in message.inputs},
            controls=self._controls.of(start=start, end=end, ready=True, correlation_id=message.correlation_id),
            slot=member.owned.slot,
            start=start,
            end=end,
            correlation_id=message.correlation_id,
            request_id=message.request_id,
            outputs=message.outputs,
            timeout_us=message.timeout_us,
            priority=message.priority,
            parameters=message.parameters,
        )

    def _conclude(self, members: Sequence[Member | None], result: BatchResult, began_ns: int, ended_ns: int) -> None:
        commits: list[StepCommit] = []
        concluded: list[OwnedSequence] = []
        for member, row in zip(members, result.rows, strict=True):
            if member is None or row is None:
                continue
            owned, step = member.owned, member.queued.step
            if self._table.get(owned.sequence) is not owned:
                continue
            if isinstance(row, RowResult) and row.again:
                self._table.repeat(owned)
                concluded.append(owned)
                continue
            ok = isinstance(row, RowResult)
            begins = StepFlag.START in step.flags
            self._table.conclude(owned, failed_start=begins and not ok, started=begins and ok)
            concluded.append(owned)
            if step.step <= owned.replay_until:
                continue
            counts = self._lane.statistics.answered(
                row,
                rows=1,
                arrived_ns=member.queued.message.arrived_ns,
                began_ns=began_ns,
                ended_ns=ended_ns,
                timings=result.timings,
            )
            execution = b"" if commits else self._execution(members, result, ended_ns)
            commits.append(self._commit(member, row, counts, execution))
            self._trace(member, began_ns, ended_ns, len(members))
        self._lane.committer.put(self._lane.owner, commits)
        for owned in concluded:
            self.offer(owned)

    def _execution(self, members: Sequence[Member | None], result: BatchResult, ended_ns: int) -> bytes:
        """The counts of a batch's run; they go with the first step that the batch answers."""
        return self._lane.statistics.execution(batch_size=len(members), timings=result.timings, ended_ns=ended_ns)

    def _commit(self, member: Member, row: RowResult | RowError, counts: bytes, execution: bytes) -> StepCommit:
        owned, step, message = member.owned, member.queued.step, member.queued.message
        ok = isinstance(row, RowResult)
        # A request of its own is no step to its caller.
        counted = owned.start_step and not message.own_sequence
        since_start = step.step - owned.start_step + 1 if counted else 0
        return self._final(
            member.queued,
            Outcome.DONE if ok else Outcome.FAILED,
            answer(row, version=self._lane.version, executor=self._lane.executor, step=since_start),
            entries=self._table.checkpointed(owned) if self._closes(member, ok=ok) else (),
            checkpoint=checkpoint_fields(row.states, message.traceparent) if isinstance(row, RowResult) else (),
            traceparent=message.traceparent,
            counts=counts,
            execution=execution,
        )

    def _final(
        self,
        queued: QueuedStep,
        outcome: Outcome,
        reply: bytes,
        *,
        entries: Sequence[str],
        checkpoint: Sequence[tuple[str, bytes]] = (),
        traceparent: str = "",
        counts: bytes,
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
            request_id=message.request_id,
            keep_reply=message.keep_reply,
            entries=entries,
            checkpoint=checkpoint,
            traceparent=traceparent,
            counts=counts,
            execution=execution,
        )

    def _closes(self, member: Member, *, ok: bool) -> bool:
        """Whether this step's commit leaves nothing to replay. A failed step did not move the state: Redis still has
        the right one exactly if the step before was checkpointed (or if there is no state any more)."""
        if ok:
            return member.due
        flags = member.queued.step.flags
        return (
            not self._durable or StepFlag.END in flags or StepFlag.START in flags or len(member.owned.open_entries) == 1
        )

    def _answer_void(self, owned: OwnedSequence) -> None:
        queued = self._table.begin(owned)
        step = queued.step
        assert owned.void is not None
        reply = void_answer(
            owned.void,
            step.sequence,
            version=self._lane.version,
            executor=self._lane.executor,
            last_step=step.step - 1,
        )
        entries = self._table.checkpointed(owned)
        self._table.conclude(owned)
        if step.step <= owned.replay_until:
            return
        reason = Reason.CANCELED if owned.void is VoidCause.CANCELLED else Reason.OTHER
        counts = self._lane.statistics.refused(reason, arrived_ns=queued.message.arrived_ns, now_ns=time.time_ns())
        commit = self._final(queued, Outcome.VOID, reply, entries=entries, counts=counts)
        self._lane.committer.put(self._lane.owner, [commit])

    def _answer_cancelled(self, owned: OwnedSequence) -> None:
        """The sequence has no state from here on; a START behind this step begins anew."""
        queued = self._table.begin(owned)
        reply = cancelled_answer(version=self._lane.version, executor=self._lane.executor)
        entries = self._table.checkpointed(owned)
        self._table.conclude(owned, cancelled=True)
        counts = self._lane.statistics.refused(
            Reason.CANCELED, arrived_ns=queued.message.arrived_ns, now_ns=time.time_ns()
        )
        commit = self._final(queued, Outcome.CANCELLED, reply, entries=entries, counts=counts)
        self._lane.committer.put(self._lane.owner, [commit])

    def _trace(self, member: Member, began_ns: int, ended_ns: int, batch_size: int) -> None:
        """The step's spans up to here; `checkpoint` follows when its commit comes back."""
        step, parent = member.queued.step, member.queued.message.traceparent
        if not parent:
            return
        tracing = self._lane.tracing
        delivered_ns = entry_time_ns(step.entry)
        links: list[str] = []
        if member.owned.taken_over:
            links = [takeover_traceparent(step.sequence, step.epoch), member.owned.predecessor]
            member.owned.taken_over = False
        tracing.record(parent, SpanName.SCHEDULE, member.queued.message.arrived_ns, delivered_ns)
        tracing.record(parent, SpanName.QUEUE, delivered_ns, began_ns)
        tracing.record(
            parent, SpanName.COMPUTE, began_ns, ended_ns, links, batch_size=batch_size, slot=step.slot, step=step.step
        )
