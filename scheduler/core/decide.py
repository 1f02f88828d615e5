"""`decide`: the one entry into the core. An event changes the state and returns actions.

Actions come in the order in which they must be carried out: sequences are taken from an executor before its slots are
given to others. A late or repeated event is recognised by its entry or its epoch, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from scheduler.core import balance, events, expiry, forecasts, paging, spares
from scheduler.core.actions import Action, Assign, Forget, LookForExpired, Pause, Reclaim, ReclaimPart, Reject
from scheduler.core.backlog import MOVING_RANK
from scheduler.core.events import Event
from scheduler.core.slots import SlotTable
from scheduler.core.state import (
    CONFIRMED,
    NO_EPOCH,
    SEQUENCE_MOVES,
    Executor,
    ExecutorPhase,
    LeaderState,
    Sequence,
    SequencePhase,
)
from shared.contract.ids import ExecutorId, SequenceId, shard_of

PAGED = "p"
"""Kind of a `SequenceOver`: the sequence was paged (`commit.lua`)."""
UNREADABLE = "u"
"""Kind of a `SequenceOver`: the sequence's record could not be read (`lose` in common.lua), so its epoch is not known.
The event has the newest epoch of the shard: every epoch of the sequence up to it is over."""
WAIT_ENDS = {"x": "expired", "h": "paused"}
"""Moves by the kind of a `WaitEnded`: the idle time was over (`expire.lua`), or an operator paused the sequence
(`pause.lua`). With every other kind it was cancelled."""
NOT_FREED = ("moved out", "refused")
"""Moves that give a slot back and make no room: the sequence wants another slot, or never had this one."""
LOOK_MS_MAX = 10_000
"""Longest pause between two looks for idle sequences, whatever is known of their deadlines."""


def decide(state: LeaderState, event: Event) -> list[Action]:
    """Takes one event in.

    returns  the actions to be carried out now, in this order; may be empty
    raises   IllegalMoveError when the state contradicts itself; it must then be rebuilt from Redis
    """
    match event:
        case events.SequenceWaits():
            return sequence_waits(state, event)
        case events.PatienceLowered():
            return patience_lowered(state, event)
        case events.WaitEnded():
            return wait_ended(state, event)
        case events.Assigned():
            return assigned(state, event)
        case events.SequenceOver():
            return [*superseded_over(state, event), *sequence_over(state, event)]
        case events.SpareTaken():
            return spare_taken(state, event)
        case events.RecallSent():
            return spares.recall_sent(state, event)
        case events.SparesRecalled():
            return spares_recalled(state, event)
        case events.SharesSeen():
            state.shares = event.shares
            for backlog in state.backlogs.values():
                backlog.reconsider_all()
            return []
        case events.IdleTimeCut():
            state.look_ms = min(state.look_ms, event.until_ms)
            return []
        case events.Vacated():
            return vacated(state, event)
        case events.ClockRead():
            return clock_read(state, event)
        case events.Looked():
            return looked(state, event)
        case events.Tick():
            return tick(state, event)
        case events.ExecutorSeen():
            return executor_seen(state, event)
        case events.ExecutorLost():
            return executor_lost(state, event)
        case events.Reclaimed():
            return reclaimed(state, event)
        case events.Forgotten():
            return forgotten(state, event)
        case events.SequenceFound():
            return sequence_found(state, event)
        case events.ContendersFound(executor, sequences, cause):
            # It has dropped all but one of them, and only it knows which.
            return [Reclaim(executor, cause, sequences)]
        case events.EpochsFound(newest):
            state.found_until = newest
            return []
        case events.MovedOut():
            return moved_out(state, event)
        case events.MoveWished():
            return balance.wish(state, event.sequence, event.to, event.entry, event.cause)
        case events.PauseWished(sequence, until_ms, entry, cause):
            return [Pause(sequence, until_ms, entry, cause)]
        case events.ForecastAsked():
            return forecasts.asked(state, event)
        case events.IdleSeen():
            return forecasts.idle_seen(state, event)
        case events.VersionsWithdrawn():
            return versions_withdrawn(state, event)


# -- sequences -------------------------------------------------------------------------------------------------------


def sequence_waits(state: LeaderState, event: events.SequenceWaits) -> list[Action]:
    """Puts a sequence into the backlog. If a slot is free, it gets one at once."""
    actions: list[Action] = []
    state.underway.pop(event.sequence, None)
    known = state.sequences.get(event.sequence)
    if known is not None:
        if known.entry is not None and event.entry <= known.entry:
            return []
        # Redis lets a sequence wait only when it holds no slot. So its earlier life is over, and the event that says so
        # is still to come.
        actions = supersede(state, known, event.cause)
    sequence = Sequence(event.sequence, event.version, SequencePhase.ABSENT, event.entry, event.tenant)
    state.sequences[event.sequence] = sequence
    state.used.add(event.version)
    state.move(sequence, "moved" if event.moving else "returned" if event.returning else "begun", event.cause)
    state.backlogs[event.version].add(event.sequence, event.entry, moving=event.moving, tenant=event.tenant)
    if event.timeout_us > 0 and not event.moving:
        expiry.watch(state, event.sequence, event.entry, expiry.deadline_ms(event.entry, event.timeout_us))
    return actions + serve(state, event.version, event.cause)


def patience_lowered(state: LeaderState, event: events.PatienceLowered) -> list[Action]:
    """Notes the earlier time at which a waiting sequence is refused, if it still waits at that entry."""
    if expiry.is_waiting(state, event.sequence, event.entry):
        expiry.watch(state, event.sequence, event.entry, event.deadline_ms)
    return []


def wait_ended(state: LeaderState, event: events.WaitEnded) -> list[Action]:
    """Takes a sequence out of the backlog that waits no longer.

    While it is ASSIGNING nothing is done: `Assigned` with epoch 0 will say that it did not wait any more.
    """
    how = WAIT_ENDS.get(event.kind, "cancelled")
    sequence = state.sequences.get(event.sequence)
    if sequence is None:
        # It was moved out, and is over before its entry in the starts stream was read.
        state.underway.pop(event.sequence, None)
        return []
    if sequence.entry != event.entry or (sequence.phase, how) not in SEQUENCE_MOVES:
        return []
    return end(state, sequence, how, event.cause)


def assigned(state: LeaderState, event: events.Assigned) -> list[Action]:
    """Redis has confirmed a slot, or says (epoch 0) that the sequence did not wait any more."""
    sequence = state.sequences.get(event.sequence)
    if sequence is None or sequence.phase is not SequencePhase.ASSIGNING or sequence.entry != event.entry:
        return []
    if event.epoch == 0:
        return end(state, sequence, "refused", event.cause)
    state.move(sequence, "confirmed", event.cause)
    sequence.epoch = event.epoch
    # The end of this epoch may have been heard of before its confirmation (see `sequence_over`).
    if sequence.over_epoch >= event.epoch:
        return end(state, sequence, "over", event.cause, is_spare=True)
    return []


def sequence_over(state: LeaderState, event: events.SequenceOver) -> list[Action]:
    """Gives the slot of a sequence that is over to the next in the backlog.

    The end of an earlier epoch is ignored: the sequence has another slot by now.
    """
    sequence = state.sequences.get(event.sequence)
    if sequence is None:
        return []
    is_paged = event.kind == PAGED
    if is_paged:
        # A commit has freed one of the slots that it was told to free.
        holders = state.holders[sequence.version]
        holders.wanted = max(0, holders.wanted - 1)
    if sequence.phase is SequencePhase.ASSIGNING:
        # The epoch that is being given is not known yet, so this may be its end: `assigned` compares the two.
        sequence.over_epoch = max(sequence.over_epoch, event.epoch)
        return []
    is_older = event.kind == UNREADABLE and sequence.epoch < event.epoch
    if sequence.phase not in CONFIRMED or not (sequence.epoch == event.epoch or is_older):
        return []
    return end(state, sequence, "paged" if is_paged else "over", event.cause, is_spare=event.is_spare)


def superseded_over(state: LeaderState, event: events.SequenceOver) -> list[Action]:
    """Gives a slot to the next in the backlog that was believed spare since a later sequence of the id had come."""
    place = state.superseded.pop((event.sequence, event.epoch), None)
    table = state.ring(place.version).tables.get(place.executor) if place is not None else None
    if place is None or table is None or event.is_spare:
        return []
    table.withdraw(place, shard_of(event.sequence, state.policy.shards))
    return serve(state, place.version, event.cause)


def spare_taken(state: LeaderState, event: events.SpareTaken) -> list[Action]:
    """A sequence that has begun, or returned, has a slot that was spare. Otherwise as `sequence_found`."""
    # It was found when the state was rebuilt, or is over. Its slot may be laid out again by now.
    if event.epoch <= state.found_until.get(shard_of(event.sequence, state.policy.shards), NO_EPOCH):
        return []
    state.underway.pop(event.sequence, None)
    executor, known = state.executors.get(event.place.executor), state.sequences.get(event.sequence)
    table = state.ring(event.place.version).tables.get(event.place.executor)
    # What was taken of a lost executor, or of a version that it offers no more, comes back through the starts stream.
    if executor is None or table is None:
        return []
    # Where a sequence has waited since then, or has a later slot, this one is over, and the feed has not said so yet.
    if known is not None and is_behind(known, event):
        return []
    actions = supersede(state, known, event.cause) if known is not None else []
    if not table.take_at(event.place, event.sequence):
        holder = table.holder(event.place)
        if holder is not None and state.sequences[holder].epoch > event.epoch:
            # This one is over too.
            return actions
        if holder is None:
            return [*actions, Reclaim(executor.executor, event.cause, (event.sequence,))]
        # As of `ContendersFound`, none of them may stay.
        actions.append(Reclaim(executor.executor, event.cause, (holder, event.sequence)))
        return actions + end(state, state.sequences[holder], "taken", event.cause)
    seat(state, event, "seated")
    note_room(state, event.place.version)
    return actions + balance.fulfilled(state, event.sequence, event.place.executor)


def is_behind(known: Sequence, event: events.SpareTaken) -> bool:
    """Whether what is known of a sequence is newer than that it has taken a spare slot.

    A wait that began before is over, also if nobody has said so: its record could not be read, or the feed was long.
    """
    if known.phase in CONFIRMED:
        return known.epoch >= event.epoch
    assert known.entry is not None
    return known.entry.ms >= event.taken_ms


def spares_recalled(state: LeaderState, event: events.SparesRecalled) -> list[Action]:
    """An executor's slots are spare no more in one shard: sequences that wait may have them."""
    executor = spares.recalled(state, event)
    return serve_all(state, versions_of(executor), event.cause) if executor is not None else []


def vacated(state: LeaderState, event: events.Vacated) -> list[Action]:
    """A holder was asked for its slot. If it was busy and keeps the slot, the next holder is asked."""
    sequence = state.sequences.get(event.sequence)
    if sequence is None or sequence.phase is not SequencePhase.YIELDING or sequence.epoch != event.epoch:
        return []
    if event.freed:
        return end(state, sequence, "paged", event.cause)
    state.move(sequence, "kept", event.cause)
    state.holders[sequence.version].busy += 1
    return paging.ask_for_slots(state, sequence.version, event.cause)


def moved_out(state: LeaderState, event: events.MovedOut) -> list[Action]:
    """A sequence was to be moved. If it was taken, its slot goes to the next in the backlog."""
    if event.epoch == NO_EPOCH:
        return [] if event.is_taken else balance.dismissed(state, event.sequence, event.cause)
    sequence = state.sequences.get(event.sequence)
    if sequence is None or sequence.phase not in CONFIRMED or sequence.epoch != event.epoch:
        return []
    if not event.is_taken:
        balance.stayed(state, sequence)
        return []
    state.underway[event.sequence] = (sequence.version, state.now_ms)
    return end(state, sequence, "moved out", event.cause)


def sequence_found(state: LeaderState, event: events.SequenceFound) -> list[Action]:
    """Takes a slot that Redis says is taken. If that is not possible, the sequence is reclaimed."""
    executor = state.executors.get(event.place.executor)
    if executor is None or executor.phase is not ExecutorPhase.SERVING or event.sequence in state.sequences:
        return []
    version = event.place.version
    if not any(served.version == version for served in executor.versions):
        # The executor serves this version no more, and the leader before this one ended before it took it away.
        return [Reclaim(executor.executor, event.cause, (version,))]
    table = state.ring(version).tables.get(event.place.executor)
    if table is None or not table.take_at(event.place, event.sequence):
        return [Reclaim(executor.executor, event.cause, (event.sequence,))]
    seat(state, event, "found")
    return []


def seat(state: LeaderState, event: events.SequenceFound | events.SpareTaken, how: str) -> None:
    """Notes that a sequence holds a slot, which was taken for it."""
    version = event.place.version
    sequence = Sequence(
        event.sequence, version, SequencePhase.ABSENT, tenant=event.tenant, place=event.place, epoch=event.epoch
    )
    state.sequences[event.sequence] = sequence
    state.used.add(version)
    state.move(sequence, how, event.cause)


def serve(state: LeaderState, version: str, cause: str) -> list[Action]:
    """Gives free slots to waiting sequences, in their turn, until there are no slots or no sequences left."""
    actions: list[Action] = []
    backlog, ring = state.backlogs[version], state.ring(version)
    in_turn = backlog.in_turn(state.turns(version))
    # Whose turn it is, is asked when there is a slot: that takes the longer, the more tenants wait.
    while ring.has_free_slot() and (sequence := next(in_turn, None)) is not None:
        table = balance.placement(state, state.sequences[sequence])
        if not table.unlent:
            actions += spares.recall(state, state.executors[table.executor], cause)
            break
        backlog.withdraw(sequence)
        actions.append(place(state, state.sequences[sequence], table, cause))
        actions += balance.fulfilled(state, sequence, table.executor)
    else:
        actions += paging.ask_for_slots(state, version, cause)
    note_room(state, version)
    return actions


def note_room(state: LeaderState, version: str) -> None:
    """Notes whether a slot is left: for the forecast only the time counts in which there is none."""
    state.freed[version].taken(state.now_ms, all_taken=not state.ring(version).has_free_slot())


def place(state: LeaderState, sequence: Sequence, table: SlotTable, cause: str) -> Assign:
    """Takes a slot of this table for a sequence that was withdrawn from the backlog."""
    waited_as = sequence.phase
    state.move(sequence, "placed", cause)
    sequence.place = table.take(sequence.sequence)
    assert sequence.entry is not None
    return Assign(
        sequence.sequence,
        sequence.place,
        sequence.entry,
        waited_as is SequencePhase.MOVING,
        cause,
        paged=waited_as is SequencePhase.RETURNING,
    )


def supersede(state: LeaderState, sequence: Sequence, cause: str) -> list[Action]:
    """Forgets a sequence that is over, as a later one of its id has come. Its slot may be spare by now."""
    place, shard = sequence.place, shard_of(sequence.sequence, state.policy.shards)
    if place is not None and sequence.phase in CONFIRMED and shard in state.executors[place.executor].spare_in:
        state.superseded[sequence.sequence, sequence.epoch] = place
    return end(state, sequence, "superseded", cause, is_spare=True)


def end(state: LeaderState, sequence: Sequence, how: str, cause: str, *, is_spare: bool = False) -> list[Action]:
    """Forgets a sequence. If it held a slot, the slot goes to the next in the backlog.

    is_spare  the slot is a spare one now, or may be
    """
    state.move(sequence, how, cause)
    del state.sequences[sequence.sequence]
    if sequence.place is None:
        state.backlogs[sequence.version].withdraw(sequence.sequence)
        return []
    table = state.table_at(sequence.place)
    shard = shard_of(sequence.sequence, state.policy.shards)
    stays_spare = is_spare and shard in state.executors[table.executor].spare_in
    table.release(sequence.place, sequence.sequence, shard if stays_spare else None)
    if how not in NOT_FREED:
        state.freed[sequence.version].freed(state.now_ms)
    return serve(state, sequence.version, cause)


# -- executors -------------------------------------------------------------------------------------------------------


def executor_seen(state: LeaderState, event: events.ExecutorSeen) -> list[Action]:
    """An executor has joined, or offers other versions. Its sequences keep their slots, unless a slot is gone.

    Sequences of a version that it offers no more are reclaimed. If a sequence's slot does not exist in the new tables,
    all sequences of the executor are reclaimed.
    """
    executor = state.executors.get(event.executor)
    if executor is None:
        executor = state.executors[event.executor] = Executor(event.executor, ExecutorPhase.ABSENT)
        state.move_executor(executor, "joined", event.cause)
    elif executor.phase is not ExecutorPhase.SERVING or executor.versions == event.versions:
        return []
    else:
        state.move_executor(executor, "changed", event.cause)
    # First of all: afterwards nothing of what it offers no more is taken.
    actions = spares.recall(state, executor, event.cause)
    held = state.held_by(event.executor)
    offered = {served.version for served in event.versions}
    gone = {served.version for served in executor.versions} - offered
    executor.versions = event.versions
    # The new versions may have shorter idle times than the time of the next look was computed from: look now.
    state.look_ms = 0
    furnish(state, executor)
    if gone:
        drop(state, [sequence for sequence in held if sequence.version in gone], event.cause)
        held = [sequence for sequence in held if sequence.version not in gone]
        actions.append(Reclaim(event.executor, event.cause, tuple(sorted(gone))))
    if not all(keeps_its_slot(state, sequence) for sequence in held):
        furnish(state, executor)
        drop(state, held, event.cause)
        actions.append(Reclaim(event.executor, event.cause))
    # Sequences that waited for a slot of a version that is gone here may get one elsewhere.
    return actions + serve_all(state, sorted(offered | gone), event.cause)


def executor_lost(state: LeaderState, event: events.ExecutorLost) -> list[Action]:
    """An executor is gone: its slots with it, and its sequences are reclaimed."""
    executor = state.executors.get(event.executor)
    if executor is None:
        executor = state.executors[event.executor] = Executor(event.executor, ExecutorPhase.ABSENT)
    elif executor.phase is not ExecutorPhase.SERVING:
        return []
    state.move_executor(executor, "lost", event.cause)
    # Sequences that waited for its spare slots may get others.
    wanted = versions_of(executor) if executor.recalls else []
    executor.versions = ()
    spares.forget_superseded(state, event.executor)
    clear(state, executor, event.cause)
    return [ReclaimPart(executor.executor, event.cause), *serve_all(state, wanted, event.cause)]


def clear(state: LeaderState, executor: Executor, cause: str) -> None:
    """Forgets every sequence of an executor, and makes its slots anew."""
    held = state.held_by(executor.executor)
    furnish(state, executor)
    drop(state, held, cause)


def reclaimed(state: LeaderState, event: events.Reclaimed) -> list[Action]:
    """Some of a lost executor's sequences were taken. `clock_read` has more of them taken, until there are none."""
    executor = state.executors.get(event.executor)
    if event.is_all and executor is not None and executor.phase is ExecutorPhase.LOST:
        state.move_executor(executor, "emptied", event.cause)
        executor.quiet_since_ms = state.now_ms
    return []


def forgotten(state: LeaderState, event: events.Forgotten) -> list[Action]:
    """Redis holds nothing of an executor any more."""
    executor = state.executors.get(event.executor)
    if executor is not None and executor.phase is ExecutorPhase.EMPTY:
        state.move_executor(executor, "forgotten", event.cause)
        del state.executors[event.executor]
    return []


def furnish(state: LeaderState, executor: Executor) -> None:
    """Replaces the executor's slot tables by empty ones, for the versions that it offers now. Spare slots stay so, and
    those that are withheld."""
    spare = [each for table in state.tables(executor.executor) for each in table.spares()]
    for table in state.tables(executor.executor):
        state.ring(table.served.version).drop(executor.executor)
    for served in executor.versions:
        if served.slots > 0:
            state.ring(served.version).put(SlotTable(executor.executor, served))
    for place, shard in spare:
        if (table := state.ring(place.version).tables.get(executor.executor)) is not None:
            table.put_by(place, shard)
    for place in chain.from_iterable(state.withheld.values()):
        table = state.ring(place.version).tables.get(place.executor)
        if place.executor == executor.executor and table is not None:
            table.withhold(place)


def keeps_its_slot(state: LeaderState, sequence: Sequence) -> bool:
    """Takes a sequence's slot again after `furnish`. False when the new tables have no such slot."""
    assert sequence.place is not None
    table = state.ring(sequence.version).tables.get(sequence.place.executor)
    return table is not None and table.take_at(sequence.place, sequence.sequence)


def drop(state: LeaderState, held: list[Sequence], cause: str) -> None:
    """Forgets sequences whose slots are gone. They come back through the starts stream when they are reclaimed."""
    for sequence in held:
        state.move(sequence, "taken", cause)
        del state.sequences[sequence.sequence]


def serve_all(state: LeaderState, versions: Iterable[str], cause: str) -> list[Action]:
    return [action for version in versions for action in serve(state, version, cause)]


def versions_of(executor: Executor) -> list[str]:
    return [served.version for served in executor.versions]


# -- time ------------------------------------------------------------------------------------------------------------


def clock_read(state: LeaderState, event: events.ClockRead) -> list[Action]:
    """A turn begins: every takeover goes on by a part. In between, what was taken gets its slots: so nobody waits until
    all of tens of thousands are taken. Spare slots that were recalled for the turn before are laid out again."""
    state.now_ms = max(state.now_ms, event.now_ms)
    recalled, state.recalled = state.recalled, set[str]()
    return [
        *(ReclaimPart(executor, event.cause) for executor in in_takeover(state)),
        *spares.lay_out(state, recalled, event.cause),
    ]


def tick(state: LeaderState, event: events.Tick) -> list[Action]:
    """Does what is due by time: refuses sequences that have waited too long, looks for idle sequences, pages, evens out
    load, pursues wishes, makes a forecast, and forgets executors that are long gone."""
    is_look_due = event.now_ms >= state.look_ms or event.now_ms < state.now_ms
    state.now_ms = max(state.now_ms, event.now_ms)
    overdue = expiry.overdue(state)
    actions: list[Action] = [reject(state, sequence, expiry.TIMEOUT_MESSAGE, event.cause) for sequence in overdue]
    if is_look_due:
        actions.append(LookForExpired(event.now_ms, event.cause))
    actions += paging.look_again(state, event.cause)
    actions += balance.time_passed(state, event.cause)
    actions += forecasts.time_passed(state, event.cause)
    state.forget_gone_versions()
    actions += spares.lay_out(state, state.used, event.cause)
    return actions + [forget(executor, state.now_ms, event.cause) for executor in forgettable(state)]


def looked(state: LeaderState, event: events.Looked) -> list[Action]:
    """Computes when to look for idle sequences next.

    Before the earliest deadline that was found, no known sequence is due. A sequence whose step ends after the look
    cannot be due before the shortest idle time has passed since then.
    """
    tables = [table for ring in state.rings.values() for table in ring.tables.values()]
    soonest_ms = min((table.served.idle_ms for table in tables), default=LOOK_MS_MAX)
    state.look_ms = event.now_ms + min(soonest_ms, LOOK_MS_MAX)
    if event.first_ms is not None:
        state.look_ms = min(state.look_ms, event.first_ms)
    return []


def is_due(state: LeaderState, now_ms: int) -> bool:
    """Whether a tick at that time may lead to an action, if no event has come since the last tick.

    That is so while a sequence waits or is underway, a wish is pursued, load is uneven, or a time has come.
    """
    return (
        now_ms >= state.look_ms
        # The clock of Redis was set back: the times in the state are from the other clock.
        or now_ms < state.now_ms
        or bool(state.timeouts and state.timeouts[0][0] <= now_ms)
        or bool(state.underway or state.wishes or state.uneven_since_ms)
        or any(len(backlog) for backlog in state.backlogs.values())
        or forecasts.is_due(state, now_ms)
        or any(executor.phase is ExecutorPhase.EMPTY for executor in state.executors.values())
    )


def versions_withdrawn(state: LeaderState, event: events.VersionsWithdrawn) -> list[Action]:
    """Refuses every sequence that waits for an unloaded version, also a sequence that has had a slot before. But while
    a takeover goes on, steps of such a one may lie in the lost executor's inbox: it is refused with them, later.
    """
    is_whole = not in_takeover(state)
    actions: list[Action] = []
    for version in event.versions:
        message = f"Request for unknown model: '{event.model}' version {version} is not at ready state"
        waiting = state.backlogs[version].in_order(state.turns(version))
        refused = [each.sequence for each in waiting if is_whole or each.rank != MOVING_RANK]
        actions += [reject(state, sequence, message, event.cause) for sequence in refused]
    return actions


def reject(state: LeaderState, sequence: SequenceId, message: str, cause: str) -> Reject:
    """Ends a waiting sequence with an error for its steps."""
    known = state.sequences[sequence]
    assert known.entry is not None
    end(state, known, "rejected", cause)
    return Reject(sequence, known.entry, known.version, message, cause)


def forgettable(state: LeaderState) -> list[Executor]:
    """Executors that have been EMPTY for the policy's time, by id: by then every other leader has seen them die."""
    empty = [state.executors[executor] for executor in in_phase(state, ExecutorPhase.EMPTY)]
    return [one for one in empty if state.now_ms - one.quiet_since_ms >= state.policy.forget_after_ms]


def forget(executor: Executor, now_ms: int, cause: str) -> Forget:
    """One attempt to forget an executor. If another model's sequences still hold it, the next comes as much later."""
    executor.quiet_since_ms = now_ms
    return Forget(executor.executor, cause)


def reclaimed_together(actions: Iterable[Action]) -> list[Action]:
    """What is to be done after a rebuild: of each executor all is taken at once, in one walk over what it owns."""
    wanted: dict[ExecutorId, Reclaim] = {}
    others: list[Action] = []
    for action in actions:
        if not isinstance(action, Reclaim):
            others.append(action)
        elif (before := wanted.get(action.executor)) is None:
            wanted[action.executor] = action
        elif before.only:
            only = (*before.only, *action.only) if action.only else ()
            wanted[action.executor] = Reclaim(action.executor, action.cause, tuple(dict.fromkeys(only)))
    return [*wanted.values(), *dict.fromkeys(others)]


def in_takeover(state: LeaderState) -> list[ExecutorId]:
    """The executors whose sequences are being taken, by id."""
    return in_phase(state, ExecutorPhase.LOST)


def in_phase(state: LeaderState, phase: ExecutorPhase) -> list[ExecutorId]:
    """The executors of a phase, by id."""
    return sorted(one.executor for one in state.executors.values() if one.phase is phase)
