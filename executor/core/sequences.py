"""The sequences that this executor owns. Each runs its steps in order, one at a time, in whatever order they arrive.

Owns, per model version: which sequence sits in which slot, which step comes next, and what is known of its state.
Order comes from step numbers, never from a place in a stream: after a takeover old and new steps may arrive mixed, and
twice. Each ownership of a sequence has an epoch. A step of an older epoch is stale; a step of a newer epoch replaces
the sequence by a new ownership of it.

    (first step seen, or told of it) ──► RESTORING ──restored──► READY ──begin──► RUNNING ──conclude──► READY ...
    (a START that needs no state) ─────────────────────────────►   │  ◄──repeat─────┘                     │
                                                                   └── VOID: no state; steps fail until a START begins

The model may run a step of an iterative model many times before it answers (`repeat`). For the mesh all these passes
are one step: accepted once, and committed once, with its answer. Until then the request lies in the inbox. After a
takeover the passes begin again, from the checkpoint before the step; a START needs no checkpoint at all. Nothing of an
unfinished step was visible, so the step still takes effect exactly once. (Triton keeps passes in the memory of one
process; they are lost with it.)

Must never touch Redis or tensors: the caller restores, runs and commits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from shared.contract.ids import Epoch, InstanceIndex, SequenceId, SlotIndex, StepNumber
from shared.contract.messages import InboxOwned, InboxStep, InferMessage, StepFlag

Range = tuple[StepNumber, StepNumber]
"""First and last of a range of steps."""


class VoidCause(StrEnum):
    """Why a sequence has no state (field `vk` of its record)."""

    FAILED = "f"
    LOST = "o"
    CANCELLED = "c"


class QueuedStep(msgspec.Struct, frozen=True, eq=False):
    """A step that waits for its turn. Satisfies `batching.Queued`."""

    step: InboxStep
    message: InferMessage
    queued_us: int
    shape_key: Hashable
    rows: int = 1


@dataclass(slots=True, eq=False)
class OwnedSequence:
    """One sequence and what comes next for it.

    next_step       the only step that may run now
    committed       the last step that Redis is known to have made final
    restoring       its record and checkpoint are being fetched: no step of it runs until then
    replay_until    steps up to here were committed before the takeover: they run again for the state, and are not
                    answered
    open_entries    inbox entries since the last checkpoint, with the running step's
    open_bytes      bytes of the messages of these entries
    log_dropped     it had too many steps, or too large ones, to keep them all (see `recovery.Log`)
    start_step      step of the START of the present run; 0 if unknown
    first_step      step of the START with which it came here; 0 if it came with its state
    passes          how often its head was run without being answered (triton-spec 1.10)
    taken_over      another executor ran it before, and no step of it has run here yet
    predecessor     trace context of the last step that the other executor checkpointed, "" if that was not traced
    suspicion       number of owners that were lost with its next step, if they are enough to suspect it
    held            nothing is done for it yet, because it is suspected, and suspected sequences are tried one at a time
    cancelled       steps that are not run when their turn comes, because their callers have gone (or they are given up)
    failed          ranges of the steps to be replayed that failed before: the replay skips them
    """

    sequence: SequenceId
    epoch: Epoch
    instance: InstanceIndex
    slot: SlotIndex
    next_step: StepNumber
    committed: StepNumber = StepNumber(0)
    restoring: bool = False
    held: bool = False
    suspicion: int = 0
    running: bool = False
    void: VoidCause | None = None
    replay_until: StepNumber = StepNumber(0)
    start_step: StepNumber = StepNumber(0)
    first_step: StepNumber = StepNumber(0)
    passes: int = 0
    taken_over: bool = False
    predecessor: str = ""
    log_dropped: bool = False
    open_entries: list[str] = field(default_factory=list[str])
    open_bytes: int = 0
    steps: dict[StepNumber, QueuedStep] = field(default_factory=dict[StepNumber, QueuedStep])
    cancelled: set[StepNumber] = field(default_factory=set[StepNumber])
    failed: tuple[Range, ...] = ()

    @property
    def replays(self) -> bool:
        """Whether the next step was committed before, so that it runs for the state alone."""
        return self.next_step <= self.replay_until

    @property
    def head(self) -> QueuedStep | None:
        """The step that may run now, if there is one."""
        if self.restoring or self.held or self.running:
            return None
        return self.steps.get(self.next_step)

    @property
    def newest(self) -> StepNumber:
        """The newest step that was taken in."""
        return max(self.steps, default=StepNumber(max(0, self.next_step - 1)))

    @property
    def head_is_cancelled(self) -> bool:
        """Whether the head is cancelled. A replayed step never is: it was answered before, and runs again for the
        state.
        """
        return self.next_step in self.cancelled and not self.replays and self.head is not None

    @property
    def entries(self) -> list[str]:
        """All inbox entries of this sequence that are still in the inbox."""
        return [*self.open_entries, *(queued.step.entry for queued in self.steps.values())]

    def closed(self) -> list[str]:
        """Takes the open entries out, because no takeover will need them."""
        entries, self.open_entries, self.open_bytes = self.open_entries, [], 0
        return entries

    def closed_before(self, latest: QueuedStep) -> list[str]:
        """Takes the open entries out, without that of the latest step."""
        entries = self.closed()[:-1]
        self.open_entries, self.open_bytes = [latest.step.entry], len(latest.step.message)
        return entries

    def passed_over(self, latest: QueuedStep) -> str:
        """Takes the entry of the latest step out, because no replay may run that step again."""
        self.open_bytes -= len(latest.step.message)
        return self.open_entries.pop()


@dataclass(frozen=True, slots=True)
class Restored:
    """What Redis knows of a sequence that another executor ran before.

    checkpointed  the step whose state the checkpoint holds
    committed     the last step that was answered
    traceparent   trace context of the checkpointed step, "" if it was not traced
    cancelled     steps whose callers have gone, also if another executor was told of it
    failed        ranges of steps after the checkpoint that failed, rising: they did not change the state, and a replay
                  must skip them
    """

    epoch: Epoch
    checkpointed: StepNumber
    committed: StepNumber
    start_step: StepNumber
    void: VoidCause | None
    traceparent: str = ""
    cancelled: frozenset[StepNumber] = frozenset()
    failed: tuple[Range, ...] = ()


def _past(failed: Sequence[Range], step: int) -> StepNumber:
    """The first step, from `step` on, that did not fail."""
    for first, last in failed:
        if first <= step <= last:
            step = last + 1
    return StepNumber(step)


class SequenceTable:
    """All owned sequences of one model version, by id and by (instance, slot)."""

    def __init__(self) -> None:
        self._by_id: dict[SequenceId, OwnedSequence] = {}
        self._by_place: dict[tuple[InstanceIndex, SlotIndex], OwnedSequence] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def queued(self) -> int:
        """Number of steps that were accepted here and are not concluded."""
        return sum(len(owned.steps) for owned in self._by_id.values())

    @property
    def queued_bytes(self) -> int:
        """Bytes of the requests of these steps."""
        return sum(len(queued.step.message) for owned in self._by_id.values() for queued in owned.steps.values())

    @property
    def busy(self) -> bool:
        """Whether any sequence has a step that runs, or may soon."""
        return any(
            owned.running or owned.restoring or owned.held or owned.head is not None for owned in self._by_id.values()
        )

    @property
    def waiting(self) -> int:
        """Number of accepted steps that do not run yet."""
        return sum(len(owned.steps) - owned.running for owned in self._by_id.values())

    @property
    def all(self) -> list[OwnedSequence]:
        """Every sequence."""
        return list(self._by_id.values())

    def committed(self, sequence: SequenceId, epoch: Epoch, step: StepNumber) -> None:
        """Notes that a step has become final."""
        owned = self._by_id.get(sequence)
        if owned is not None and owned.epoch == epoch:
            owned.committed = max(owned.committed, step)

    def get(self, sequence: SequenceId) -> OwnedSequence | None:
        """The sequence, if it is owned here."""
        return self._by_id.get(sequence)

    def accept(self, queued: QueuedStep) -> OwnedSequence | None:
        """Takes a step in; None if it is stale (of an older epoch, or taken in before).

        A sequence that is new here comes back `restoring`: the caller must fetch its record and checkpoint and then
        call `seat` and `restored`. Only if this step is a START that needs no state, for a free slot, the sequence can
        run at once.
        """
        step = queued.step
        owned = self._by_id.get(step.sequence)
        if owned is None or owned.epoch < step.epoch:
            owned = self._adopt(step)
        elif owned.epoch > step.epoch:
            return None
        # While it is restoring, `next_step` is unknown, so every step is kept; `restored` drops the ones that are too
        # old.
        if step.step < owned.next_step and not owned.restoring:
            return None
        if step.step in owned.steps:
            return None
        owned.steps[step.step] = queued
        if step.cancelled or step.given_up:
            owned.cancelled.add(step.step)
        return owned

    def expect(self, told: InboxOwned) -> OwnedSequence | None:
        """Takes in a sequence whose next step is still to come; None if this epoch of it, or a later one, is known
        already.

        The sequence comes back `restoring`, as from `accept`: the message may be old, and only the record says what
        holds now.
        """
        owned = self._by_id.get(told.sequence)
        return None if owned is not None and owned.epoch >= told.epoch else self._adopt(told)

    def overtaken(self, step: InboxStep) -> list[str]:
        """Inbox entries that may be removed, after `accept` took this step for stale.

        A step before `first_step` was kept in the inbox for the state that the START makes unnecessary. If that START
        is committed, the step's entry may go. Until then another owner may still need it, so it goes with the START's
        commit: the entry joins the open ones.
        """
        owned = self._by_id.get(step.sequence)
        if owned is None or owned.epoch != step.epoch or step.step >= owned.first_step:
            return []
        if owned.committed >= owned.first_step:
            return [step.entry]
        owned.open_entries.insert(0, step.entry)
        return []

    def cancel(self, sequence: SequenceId, epoch: Epoch, step: StepNumber) -> OwnedSequence | None:
        """Notes that the caller of a step has gone; None if the step is concluded, or is not here.

        A step that is running runs on, but is not repeated (triton-spec 1.10).
        """
        owned = self._by_id.get(sequence)
        if owned is None or owned.epoch != epoch or step not in owned.steps:
            return None
        owned.cancelled.add(step)
        return owned

    def restored(self, sequence: SequenceId, found: Restored) -> OwnedSequence | None:
        """Applies what was fetched for a restoring sequence; None if the sequence has been dropped or replaced
        meanwhile.
        """
        owned = self._by_id.get(sequence)
        if owned is None or not owned.restoring or owned.epoch != found.epoch:
            return None
        owned.restoring = False
        owned.taken_over = found.committed > 0
        owned.predecessor = found.traceparent
        owned.failed = found.failed
        # The replay begins behind the checkpoint; up to the last committed step nothing is answered again.
        owned.next_step = _past(found.failed, found.checkpointed + 1)
        owned.replay_until = owned.committed = found.committed
        # A START that is not committed yet will set this when it runs.
        owned.start_step = found.start_step if found.start_step <= found.committed else StepNumber(0)
        owned.void = found.void
        owned.cancelled |= found.cancelled
        # The checkpoint covers these steps, or they failed before.
        for step in [number for number in owned.steps if number < owned.next_step]:
            del owned.steps[step]
        return owned

    def begin(self, owned: OwnedSequence) -> QueuedStep:
        """Marks the head as running and returns it. (The caller runs it, or answers it without the model.)"""
        queued = owned.head
        assert queued is not None, f"{owned.sequence}: step {owned.next_step} is not ready"
        owned.running = True
        # A further pass of the same step: its entry is open already.
        if owned.passes:
            return queued
        if StepFlag.START in queued.step.flags:
            owned.start_step = queued.step.step
        owned.open_entries.append(queued.step.entry)
        owned.open_bytes += len(queued.step.message)
        return queued

    def repeat(self, owned: OwnedSequence) -> None:
        """The running step wants another pass: it is the head again (triton-spec 1.10)."""
        assert owned.running, f"{owned.sequence}: no step is running"
        owned.running = False
        owned.passes += 1

    def conclude(
        self,
        owned: OwnedSequence,
        *,
        failed_start: bool = False,
        started: bool = False,
        dropped: VoidCause | None = None,
    ) -> None:
        """The running step is done; the next one may run.

        failed_start  it was a START, and failed: the sequence has no state
        started       it was a START, and succeeded: the sequence has a state again
        dropped       why the state is lost with this step, if it is; later steps are not run either
        """
        assert owned.running, f"{owned.sequence}: no step is running"
        owned.running = False
        owned.passes = 0
        del owned.steps[owned.next_step]
        owned.cancelled.discard(owned.next_step)
        owned.next_step = _past(owned.failed, owned.next_step + 1)
        if dropped is not None:
            owned.void = dropped
        elif failed_start:
            owned.void = VoidCause.FAILED
        elif started:
            owned.void = None

    def drop(self, sequence: SequenceId, epoch: Epoch) -> OwnedSequence | None:
        """Forgets a sequence, if it still is the one of that epoch. Returns the sequence that was forgotten."""
        owned = self._by_id.get(sequence)
        if owned is None or owned.epoch != epoch:
            return None
        del self._by_id[sequence]
        place = (owned.instance, owned.slot)
        # Another sequence may have been given the slot (`seat`).
        if self._by_place.get(place) is owned:
            del self._by_place[place]
        return owned

    def at(self, instance: InstanceIndex, slot: SlotIndex) -> OwnedSequence | None:
        """The sequence in that slot."""
        return self._by_place.get((instance, slot))

    def seat(self, owned: OwnedSequence) -> OwnedSequence | None:
        """Gives a sequence its slot, after Redis has confirmed that the slot is this sequence's. Returns the sequence
        that was in the slot: it has ended, or has another owner, and this executor was not told yet.
        """
        sitting = self.at(owned.instance, owned.slot)
        if sitting is owned:
            return None
        if sitting is not None:
            self.drop(sitting.sequence, sitting.epoch)
        self._by_place[owned.instance, owned.slot] = owned
        return sitting

    def _adopt(self, entry: InboxStep | InboxOwned) -> OwnedSequence:
        """Makes the entry of a sequence that is new here.

        If another sequence sits in its slot, one of the two is over: either the sitting one, or this one, if its entry
        stayed in the inbox after the sequence was taken away. So Redis is asked before any of them is dropped (`seat`):
        a START, too, is restored first then.
        """
        # State and steps of an earlier ownership say nothing about this one.
        previous = self._by_id.get(entry.sequence)
        if previous is not None:
            self.drop(previous.sequence, previous.epoch)
        is_free = self.at(entry.instance, entry.slot) is None
        start = _start_of(entry) if is_free else StepNumber(0)
        suspicion = entry.suspicion if isinstance(entry, InboxStep) else 0
        owned = OwnedSequence(
            sequence=entry.sequence,
            epoch=entry.epoch,
            instance=entry.instance,
            slot=entry.slot,
            next_step=start,
            first_step=start,
            committed=entry.committed,
            restoring=not start,
            held=suspicion > 0,
            suspicion=suspicion,
        )
        self._by_id[entry.sequence] = owned
        if is_free:
            self._by_place[entry.instance, entry.slot] = owned
        return owned


def _start_of(entry: InboxStep | InboxOwned) -> StepNumber:
    """The number of the step, if it is a START and every step before it is committed, so that it needs no state. Else
    0.
    """
    if isinstance(entry, InboxOwned) or StepFlag.START not in entry.flags or entry.step != entry.committed + 1:
        return StepNumber(0)
    return entry.step
