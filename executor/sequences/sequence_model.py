"""The sequences of one model version on this executor: carries out what `executor.core.decide` decides.

There is one `SequenceModel` per model version and executor registration, and in it one `Instance` per engine, because a
sequence stays with its instance. All of it runs on the event loop; only engines have threads (`EngineWorker`). The loop
of an instance is `_run`: it asks for a batch, and tells the end of the batch itself (`_conclude`). The committer tells
what became of commits (`committed`). Steps come in by `take`, everything else that happens by `handle`. All of them do
the same: decide, then act. Behind them `look` wakes the loops of instances with ready steps: once for all steps of a
read. Behind a read it gives them their batches by itself, so that no turn of the loop is spent on waking.

Order of effects: run, then commit (checkpoint, step number and reply together), then forget. The next step of a
sequence may run while the commit of the step before is on its way. Commits go out in order. If one is refused, the
sequence is dropped here; its later commits still go out, and the script refuses them too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from functools import partial

from executor.core.actions import (
    BatchMember,
    Commit,
    Describe,
    ExecutorAction,
    HowAnswered,
    LoadState,
    Release,
    Remove,
    RunBatch,
    Tell,
)
from executor.core.batching import NOTHING_YET, Wait
from executor.core.decide import decide, next_batch, staged_batch
from executor.core.events import BatchDone, ExecutorEvent, OwnershipOver, StateLoaded, StepsFinal
from executor.core.gathering import Gathering, gathers
from executor.core.recovery import recovery_of
from executor.core.sequence_batches import slot_steps
from executor.core.state import OwnedPhase, OwnedSequence, OwnedSequences, QueuedStep
from executor.engine.base import BatchResult, Row, RowError
from executor.engine.error_texts import text_of_error
from executor.models.served import ServedVersion
from executor.models.slots import any_slot, spare_slots
from executor.sequences.committer import Committer
from executor.sequences.holdings import Holding
from executor.sequences.instance import GivenBatch, Instance, monotonic_us
from executor.sequences.open_steps import OpenSteps
from executor.sequences.rows import RowMaker
from executor.sequences.step_answers import AnswerWriter
from executor.sequences.step_commits import FinishedBatch, StepCommits
from executor.sequences.step_phases import StepPhases
from executor.workers.devices import DeviceLostError
from executor.workers.first_batch import CountWaiting
from executor.workers.worker import SavedState
from shared.contract.batch_shape import ShapeKeys
from shared.contract.ids import ExecutorId, SequenceId, correlation_id_of
from shared.contract.limits import VALUE_BYTES_MAX
from shared.contract.messages import InboxCancelled, InboxStep, InferMessage
from shared.contract.model_config import Direct, Oldest
from shared.process import logs
from shared.store.script_values import NO_JOURNAL, CommitCode, JournalBounds, KeptReplies, StepCommit
from shared.traces.tracing import Tracing

GOES_ON = (CommitCode.COMMITTED, CommitCode.BEFORE)
"""Outcomes after which a sequence goes on here."""


class SequenceModel:
    """The sequences of one model version on this executor.

    fetch_due  set when checkpoints are to be fetched (`executor.sequences.arrivals`)
    trial_due  set when a step comes while a suspected sequence waits for its trial
    leave_due  set when idle sequences are to leave (`executor.sequences.departures`)
    """

    def __init__(
        self,
        served: ServedVersion,
        *,
        executor: ExecutorId,
        committer: Committer,
        tracing: Tracing,
        count_waiting: CountWaiting | None = None,
        answer_bytes_max: int = VALUE_BYTES_MAX,
        answer_writer: AnswerWriter | None = None,
    ) -> None:
        """Beside the version that it serves and the services it uses:

        answer_writer     writes the answers of a decoupled model; None for another model
        count_waiting     counts the requests of sequences that wait for a slot (see `first_batch`)
        answer_bytes_max  largest value that Redis takes
        """
        config, batching = served.config, served.config.sequence_batching
        assert batching is not None
        self.serves = served
        self.model = config.name
        self.load = served.statistics.load
        self._meter = served.statistics.requests
        self.mark = served.mark
        self.idle_ms = config.idle_ms
        self.kept_replies = KeptReplies(config.retry_replies, config.retry_reply_bytes)
        self.journal = JournalBounds(config.journal_steps, config.journal_bytes) if config.keeps_journal else NO_JOURNAL
        from_any = any_slot(config, served.slots)
        self.state = OwnedSequences(
            recovery_of(config),
            [slot_steps(batching, config.max_batch_size, any_slot=from_any) for _ in served.workers],
            served.mark,
            [Gathering(config.max_batch_size) for _ in served.workers] if gathers(config) else (),
            slots=served.slots * len(served.workers),
            spare=spare_slots(config, served.slots) * len(served.workers),
            one_by_one=config.decoupled,
            makes_calls=served.workers[0].makes_calls,
        )
        self._open = OpenSteps(
            version=served.version,
            executor=executor,
            answer_bytes_max=answer_bytes_max,
            writer=answer_writer,
            handle=self.handle,
        )
        self.fetch_due = asyncio.Event()
        self.trial_due = asyncio.Event()
        self.leave_due = asyncio.Event()
        self._committer = committer
        self._phases = StepPhases(config.name, self._meter, tracing)
        self._count_waiting = count_waiting
        self._shape_keys = ShapeKeys(config)
        self._rows = RowMaker(config, makes_calls=served.workers[0].makes_calls)
        self._strategy = batching.strategy
        self._in_order = isinstance(batching.strategy, Oldest) and batching.strategy.preserve_ordering
        self._describes = batching.describe_on_expiry
        self._stopping = False
        commits = partial(
            StepCommits, served.statistics, config, self._rows, served.version, executor, answer_bytes_max
        )
        self._instances = [Instance(worker, commits()) for worker in served.workers]

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs every instance, for ever."""
        async with asyncio.TaskGroup() as group:
            for instance in self._instances:
                group.create_task(self._run(instance), name=f"{instance.worker.name} loop")
            group.create_task(self._open.run(), name=f"{self.model} open steps")

    async def _run(self, instance: Instance) -> None:
        await self._first_batch(instance)
        was_busy = False
        try:
            while True:
                if instance.failure is not None:
                    raise instance.failure
                if not instance.given:
                    batch = NOTHING_YET if self._stopping else self._next_batch(instance, was_busy=was_busy)
                    if isinstance(batch, Wait):
                        await instance.sleep(batch)
                        was_busy = False
                        continue
                    self._give(instance, batch)
                self._stage(instance)
                await self._conclude(instance, instance.given[0])
                if not instance.given:
                    # Computing waits here while too many commits are open.
                    await self._committer.below_bounds.wait()
                    if len(self.state.ready[instance.worker.index]):
                        # Batches that ran on the loop: whatever else waits for it has its turn between them.
                        await asyncio.sleep(0)
                was_busy = True
        finally:
            instance.give_up()

    def _begin(self, instance: Instance) -> None:
        """Gives an instance that rests its next batch, in this turn of the loop. A short one has run then, and is
        concluded; everything else is for the instance's own loop.
        """
        if not instance.rests or instance.given or self._stopping or not self._committer.below_bounds.is_set():
            return
        batch = self._next_batch(instance, was_busy=False)
        if isinstance(batch, Wait):
            return
        given = self._give(instance, batch)
        if given.result.done() and given.result.exception() is None and not self._in_order:
            self._concluded(instance, given, given.result.result(), time.time_ns())
        else:
            instance.wake.set()

    def _next_batch(self, instance: Instance, *, was_busy: bool) -> RunBatch | Wait:
        return next_batch(self.state, instance.worker.index, monotonic_us(), was_busy=was_busy)

    def _stage(self, instance: Instance) -> None:
        """Gives the engine the batch that it runs next, while it runs one, if that batch is settled."""
        if len(instance.given) == 1 and not self._stopping and self._committer.below_bounds.is_set():
            batch = staged_batch(self.state, instance.worker.index, monotonic_us())
            if batch is not None:
                self._give(instance, batch)

    def _give(self, instance: Instance, batch: RunBatch) -> GivenBatch:
        row = self._answering_row if self._open.decoupled else self._rows.of
        rows = [row(member) if member is not None else self._rows.null for member in batch.members]
        result = instance.worker.run(rows, [member is not None and member.save for member in batch.members])
        given = GivenBatch(batch, rows, result, time.time_ns())
        instance.given.append(given)
        instance.idle.clear()
        return given

    def _answering_row(self, member: BatchMember) -> Row:
        return self._open.answering(member, self._rows.of(member))

    async def _conclude(self, instance: Instance, given: GivenBatch) -> None:
        result, ended_ns = await given.result, time.time_ns()
        if self._in_order:
            # Answers leave in the order in which steps were queued (triton-spec 1.5). Within a batch they do by
            # themselves. The last batch's commits may still be on their way to other shards, so they are waited for.
            await self._committer.final(instance.answered)
        self._concluded(instance, given, result, ended_ns)

    def _concluded(self, instance: Instance, given: GivenBatch, result: BatchResult, ended_ns: int) -> None:
        """The batch that an instance was given first has run."""
        batch = given.batch
        # A staged batch began when the batch before it had ended.
        began_ns, instance.ended_ns = max(given.at_ns, instance.ended_ns), ended_ns
        finished = FinishedBatch(result, began_ns, ended_ns, batch.gained)
        replayed = 0
        for member, row in zip(batch.members, result.rows, strict=True):
            if member is None or not member.owned.replays:
                continue
            replayed += 1
            if isinstance(row, RowError):
                owned = member.owned
                logs.error("replayed step failed", sequence=owned.sequence, step=owned.next_step, cause=row.message)
        self._meter.batch(len(result.rows) - result.rows.count(None), replayed)
        ends = self._open.ends(result.rows)
        self._act(decide(self.state, BatchDone(batch, ends), monotonic_us()), finished)
        self._open.left(batch.members, ends, finished)
        instance.given.popleft()
        if not instance.given:
            instance.idle.set()

    async def _first_batch(self, instance: Instance) -> None:
        # The direct strategy holds the first batch back for all instances together; each oldest instance has its own
        # batcher.
        if isinstance(self._strategy, Direct):
            slots = len(self._instances) * self.serves.slots

            async def waiting() -> int:
                # While a slot is free, sequences that wait are on their way into it: they are no backlog.
                is_full = len(self.state) >= slots
                elsewhere = await self._count_waiting() if is_full and self._count_waiting is not None else 0
                return elsewhere + self.state.behind_ends(slots)

            first_batch = self._instances[0].worker.first_batch
            await first_batch.opened(lambda: self.state.queued - self.state.behind_ends(slots), waiting)
        else:
            ready = self.state.ready[instance.worker.index]
            await instance.worker.first_batch.opened(lambda: len(ready))

    async def quiet(self) -> None:
        """Returns when no batch is running; nothing new is started afterwards."""
        self._stopping = True
        for instance in self._instances:
            await instance.idle.wait()
        await self._open.quiet()

    # -- what comes in ------------------------------------------------------------------------------------------------

    def take(self, step: InboxStep, message: InferMessage, *, is_older: bool = False) -> Sequence[str]:
        """Takes a step from the inbox; `look` follows, behind the last step of a read. Returns inbox entries that may
        be removed at once. is_older: as of `QueuedStep`
        """
        refused, now_us = self._rows.problem(step, message) is not None, monotonic_us()
        queued = QueuedStep(step, message, now_us, self._shape_keys.of(message.inputs), refused, is_older)
        gone = self._act(decide(self.state, queued, now_us))
        if self.state.by_phase[OwnedPhase.SUSPECTED]:
            self.trial_due.set()
        return gone

    def look(self, *, at_once: bool = False) -> None:
        """Wakes who has something to do: after events have been decided. at_once: batches begin here already, because
        nothing more comes in this turn of the loop
        """
        state = self.state
        for instance, ready in zip(self._instances, state.ready, strict=True):
            if at_once and len(ready):
                self._begin(instance)
            if len(ready):
                instance.wake.set()
                self._stage(instance)
        if state.to_fetch or state.awaited:
            self.fetch_due.set()
        if state.is_crowded:
            self.leave_due.set()

    def handle(self, event: ExecutorEvent, finished: FinishedBatch | None = None) -> Sequence[str]:
        """Takes an event in and acts. Returns inbox entries that may be removed.

        finished  what is to be committed of a step that ended after its batch
        """
        gone = self._act(decide(self.state, event, monotonic_us()), finished)
        self.look()
        if isinstance(event, InboxCancelled):
            self._cancel_running(event)
            self._open.cancel(event.sequence, event.epoch, event.step)
        return gone

    def _cancel_running(self, event: InboxCancelled) -> None:
        """Tells the model, if it runs the step: it may want to stop."""
        cancelled = event.sequence, event.epoch, event.step
        for instance in self._instances:
            for given in instance.given:
                for member, row in zip(given.batch.members, given.rows, strict=True):
                    step = member.queued.step if member is not None else None
                    if step is not None and (step.sequence, step.epoch, step.step) == cancelled:
                        instance.worker.cancel(row)

    def committed(self, steps: Sequence[StepCommit], codes: Sequence[CommitCode], sent_ns: int, done_ns: int) -> None:
        """Steps of this model are final, or refused. Called in commit order; times are wall clock, ns."""
        self._meter.committed(steps, codes, sent_ns, done_ns)
        outcomes = list(zip(steps, codes, strict=True))
        kept = [(step.sequence, step.epoch, step.step) for step, code in outcomes if code in GOES_ON]
        self._act(decide(self.state, StepsFinal(kept), monotonic_us()))
        for step, code in outcomes:
            if step.traceparent:
                self._phases.traced_commit(step, code, sent_ns, done_ns)
            if code in GOES_ON:
                continue
            if code is CommitCode.PAGED:
                logs.debug("sequence paged", sequence=step.sequence, epoch=step.epoch, last_step=step.step)
            if code is CommitCode.REFUSED:
                logs.warning("commit refused", sequence=step.sequence, step=step.step, epoch=step.epoch)
            self._act(decide(self.state, OwnershipOver(step.sequence, step.epoch), monotonic_us()))
        if self.state.one_by_one or self.state.careful or len(kept) < len(outcomes):
            self.look()
        elif self.state.is_crowded:
            # A step that is final makes no other step ready here, so no instance is woken.
            self.leave_due.set()

    def forget_all(self) -> None:
        """The lease is over, and with it every ownership. The engines stay for the next registration."""
        for instance in self._instances:
            instance.loads.clear()
            instance.commits.written.forget_all()
            index = instance.worker.index
            instance.worker.release_all([slot for at, slot in self.state.by_slot if at == index])

    @property
    def holdings(self) -> list[Holding]:
        """What is known of every sequence that is owned here."""
        owned = self.state.by_id.values()
        return [Holding(one.sequence, one.epoch, one.committed, one.newest, one.open_entry) for one in owned]

    # -- what goes out ------------------------------------------------------------------------------------------------

    def _act(self, actions: Iterable[ExecutorAction], finished: FinishedBatch | None = None) -> list[str]:
        """Carries actions out. finished: the batch of which they are the conclusion
        returns  inbox entries that may be removed
        """
        gone: list[str] = []
        for action in actions:
            match action:
                case Commit():
                    self._commit(action, finished)
                case LoadState():
                    self._load_soon(action)
                case Release():
                    self._open.drop(action.sequence)
                    instance = self._instances[action.instance]
                    instance.worker.release(action.sequence, action.slot)
                    instance.commits.written.forget(action.sequence)
                case Describe():
                    self._describe(action)
                case Remove():
                    gone += action.entries
                case Tell():
                    logs.log(
                        logs.Level[action.level],
                        action.what,
                        sequence=action.owned.sequence,
                        epoch=action.owned.epoch,
                        slot=action.owned.slot,
                        **action.fields,
                    )
        return gone

    def _commit(self, commit: Commit, finished: FinishedBatch | None) -> None:
        instance = self._instances[commit.instance]
        if finished is not None:
            self._phases.ran([given for given in commit.answers if given.how is HowAnswered.RAN], finished)
        steps = instance.commits.of(commit, finished)
        if steps:
            instance.answered = self._committer.put(self, steps)

    def _load_soon(self, load: LoadState) -> None:
        # One read brings many checkpoints, in one turn of the loop: their states go to the engine in one call.
        instance = self._instances[load.owned.instance]
        if not instance.loads:
            asyncio.get_running_loop().call_soon(self._load, instance)
        instance.loads.append(load)

    def _load(self, instance: Instance) -> None:
        # Of a sequence that was dropped in the same turn, the model has been told that it may forget it.
        loads = [load for load in instance.loads if load.owned.phase is OwnedPhase.LOADING]
        instance.loads.clear()
        if loads:
            owned = [load.owned for load in loads]
            loading = instance.worker.load([_saved(load) for load in loads])
            loading.add_done_callback(partial(self._loaded, instance, owned))

    def _loaded(
        self,
        instance: Instance,
        loaded: Sequence[OwnedSequence],
        loading: asyncio.Future[Sequence[BaseException | None]],
    ) -> None:
        # The engine's thread has ended, and this registration with it.
        if loading.cancelled():
            return
        try:
            for owned, refusal in zip(loaded, loading.result(), strict=True):
                if refusal is not None:
                    logs.error("checkpoint unusable", sequence=owned.sequence, cause=text_of_error(refusal))
                self.handle(StateLoaded(owned, is_usable=refusal is None))
        except (DeviceLostError, AssertionError) as failure:
            # A lost device: the checkpoints are sound, and the next owner, on another GPU or in another process, can
            # load them. A contradiction: what a callback raises is only logged, and the sequences would wait for ever.
            instance.fail(failure)

    def _describe(self, action: Describe) -> None:
        if not self._describes:
            return
        owned, sequence, last_step = action.owned, action.owned.sequence, action.last_step
        described = self._instances[owned.instance].worker.describe_state(owned.slot)
        described.add_done_callback(lambda future: _tell_of_expiry(sequence, last_step, future))


def _saved(load: LoadState) -> SavedState:
    owned, checkpoint = load.owned, load.checkpoint
    own = checkpoint.model_state or b""
    return SavedState(owned.slot, correlation_id_of(owned.sequence), checkpoint.states, own)


def _tell_of_expiry(sequence: SequenceId, last_step: int, described: asyncio.Future[str]) -> None:
    if described.cancelled():
        return
    failure = described.exception()
    state = described.result() if failure is None else f"not known: {failure}"
    logs.info("sequence expired", sequence=sequence, last_step=last_step, state=state)
