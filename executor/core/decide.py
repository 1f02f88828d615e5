"""What an executor does with the sequences that it owns: `decide` takes in what happens, `next_batch` begins a batch.

The phases of a sequence are drawn in docs/design/sequence-states.md.

A late or repeated event is recognised by its epoch or its step number, and changes nothing. Steps that need no model
(cancelled ones, those that are given up, those that the model cannot take, and steps of a sequence without a state) are
answered as soon as they are next.

Pure: no stream, clock or tensor is touched; the caller carries the actions out in their order.
"""

from __future__ import annotations

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
    StepAnswer,
    Tell,
)
from executor.core.batching import Wait
from executor.core.events import (
    BatchDone,
    CheckpointFetched,
    ExecutorEvent,
    OwnershipOver,
    RowEnd,
    StateLoaded,
    StepEnded,
    StepsFinal,
    SuspectTried,
)
from executor.core.gathering import Gathering
from executor.core.recovery import closed
from executor.core.sequence_batches import Batch
from executor.core.state import OwnedPhase, OwnedSequence, OwnedSequences, QueuedStep, VoidCause, past
from shared.contract.ids import InstanceIndex, StepNumber, follows_another
from shared.contract.messages import END, START, InboxCancelled, InboxExpired, InboxOwned, InboxStep, InboxVacated

NO_STEP = StepNumber(0)


def decide(state: OwnedSequences, event: ExecutorEvent, now_us: int) -> list[ExecutorAction]:
    """Takes one event in.

    now_us   of a monotonic clock; batches are formed by it
    returns  the actions to be carried out now, in this order; may be empty
    raises   AssertionError when the state contradicts itself
    """
    match event:
        case QueuedStep():
            return step_arrived(state, event, now_us)
        case BatchDone():
            return batch_done(state, event, now_us)
        case StepEnded():
            return step_ended(state, event, now_us)
        case StepsFinal():
            return steps_final(state, event, now_us)
        case InboxOwned():
            return sequence_came(state, event)
        case CheckpointFetched():
            return checkpoint_fetched(state, event, now_us)
        case StateLoaded():
            return state_loaded(state, event, now_us)
        case InboxCancelled():
            return step_cancelled(state, event, now_us)
        case OwnershipOver():
            return drop(state, state.get(event.sequence, event.epoch))
        case InboxVacated():
            return sequence_vacated(state, event)
        case InboxExpired():
            return sequence_expired(state, event)
        case SuspectTried():
            return suspect_tried(state, event, now_us)


# -- sequences come ---------------------------------------------------------------------------------------------------


def step_arrived(state: OwnedSequences, queued: QueuedStep, now_us: int) -> list[ExecutorAction]:
    """Puts a step in its place. The first step of a sequence that is new here brings the sequence."""
    step = queued.step
    owned = state.by_id.get(step.sequence)
    actions: list[ExecutorAction] = []
    if owned is None or owned.epoch < step.epoch:
        # Of a START that was committed before, the record alone says which steps follow.
        owned, actions = come(state, step, start=NO_STEP if queued.is_older else start_of(step))
    # Until the record was fetched, `next_step` is 0, so every step is kept.
    if owned.epoch > step.epoch or step.step < owned.next_step or step.step in owned.steps:
        return stale(owned, step)
    state.put(owned, queued)
    if state.gathering:
        gathering = state.gathering[owned.instance]
        if step.step == owned.first_step:
            gathering.began(now_us)
        else:
            gathering.came(owned.sequence, now_us)
    if step.cancelled or step.given_up:
        owned.cancelled.add(step.step)
    return actions + advance(state, owned, now_us)


def sequence_came(state: OwnedSequences, told: InboxOwned) -> list[ExecutorAction]:
    """A sequence comes here before its next step. The message may be old: only the record says what holds now."""
    owned = state.by_id.get(told.sequence)
    return [] if owned is not None and owned.epoch >= told.epoch else come(state, told, start=NO_STEP)[1]


def come(
    state: OwnedSequences, entry: InboxStep | InboxOwned, *, start: StepNumber
) -> tuple[OwnedSequence, list[ExecutorAction]]:
    """Makes the entry of a sequence that is new here, or has a new epoch. start: the step, if it needs no state; else 0

    If another sequence sits in its slot, one of the two is over: either the sitting one, or this one, if its entry
    stayed in the inbox after the sequence was taken away. So Redis is asked before any of them is dropped, even if this
    entry is a START.
    """
    # State and steps of an earlier ownership say nothing about this one.
    actions = drop(state, state.by_id.get(entry.sequence))
    is_free = (entry.instance, entry.slot) not in state.by_slot
    owned = state.adopt(entry, start=start if is_free else NO_STEP)
    if is_free:
        state.seat(owned)
    return owned, actions


def start_of(entry: InboxStep) -> StepNumber:
    """The number of the step, if it is a START and every step before it is committed, so that it needs no state. Else
    0.
    """
    if not entry.flags & START or entry.step != entry.committed + 1:
        return NO_STEP
    return entry.step


def stale(owned: OwnedSequence, step: InboxStep) -> list[ExecutorAction]:
    """A step that is not taken in: of an older epoch, or taken in before.

    A step before `first_step` was kept in the inbox for the state that the START makes unnecessary. If that START is
    committed, the step's entry may go. Until then another owner may still need it, so it goes with the START's commit.
    """
    actions: list[ExecutorAction] = [Tell("DEBUG", "stale step ignored", owned, {"step": step.step})]
    if owned.epoch == step.epoch and step.step < owned.first_step:
        if owned.committed >= owned.first_step:
            actions.append(Remove([step.entry]))
        else:
            owned.kept.entries.insert(0, step.entry)
    return actions


def suspect_tried(state: OwnedSequences, event: SuspectTried, now_us: int) -> list[ExecutorAction]:
    """A suspected sequence's turn has come."""
    owned = event.owned
    if owned.phase is not OwnedPhase.SUSPECTED:
        return []
    if not owned.next_step:
        state.move(owned, "tried")
        state.fetch(owned)
        return []
    state.move(owned, "tried from its start")
    return advance(state, owned, now_us)


def checkpoint_fetched(state: OwnedSequences, event: CheckpointFetched, now_us: int) -> list[ExecutorAction]:
    """Takes what Redis holds of a sequence that another executor ran before."""
    owned, found = event.owned, event.checkpoint
    if owned.phase is not OwnedPhase.FETCHING:
        return []
    if found is None or found.epoch != owned.epoch:
        # Another executor owns it now, and has its steps.
        return drop(state, owned)
    if found.is_over:
        entries = owned.entries
        return [*drop(state, owned), Remove(entries)]
    # The record has just named this slot for the sequence, so the sequence that sits in it is over here.
    sitting = state.by_slot.get((owned.instance, owned.slot))
    actions = [] if sitting is owned else drop(state, sitting)
    state.seat(owned)
    owned.void = found.void
    if found.void is None and found.is_of_another(state.mark):
        owned.void = VoidCause.LOST
        actions.append(Tell("INFO", "sequence ended by a reload", owned, {"last_step": found.committed}))
    owned.needs_start = state.recovery.needs_start(found.checkpointed, holds_state=found.holds_state)
    owned.predecessor = found.traceparent if found.committed else None
    owned.failed = found.failed
    # The replay begins behind the checkpoint; up to the last committed step nothing is answered again.
    owned.next_step = past(found.failed, found.checkpointed + 1)
    owned.replay_until = owned.committed = found.committed
    # A START that is not committed yet will set this when it runs.
    owned.start_step = found.start_step
    owned.cancelled |= found.cancelled
    # The checkpoint covers these steps, or they failed before.
    for step in [number for number in owned.steps if number < owned.next_step]:
        state.take_out(owned, step)
    if owned.void is None and found.holds_state:
        state.move(owned, "found")
        return [*actions, LoadState(owned, found)]
    state.move(owned, "found without state")
    return [*actions, *restored(state, owned, now_us)]


def state_loaded(state: OwnedSequences, event: StateLoaded, now_us: int) -> list[ExecutorAction]:
    """The engine has a sequence's state, or could not take it: then the state is lost."""
    owned = event.owned
    if owned.phase is not OwnedPhase.LOADING:
        return []
    if not event.is_usable:
        owned.void = VoidCause.LOST
    state.move(owned, "loaded")
    return restored(state, owned, now_us)


def restored(state: OwnedSequences, owned: OwnedSequence, now_us: int) -> list[ExecutorAction]:
    """A sequence can go on here."""
    state.rest(owned)
    return [
        Tell("DEBUG", "sequence restored", owned, {"next_step": owned.next_step, "committed": owned.committed}),
        *advance(state, owned, now_us),
    ]


# -- steps run --------------------------------------------------------------------------------------------------------


def advance(state: OwnedSequences, owned: OwnedSequence, now_us: int) -> list[ExecutorAction]:
    """Makes the next step of a sequence ready, if it is here. Steps that are not run are answered without the model."""
    answers: list[StepAnswer] = []
    told: list[ExecutorAction] = []
    while (queued := owned.head) is not None and not (state.runs_one_by_one(owned) and owned.awaits_commit):
        if owned.head_is_cancelled:
            is_given_up = queued.step.given_up
            answers += answer_unrun(
                state, owned, queued, HowAnswered.GIVEN_UP if is_given_up else HowAnswered.CANCELLED
            )
            # No state from here on, until a later START.
            owned.void = VoidCause.LOST if is_given_up else VoidCause.CANCELLED
        elif owned.void is not None and (owned.replays or not queued.step.flags & START):
            answers += answer_unrun(state, owned, queued, HowAnswered.VOID, owned.void)
        elif owned.needs_start and owned.void is None and not queued.step.flags & START:
            # It would run as if the sequence began with it, and the answers would be wrong.
            owned.void = VoidCause.LOST
            told.append(Tell("WARNING", "checkpoint is gone", owned, {"next_step": owned.next_step}))
        elif queued.refused:
            begin(state, owned, queued)
            answers += settle(state, BatchMember(owned, queued, save=False), RowEnd.FAILED, None)
        else:
            owned.needs_start = False
            # A further pass of an iterative step waits since now, not since the request arrived.
            arrived_us = now_us if owned.passes else queued.queued_us
            state.ready[owned.instance].offer(owned.slot, queued, arrived_us=arrived_us, now_us=now_us)
            break
    return [*told, Commit(owned.instance, answers)] if answers else told


def next_batch(state: OwnedSequences, instance: InstanceIndex, now_us: int, *, was_busy: bool) -> RunBatch | Wait:
    """Begins the next batch of an instance that is free, or says when to look again. `BatchDone` follows a batch.
    was_busy: the instance has just ended one
    """
    ready = state.ready[instance]
    batch = ready.decide(now_us, was_busy=was_busy)
    if isinstance(batch, Wait):
        # Whatever a batch has waited with is gone: cancelled, or dropped with its sequence.
        if state.gathering:
            state.gathering[instance].hold = None
        return batch
    gained: int | None = None
    if state.gathering:
        gathering, size = state.gathering[instance], sum(queued is not None for queued in batch)
        until_us = gathering.wait_until(size, now_us)
        if until_us is not None:
            return Wait(until_us)
        gained = gathering.begun(size)
    return begin_batch(state, instance, batch, now_us, gained)


def staged_batch(state: OwnedSequences, instance: InstanceIndex, now_us: int) -> RunBatch | None:
    """Begins the batch that follows the running one, if it is full: what comes until then can change nothing about it,
    so the engine is given it now, and goes on with it at once.
    """
    batch = state.ready[instance].full(now_us)
    return begin_batch(state, instance, batch, now_us) if batch is not None else None


def begin_batch(
    state: OwnedSequences, instance: InstanceIndex, batch: Batch[QueuedStep], now_us: int, gained: int | None = None
) -> RunBatch:
    members: list[BatchMember | None] = []
    for queued in batch:
        if queued is None:
            members.append(None)
            continue
        owned = state.by_id[queued.step.sequence]
        state.ready[instance].withdraw(owned.slot)
        begin(state, owned, queued)
        save = not owned.replays and state.recovery.is_due(owned.kept, queued.step)
        members.append(BatchMember(owned, queued, save))
    return RunBatch(instance, members, now_us, gained)


def begin(state: OwnedSequences, owned: OwnedSequence, queued: QueuedStep) -> None:
    """The head begins to run, or to be answered without the model."""
    state.move(owned, "begun")
    # A further pass of the same step: its entry is kept already.
    if not owned.passes:
        if queued.step.flags & START:
            owned.start_step = queued.step.step
        owned.kept.add(queued.step)


def batch_done(state: OwnedSequences, event: BatchDone, now_us: int) -> list[ExecutorAction]:
    """Concludes the steps of a batch, commits them, and makes the next steps ready."""
    actions: list[ExecutorAction] = []
    answers: list[StepAnswer] = []
    concluded: list[OwnedSequence] = []
    goes_on = False
    for row, (member, end) in enumerate(zip(event.batch.members, event.ends, strict=True)):
        # A sequence that was dropped while the batch ran: its new owner runs the step again.
        if member is None or end is None or member.owned.phase is not OwnedPhase.RUNNING:
            continue
        owned = member.owned
        if end is RowEnd.OPEN:
            goes_on |= not owned.replays
            continue
        concluded.append(owned)
        if end is RowEnd.AGAIN:
            goes_on |= not owned.replays
            owned.passes += 1
            state.move(owned, "repeated")
        else:
            answers += settle(state, member, end, row)
    # A batch that only replayed steps is not counted: they were counted when they were answered.
    if answers or goes_on:
        actions.append(Commit(event.batch.instance, answers, batch=True))
    # The commits come before those of steps that are answered now without the model.
    for owned in concluded:
        actions += advance(state, owned, now_us)
    if state.gathering:
        learn(state.gathering[event.batch.instance], event.batch, now_us)
    return actions


def step_ended(state: OwnedSequences, event: StepEnded, now_us: int) -> list[ExecutorAction]:
    """Concludes a step that its batch had left open."""
    member, owned = event.member, event.member.owned
    # A sequence that was dropped meanwhile: its new owner runs the step again.
    if owned.phase is not OwnedPhase.RUNNING:
        return []
    answers = settle(state, member, event.end, 0)
    committed = [Commit(owned.instance, answers)] if answers else []
    return [*committed, *advance(state, owned, now_us)]


def learn(gathering: Gathering, batch: RunBatch, now_us: int) -> None:
    """Notes how long a batch took, and whose next steps are expected."""
    gathering.ran(sum(member is not None for member in batch.members), batch.began_us, now_us)
    for member in batch.members:
        if member is None or member.owned.phase is not OwnedPhase.READY or member.owned.steps:
            continue
        if member.queued.step.flags & END:
            gathering.ended.append(now_us)
        else:
            gathering.left(member.owned.sequence, now_us)


def settle(state: OwnedSequences, member: BatchMember, end: RowEnd, row: int | None) -> list[StepAnswer]:
    """Concludes a step that ran, or that the model could not take (row: None).

    A step that was committed before, and ran again for its state alone, is not answered. If it fails now, later steps
    would build on another state than their caller knows: the state is lost. Nor is it of any use where a step fails of
    a sequence that follows another, as the other one has done the step (`commit.lua::commit` agrees).
    """
    owned, queued = member.owned, member.queued
    is_replay, step = owned.replays, queued.step
    conclude(state, owned)
    if end is RowEnd.LOST or (is_replay and end is not RowEnd.DONE):
        owned.void = VoidCause.LOST
    elif step.flags & START or (end is not RowEnd.DONE and follows_another(step.sequence)):
        owned.void = None if end is RowEnd.DONE else VoidCause.FAILED
    if is_replay:
        return []
    if state.makes_calls and end is not RowEnd.DONE:
        # The next owner may do the step, if this one has lost the sequence.
        state.careful.add(owned.sequence)
    if end is RowEnd.DONE:
        change = state.recovery.succeeded(owned.kept, step, saved=member.save)
    elif owned.void is not None:
        # The sequence may be over with this step: nothing of it stays in the inbox.
        change = closed(owned.kept, step)
    else:
        change = state.recovery.failed(owned.kept, step, saved=end is RowEnd.SAVED)
    number = owned.number(step.step)
    if row is None:
        return [StepAnswer(queued, HowAnswered.REFUSED, number, change)]
    predecessor = owned.predecessor if queued.message.traceparent else None
    if predecessor is not None:
        owned.predecessor = None
    return [StepAnswer(queued, HowAnswered.RAN, number, change, row, predecessor=predecessor)]


def answer_unrun(
    state: OwnedSequences, owned: OwnedSequence, queued: QueuedStep, how: HowAnswered, cause: VoidCause | None = None
) -> list[StepAnswer]:
    """Answers a step without the model. A replayed step was answered before."""
    is_replay = owned.replays
    begin(state, owned, queued)
    conclude(state, owned)
    if is_replay:
        return []
    return [StepAnswer(queued, how, owned.number(queued.step.step), closed(owned.kept, queued.step), cause=cause)]


def conclude(state: OwnedSequences, owned: OwnedSequence) -> None:
    """The running step is done; the next one may run."""
    state.move(owned, "concluded")
    owned.passes = 0
    state.take_out(owned, owned.next_step)
    owned.cancelled.discard(owned.next_step)
    owned.next_step = past(owned.failed, owned.next_step + 1)


def steps_final(state: OwnedSequences, event: StepsFinal, now_us: int) -> list[ExecutorAction]:
    """Notes the last step of each sequence that Redis has made final."""
    actions: list[ExecutorAction] = []
    for sequence, epoch, step in event.steps:
        owned = state.by_id.get(sequence)
        if owned is not None and owned.epoch == epoch:
            owned.committed = max(owned.committed, step)
            state.rest(owned)
            if state.runs_one_by_one(owned):
                actions += advance(state, owned, now_us)
    return actions


def step_cancelled(state: OwnedSequences, event: InboxCancelled, now_us: int) -> list[ExecutorAction]:
    """The caller of a step has gone. A step in a batch that runs, or is staged, runs on, but is not repeated. If the
    step is next, it and the steps behind it are answered now. (Triton looks at the heads of its slots' queues only:
    triton-spec 1.8.)
    """
    owned = state.get(event.sequence, event.epoch)
    if owned is None or event.step not in owned.steps:
        return []
    owned.cancelled.add(event.step)
    if not owned.head_is_cancelled:
        return []
    state.ready[owned.instance].withdraw(owned.slot)
    return advance(state, owned, now_us)


# -- sequences leave --------------------------------------------------------------------------------------------------


def sequence_vacated(state: OwnedSequences, event: InboxVacated) -> list[ExecutorAction]:
    """A sequence has given up its slot between two steps."""
    owned = state.get(event.sequence, event.epoch)
    if owned is None:
        return []
    return [Tell("DEBUG", "sequence vacated", owned, {"last_step": owned.next_step - 1}), *drop(state, owned)]


def sequence_expired(state: OwnedSequences, event: InboxExpired) -> list[ExecutorAction]:
    """A sequence is over without a word from here. It is described only if it was idle for too long."""
    owned = state.get(event.sequence, event.epoch)
    if owned is None:
        return []
    entries = owned.entries
    # Until its state has come, its slot holds another sequence's.
    is_here = owned.phase is OwnedPhase.READY
    described = [Describe(owned, StepNumber(owned.next_step - 1))] if is_here and not event.ended else []
    return [*described, *drop(state, owned), Remove(entries)]


def drop(state: OwnedSequences, owned: OwnedSequence | None) -> list[ExecutorAction]:
    """Forgets a sequence, if it is here: it is over, or has another owner."""
    if owned is None:
        return []
    has_slot = state.by_slot.get((owned.instance, owned.slot)) is owned
    state.drop(owned)
    return [Release(owned.instance, owned.sequence, owned.slot if has_slot else None)]
