"""The sequences that this executor owns: their steps in order, one at a time, whatever order they arrive in.

Owns, per model version: which sequence sits in which slot, which step comes next, and what is known of its state.
Order comes from step numbers, never from a place in a stream: after a takeover old and new steps may arrive mixed and
twice. A sequence is known by its epoch; a step of an older epoch is somebody's past, a newer one begins afresh.

    (first step seen, or told of it) ──► RESTORING ──restored──► READY ──begin──► RUNNING ──conclude──► READY ...
    (a START that needs no state) ─────────────────────────────►   │  ◄──repeat─────┘                     │
                                                                   └── VOID: no state; steps fail until a START begins

A step of an iterative model may be run many times before it is answered (`repeat`). For the mesh all its passes are one
step: accepted once, committed once, with its answer. Until then the request lies in the inbox; after a takeover its
passes begin anew, from the checkpoint before it, which a START of its own does not even need. Nothing of an unfinished
step was visible, so its effect is still exactly once. Triton keeps passes in one process's memory; they end with it.

Must never touch Redis or tensors: restoring, running and committing are the caller's.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from shared.contract.ids import Epoch, InstanceIndex, SequenceId, SlotIndex, StepNumber
from shared.contract.messages import InboxOwned, InboxStep, InferMessage, StepFlag

Range = tuple[StepNumber, StepNumber]
"""Steps from the first to the last."""


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
    replay_until    steps up to here were committed before the takeover: they run again for the state, unanswered
    open_entries    inbox entries since the last checkpoint, this one's included once it runs; open_bytes: of their
                    messages together
    log_dropped     its steps were too many, or too large, to be kept (see `recovery.Log`)
    start_step      step of the START of the present run; 0 when it is not known
    first_step      step of the START with which it came here; 0 when it came with its state
    passes          how often the head was run without being answered (triton-spec 1.10)
    taken_over      another executor ran it before, and no step of it has run here yet
    predecessor     trace context of the last checkpointed step of that executor, "" when it was not traced
    suspicion       owners that were lost with its next step, where they are enough to suspect it
    held            nothing is done for it yet: suspected ones take their turns
    cancelled       steps that are not to be run when their turn comes: their callers have gone
    failed          of the steps to be replayed, those that failed: they are passed over
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
        """Whether the next step was committed before."""
        return self.next_step <= self.replay_until

    @property
    def head(self) -> QueuedStep | None:
        """The step that may run now."""
        if self.restoring or self.held or self.running:
            return None
        return self.steps.get(self.next_step)

    @property
    def newest(self) -> StepNumber:
        """The newest step that was taken in."""
        return max(self.steps, default=StepNumber(max(0, self.next_step - 1)))

    @property
    def head_is_cancelled(self) -> bool:
        """Whether the step that may run now is not to be run. One that was answered before runs again for its state."""
        return self.next_step in self.cancelled and not self.replays and self.head is not None

    @property
    def entries(self) -> list[str]:
        """All inbox entries that are kept for it."""
        return [*self.open_entries, *(queued.step.entry for queued in self.steps.values())]

    def closed(self) -> list[str]:
        """Takes the open entries: none of them will be needed any more."""
        entries, self.open_entries, self.open_bytes = self.open_entries, [], 0
        return entries

    def closed_before(self, latest: QueuedStep) -> list[str]:
        """Takes the open entries but that of the latest step."""
        entries = self.closed()[:-1]
        self.open_entries, self.open_bytes = [latest.step.entry], len(latest.step.message)
        return entries

    def passed_over(self, latest: QueuedStep) -> str:
        """Takes the entry of the latest step: nothing will ever run it again."""
        self.open_bytes -= len(latest.step.message)
        return self.open_entries.pop()


@dataclass(frozen=True, slots=True)
class Restored:
    """What Redis knows of a sequence that another executor ran before.

    checkpointed  the step whose state the checkpoint holds; committed: the last step that was answered
    traceparent   trace context of the checkpointed step, "" when it was not traced
    cancelled     steps whose callers have gone, however long ago that was said here
    failed        steps behind the checkpoint that failed, rising: they did not move the state, nor may they now
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
    """The first step from this one on that did not fail."""
    for first, last in failed:
        if first <= step <= last:
            step = last + 1
    return StepNumber(step)


class SequenceTable:
    """All owned sequences of one model version, by id and by place."""

    def __init__(self) -> None:
        self._by_id: dict[SequenceId, OwnedSequence] = {}
        self._by_place: dict[tuple[InstanceIndex, SlotIndex], OwnedSequence] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def queued(self) -> int:
        """Steps that were taken in and are not done."""
        return sum(len(owned.steps) for owned in self._by_id.values())

    @property
    def queued_bytes(self) -> int:
        """Of their requests."""
        return sum(len(queued.step.message) for owned in self._by_id.values() for queued in owned.steps.values())

    @property
    def busy(self) -> bool:
        """Whether any sequence has a step that runs, or could."""
        return any(
            owned.running or owned.restoring or owned.held or owned.head is not None for owned in self._by_id.values()
        )

    @property
    def waiting(self) -> int:
        """Steps that do not run yet."""
        return sum(len(owned.steps) - owned.running for owned in self._by_id.values())

    @property
    def all(self) -> list[OwnedSequence]:
        """Every sequence."""
        return list(self._by_id.values())

    def committed(self, sequence: SequenceId, epoch: Epoch, step: StepNumber) -> None:
        """A step has become final."""
        owned = self._by_id.get(sequence)
        if owned is not None and owned.epoch == epoch:
            owned.committed = max(owned.committed, step)

    def get(self, sequence: SequenceId) -> OwnedSequence | None:
        """The sequence, if it is owned here."""
        return self._by_id.get(sequence)

    def accept(self, queued: QueuedStep) -> OwnedSequence | None:
        """Takes a step in; None when it is stale (an older epoch, or a step that was taken in before).

        A sequence seen for the first time comes back `restoring`, unless this very step begins it anew in a free slot:
        then the caller must fetch its record and checkpoint and call `seat` and `restored`.
        """
        step = queued.step
        owned = self._by_id.get(step.sequence)
        if owned is None or owned.epoch < step.epoch:
            owned = self._adopt(step)
        elif owned.epoch > step.epoch:
            return None
        if step.step < owned.next_step and not owned.restoring:
            return None
        if step.step in owned.steps:
            return None
        owned.steps[step.step] = queued
        if step.cancelled or step.given_up:
            owned.cancelled.add(step.step)
        return owned

    def expect(self, told: InboxOwned) -> OwnedSequence | None:
        """Takes in a sequence whose next step is still to come; None when it is known already, or has moved on.

        It comes back `restoring`, as from `accept`: what it was told may be long past, and only its record knows.
        """
        owned = self._by_id.get(told.sequence)
        return None if owned is not None and owned.epoch >= told.epoch else self._adopt(told)

    def overtaken(self, step: InboxStep) -> list[str]:
        """Inbox entries that may go, of a step that was kept for its state and came here after the START that needs
        none: its own, if that START is final. Until then another owner may need it; so it goes with that commit."""
        owned = self._by_id.get(step.sequence)
        if owned is None or owned.epoch != step.epoch or step.step >= owned.first_step:
            return []
        if owned.committed >= owned.first_step:
            return [step.entry]
        owned.open_entries.insert(0, step.entry)
        return []

    def cancel(self, sequence: SequenceId, epoch: Epoch, step: StepNumber) -> OwnedSequence | None:
        """The caller of a step that was taken in has gone; None when it was run, or is not here.

        One that runs already is not disturbed; but it is not repeated either (triton-spec 1.10).
        """
        owned = self._by_id.get(sequence)
        if owned is None or owned.epoch != epoch or step not in owned.steps:
            return None
        owned.cancelled.add(step)
        return owned

    def restored(self, sequence: SequenceId, found: Restored) -> OwnedSequence | None:
        """What was fetched for a restoring sequence; None when it has moved on meanwhile."""
        owned = self._by_id.get(sequence)
        if owned is None or not owned.restoring or owned.epoch != found.epoch:
            return None
        owned.restoring = False
        owned.taken_over = found.committed > 0
        owned.predecessor = found.traceparent
        owned.failed = found.failed
        owned.next_step = _past(found.failed, found.checkpointed + 1)
        owned.replay_until = owned.committed = found.committed
        owned.start_step = found.start_step if found.start_step <= found.committed else StepNumber(0)
        owned.void = found.void
        owned.cancelled |= found.cancelled
        for step in [number for number in owned.steps if number < owned.next_step]:
            del owned.steps[step]
        return owned

    def begin(self, owned: OwnedSequence) -> QueuedStep:
        """Takes the head step out to be run, perhaps once more (or answered, if the sequence is void)."""
        queued = owned.head
        assert queued is not None, f"{owned.sequence}: step {owned.next_step} is not ready"
        owned.running = True
        if owned.passes:
            return queued
        if StepFlag.START in queued.step.flags:
            owned.start_step = queued.step.step
        owned.open_entries.append(queued.step.entry)
        owned.open_bytes += len(queued.step.message)
        return queued

    def repeat(self, owned: OwnedSequence) -> None:
        """The running step is not answered yet: it is the head again (triton-spec 1.10)."""
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
        """The running step is done; the next one may run. dropped: it was not run, nor will those behind it be."""
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
        """Forgets a sequence, if it still is the one of that epoch."""
        owned = self._by_id.get(sequence)
        if owned is None or owned.epoch != epoch:
            return None
        del self._by_id[sequence]
        place = (owned.instance, owned.slot)
        if self._by_place.get(place) is owned:
            del self._by_place[place]
        return owned

    def at(self, instance: InstanceIndex, slot: SlotIndex) -> OwnedSequence | None:
        """Who sits there."""
        return self._by_place.get((instance, slot))

    def seat(self, owned: OwnedSequence) -> OwnedSequence | None:
        """Redis has confirmed that it owns its slot. Returns who sat there: that one has ended, or is somebody else's,
        without our having heard of it yet."""
        sitting = self.at(owned.instance, owned.slot)
        if sitting is owned:
            return None
        if sitting is not None:
            self.drop(sitting.sequence, sitting.epoch)
        self._by_place[owned.instance, owned.slot] = owned
        return sitting

    def _adopt(self, entry: InboxStep | InboxOwned) -> OwnedSequence:
        """A sequence that is new here. If another one sits in its slot, one of the two is over: that one, or this one,
        whose entry stayed in the inbox when it was taken away. Redis is asked before anybody is driven out (`seat`)."""
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
    """The step itself, if it is a START and no step before it is open: it needs no state. Else 0."""
    if isinstance(entry, InboxOwned) or StepFlag.START not in entry.flags or entry.step != entry.committed + 1:
        return StepNumber(0)
    return entry.step
