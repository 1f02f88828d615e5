"""The sequences of one model version on this executor: steps are taken in, checkpoints restored, slots freed.

There is one `SequenceModel` per model version and executor registration, and in it one `InstanceLoop` per engine,
because a sequence stays with its instance. All of it runs on the event loop; only engines have threads
(`EngineWorker`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from executor.clock import monotonic_us
from executor.core.batching import ShapeKeys
from executor.core.sequences import OwnedSequence, QueuedStep, Restored, SequenceTable, VoidCause
from executor.models.repository import ServedVersion
from executor.sequences.checkpoints import Checkpoint
from executor.sequences.committer import Committer
from executor.sequences.holdings import Holding
from executor.sequences.instance_loop import InstanceLoop, Lane
from executor.workers.devices import DeviceLostError
from executor.workers.first_batch import Backlog
from shared.contract.ids import ExecutorId, correlation_id_of
from shared.contract.limits import VALUE_BYTES_MAX
from shared.contract.messages import InboxCancelled, InboxExpired, InboxOwned, InboxStep, InboxVacated, InferMessage
from shared.contract.model_config import Direct
from shared.process import logs
from shared.store.scripts import CommitCode, KeptReplies, StepCommit
from shared.traces.tracing import SpanName, Tracing

RESTORES_PER_READ, PREFETCHES_PER_READ = 64, 16
"""How many checkpoints one read fetches: for sequences with a step that waits, and for sequences without. After a
takeover thousands may have to be fetched, and running sequences must not wait for all of them: neither for the read,
nor for the engine, which takes them in one by one.
"""


class SequenceModel:
    """The sequences of one model version on this executor.

    A sequence leaves in three steps. It is *dropped* from the table (`forget`), because it is over, has another owner
    or has given up its slot (`vacated`). Its model is told (`_part_with`), and releases what it keeps of it. Its ready
    step leaves the slot (`_leave_slot`), unless another sequence has the slot by then.
    """

    def __init__(
        self,
        served: ServedVersion,
        *,
        executor: ExecutorId,
        committer: Committer,
        tracing: Tracing,
        backlog: Backlog | None = None,
        answer_bytes_max: int = VALUE_BYTES_MAX,
    ) -> None:
        """Beside the version that it serves and the services it uses:

        backlog           counts the requests of sequences that wait for a slot (see `first_batch`)
        answer_bytes_max  largest value that Redis takes
        """
        assert served.config.sequence_batching is not None
        self.serves = served
        self.model = served.config.name
        self.load = served.statistics.load
        self.mark = served.mark
        self.idle_ms = served.config.idle_ms
        self.kept_replies = KeptReplies(served.config.retry_replies, served.config.retry_reply_bytes)
        self.table = SequenceTable()
        self.restoring: list[OwnedSequence] = []
        """Sequences whose checkpoint must be fetched; the restore loop takes them out (`next_restores`)."""
        self._tracing = tracing
        self._shape_keys = ShapeKeys(served.config)
        # The direct strategy holds the first batch back for all instances together; each oldest instance has its own
        # batcher.
        is_direct = isinstance(served.config.sequence_batching.strategy, Direct)
        lane = Lane(
            owner=self,
            config=served.config,
            version=served.version,
            executor=executor,
            table=self.table,
            committer=committer,
            statistics=served.statistics,
            tracing=tracing,
            first_batch=served.workers[0].first_batch if is_direct else None,
            backlog=backlog,
            answer_bytes_max=answer_bytes_max,
        )
        self._loops = [InstanceLoop(lane, worker) for worker in served.workers]
        self._describes = served.config.sequence_batching.describe_on_expiry

    def accept(self, step: InboxStep, message: InferMessage) -> Sequence[str]:
        """Takes a step from the inbox. Returns inbox entries that may be removed at once."""
        queued = QueuedStep(step, message, monotonic_us(), self._shape_keys.of(message.inputs))
        known = self.table.get(step.sequence)
        owned = self.table.accept(queued)
        if owned is None:
            logs.debug("stale step ignored", sequence=step.sequence, step=step.step, epoch=step.epoch)
            return self.table.overtaken(step)
        # A new ownership, even if the sequence was here before.
        if owned is not known:
            self._adopted(owned, known)
        self._loops[owned.instance].offer(owned)
        return ()

    def expect(self, told: InboxOwned) -> None:
        """A sequence has come here before its next step: its state is fetched at once."""
        known = self.table.get(told.sequence)
        owned = self.table.expect(told)
        if owned is not None:
            self._adopted(owned, known)

    def _adopted(self, owned: OwnedSequence, known: OwnedSequence | None) -> None:
        """A sequence is new here. known: the same sequence in an earlier ownership, if it was still here"""
        if known is not None:
            self._part_with(known)
            self._leave_slot(known, owned)
        if owned.restoring and not owned.held:
            self.restoring.append(owned)

    def next_restores(self) -> list[OwnedSequence]:
        """Takes out the sequences whose checkpoints are fetched next, as many as one read should fetch. Sequences with
        a step that waits come first; the others only when there are none of these.
        """
        waited_for = [owned for owned in self.restoring if owned.steps]
        wanted = waited_for[:RESTORES_PER_READ] or self.restoring[:PREFETCHES_PER_READ]
        taken = set(map(id, wanted))
        self.restoring = [owned for owned in self.restoring if id(owned) not in taken]
        return wanted

    @property
    def suspects(self) -> list[OwnedSequence]:
        """Suspected sequences that wait for their turn to be tried."""
        return [owned for owned in self.table.all if owned.held]

    def attempt(self, owned: OwnedSequence) -> None:
        """A suspected sequence's turn has come."""
        owned.held = False
        if self.table.get(owned.sequence) is not owned:
            return
        if owned.restoring:
            self.restoring.append(owned)
        self._loops[owned.instance].offer(owned)

    def restored(self, owned: OwnedSequence, checkpoint: Checkpoint | None) -> Sequence[str]:
        """Takes what Redis holds of a sequence that another executor ran before. Does nothing if the sequence has been
        dropped or replaced meanwhile.

        returns  inbox entries that were kept for a replay and may be removed, because the sequence was over already
        """
        if self.table.get(owned.sequence) is not owned:
            return ()
        if checkpoint is None or checkpoint.restored.epoch != owned.epoch:
            # Another executor owns it now, and has its steps.
            self.forget(owned)
            return ()
        if checkpoint.is_over:
            self.forget(owned)
            return owned.entries
        loop = self._loops[owned.instance]
        # The record has just named this slot for the sequence, so the sequence that sits in it is over here.
        sitting = self.table.seat(owned)
        if sitting is not None:
            self._part_with(sitting)
            loop.vacate(owned.slot)
        found = checkpoint.restored
        if found.void is None and checkpoint.is_of_another(self.mark):
            logs.info("sequence ended by a reload", sequence=owned.sequence, last_step=found.committed)
            found = replace(found, void=VoidCause.LOST)
        # The sequence stays `restoring` until its state is loaded, so none of its steps runs before.
        if found.void is None and checkpoint.states:
            loading = loop.worker.load_state(owned.slot, checkpoint.states)
        elif found.void is None and checkpoint.model_state is not None:
            loading = loop.worker.restore_model(correlation_id_of(owned.sequence), checkpoint.model_state)
        else:
            self._resume(owned, found)
            return ()
        loading.add_done_callback(lambda future: self._loaded(owned, found, future))
        return ()

    def _loaded(self, owned: OwnedSequence, found: Restored, loading: asyncio.Future[None]) -> None:
        # The engine's thread has ended, and this registration with it.
        if loading.cancelled():
            return
        failure = loading.exception()
        if isinstance(failure, DeviceLostError):
            # The checkpoint is sound: the next owner, on another GPU or in another process, can load it.
            self._loops[owned.instance].fail(failure)
            return
        if failure is not None:
            logs.error("checkpoint unusable", sequence=owned.sequence, cause=str(failure))
            found = replace(found, void=VoidCause.LOST)
        self._resume(owned, found)

    def _resume(self, owned: OwnedSequence, found: Restored) -> None:
        # It may have been dropped while its state was loaded.
        if self.table.get(owned.sequence) is not owned or self.table.restored(owned.sequence, found) is None:
            return
        logs.debug(
            "sequence restored",
            sequence=owned.sequence,
            epoch=owned.epoch,
            slot=owned.slot,
            checkpoint=found.checkpointed,
            committed=found.committed,
        )
        self._loops[owned.instance].offer(owned)

    async def expired(self, message: InboxExpired) -> list[str]:
        """The scheduler has ended an idle sequence: its state is described, if the model asks for that, and then
        forgotten.

        returns  inbox entries that were kept for a replay
        """
        owned = self.table.get(message.sequence)
        if owned is None or owned.epoch != message.epoch:
            return []
        worker = self._loops[owned.instance].worker
        if self._describes:
            state = await worker.describe_state(owned.slot)
            logs.info("sequence expired", sequence=message.sequence, last_step=owned.next_step - 1, state=state)
        self.forget(owned)
        return owned.entries

    def cancelled(self, message: InboxCancelled) -> None:
        owned = self.table.cancel(message.sequence, message.epoch, message.step)
        if owned is not None:
            self._loops[owned.instance].cancel(owned)

    def vacated(self, message: InboxVacated) -> None:
        """A sequence has given up its slot between two steps."""
        owned = self.table.get(message.sequence)
        if owned is not None and owned.epoch == message.epoch:
            logs.debug("sequence vacated", sequence=owned.sequence, epoch=owned.epoch, last_step=owned.next_step - 1)
            self.forget(owned)

    def forget(self, owned: OwnedSequence) -> None:
        """Drops a sequence that is over or has another owner."""
        if self.table.drop(owned.sequence, owned.epoch) is not None:
            self._part_with(owned)
            self._leave_slot(owned)

    def forget_all(self) -> None:
        """The lease is over, and with it every ownership. The engines stay for the next registration."""
        for loop in self._loops:
            loop.worker.release_all()

    def _part_with(self, gone: OwnedSequence) -> None:
        """Tells the model that it may forget a dropped sequence."""
        self._loops[gone.instance].worker.release(gone.sequence)

    def _leave_slot(self, gone: OwnedSequence, successor: OwnedSequence | None = None) -> None:
        """Withdraws the ready step of a dropped sequence from its slot.

        If the slot is another sequence's, the ready step there is that sequence's and stays. That is so if the dropped
        sequence never got its slot. successor: a later ownership of the same sequence, which may have got the slot at
        once; it has not offered a step yet
        """
        if self.table.at(gone.instance, gone.slot) in (None, successor):
            self._loops[gone.instance].vacate(gone.slot)

    def committed(self, step: StepCommit, code: CommitCode, sent_ns: int, done_ns: int) -> None:
        if step.traceparent:
            self._tracing.record(step.traceparent, SpanName.CHECKPOINT, sent_ns, done_ns, outcome=code.name)
            if code is CommitCode.OVER:
                root = self._tracing.root_of(step.sequence)
                self._tracing.record(root, SpanName.END, sent_ns, done_ns, step=step.step)
        if code in (CommitCode.COMMITTED, CommitCode.BEFORE):
            self.table.committed(step.sequence, step.epoch, step.step)
            return
        owned = self.table.get(step.sequence)
        if code is CommitCode.PAGED:
            logs.debug("sequence paged", sequence=step.sequence, epoch=step.epoch, last_step=step.step)
        if code is CommitCode.REFUSED:
            logs.warning("commit refused", sequence=step.sequence, step=step.step, epoch=step.epoch)
        if owned is not None and owned.epoch == step.epoch:
            self.forget(owned)

    @property
    def holdings(self) -> list[Holding]:
        """What is known of every sequence that is owned here."""
        return [Holding(owned.sequence, owned.epoch, owned.committed, owned.newest) for owned in self.table.all]

    async def run(self) -> None:
        """Runs every instance's loop, for ever."""
        async with asyncio.TaskGroup() as group:
            for loop in self._loops:
                group.create_task(loop.run(), name=f"{loop.worker.name} loop")

    async def quiet(self) -> None:
        """Returns when no batch is running; nothing new is started afterwards."""
        for loop in self._loops:
            await loop.stop()
