"""What an executor knows of the sequences of one model version: which sit in which slot, and what comes next for each.

Only `executor.core.decide` changes it, but for `next_fetches` and `next_leaving`, by which
`executor.sequences.arrivals` and `executor.sequences.departures` take out what they are about to ask Redis for. Order
comes from step numbers, never from a place in a stream: after a takeover old and new steps may arrive mixed, and twice.
Each ownership of a sequence has an epoch. A step of an older epoch is stale; a step of a newer epoch replaces the
sequence by a new ownership of it. OWNED_MOVES are the legal changes of phase.

All passes of an iterative model over a step are one step: accepted once, and committed once (decision 0017).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from executor.core.gathering import Gathering
from executor.core.recovery import KeptSteps, Recovery
from executor.core.sequence_batches import SlotSteps
from shared.contract.ids import Epoch, InstanceIndex, SequenceId, SlotIndex, StepNumber
from shared.contract.messages import END, InboxOwned, InboxStep, InferMessage
from shared.contract.tensors import Tensor

StepRange = tuple[StepNumber, StepNumber]
"""First and last of a range of steps."""


class VoidCause(StrEnum):
    """Why a sequence has no state (field `vk` of its record)."""

    FAILED = "f"
    LOST = "o"
    CANCELLED = "c"


class OwnedPhase(StrEnum):
    """The phase of a sequence at the executor that owns it.

    ABSENT     not owned here
    SUSPECTED  its next step may be what kills its owners: nothing is done until its turn to be tried alone
    FETCHING   its record and checkpoint are being fetched
    LOADING    its state is on its way into the engine
    READY      its next step runs as soon as it is here and a batch takes it
    RUNNING    its next step runs
    """

    ABSENT = "absent"
    SUSPECTED = "suspected"
    FETCHING = "fetching"
    LOADING = "loading"
    READY = "ready"
    RUNNING = "running"


OWNED_MOVES: Mapping[tuple[OwnedPhase, str], OwnedPhase] = {
    (OwnedPhase.ABSENT, "started"): OwnedPhase.READY,
    (OwnedPhase.ABSENT, "came"): OwnedPhase.FETCHING,
    (OwnedPhase.ABSENT, "suspected"): OwnedPhase.SUSPECTED,
    (OwnedPhase.SUSPECTED, "tried from its start"): OwnedPhase.READY,
    (OwnedPhase.SUSPECTED, "tried"): OwnedPhase.FETCHING,
    (OwnedPhase.FETCHING, "found"): OwnedPhase.LOADING,
    (OwnedPhase.FETCHING, "found without state"): OwnedPhase.READY,
    (OwnedPhase.LOADING, "loaded"): OwnedPhase.READY,
    (OwnedPhase.READY, "begun"): OwnedPhase.RUNNING,
    (OwnedPhase.RUNNING, "repeated"): OwnedPhase.READY,
    (OwnedPhase.RUNNING, "concluded"): OwnedPhase.READY,
    **{(phase, "dropped"): OwnedPhase.ABSENT for phase in OwnedPhase if phase is not OwnedPhase.ABSENT},
}
"""(phase, move) -> phase.

started   its START needs no state, and its slot is free
repeated  the model wants another pass of the step (triton-spec 1.10)
dropped   it is over, has another owner, or has given up its slot
"""


class QueuedStep(msgspec.Struct, frozen=True, eq=False):
    """A step that waits for its turn. refused: the model cannot take it, so it fails; is_older: an earlier load of the
    model may have taken it in, and committed it
    """

    step: InboxStep
    message: InferMessage
    queued_us: int
    shape_key: Hashable
    refused: bool = False
    is_older: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What Redis holds of a sequence that another executor ran before: its record, and its state.

    checkpointed  the step whose state the checkpoint holds
    committed     the last step that was answered
    start_step    step of the START of the last answered step's run; 0 if unknown
    void          why there is no state, if there is none
    traceparent   trace context of the checkpointed step, "" if it was not traced
    cancelled     steps whose callers have gone, also if another executor was told of it
    failed        ranges of steps after the checkpoint that failed, rising: they did not change the state, and a replay
                  must skip them
    states        by state input name, without batch dimension; empty before the first checkpoint
    model_state   what the model's own method gave; None if it gave nothing yet
    mark          of the load that ran the latest START, "" if the record names none
    is_over       the record is a tombstone
    """

    epoch: Epoch
    checkpointed: StepNumber
    committed: StepNumber
    start_step: StepNumber
    void: VoidCause | None
    traceparent: str = ""
    cancelled: frozenset[StepNumber] = frozenset()
    failed: tuple[StepRange, ...] = ()
    states: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    model_state: bytes | None = None
    mark: str = ""
    is_over: bool = False

    @property
    def holds_state(self) -> bool:
        """Whether there is something to be loaded."""
        return bool(self.states) or self.model_state is not None

    @property
    def state_bytes(self) -> int:
        return sum(len(tensor.raw) for tensor in self.states.values()) + len(self.model_state or b"")

    def is_of_another(self, mark: str) -> bool:
        """Whether its state belongs to another load than the one of this mark (triton-spec 1.11)."""
        return bool(mark and self.mark) and mark != self.mark


@dataclass(slots=True, eq=False)
class OwnedSequence:
    """One sequence and what comes next for it.

    instance, slot  where its state lies in this executor
    phase         see OWNED_MOVES; only `OwnedSequences.move` changes it
    next_step     the only step that may run now; 0 until the record was fetched
    committed     the last step that Redis is known to have made final
    start_step    step of the START of the present run; 0 if unknown
    first_step    step of the START with which it came here; 0 if it came with its state
    replay_until  steps up to here were committed before the takeover: they run again for the state, without an answer
    failed        ranges of the steps to be replayed that failed before: the replay skips them
    void          why it has no state: steps fail until a START begins; None if it has one
    needs_start   it came without state: its next step is a START, or its state is lost
    passes        how often its next step was run without being answered
    predecessor   trace context of the last step that another executor checkpointed, "" if that was not traced; None
                  when a traced step has run here since, or no other executor ran it
    suspicion     number of owners that were lost with its next step, if they are enough to suspect it
    kept          its steps since the base, which a takeover would run again
    steps         accepted steps that are not concluded
    cancelled     steps that are not run when their turn comes, because their callers have gone (or they are given up)
    last          number and inbox entry of the newest step that was taken in
    """

    sequence: SequenceId
    epoch: Epoch
    instance: InstanceIndex
    slot: SlotIndex
    next_step: StepNumber
    first_step: StepNumber
    committed: StepNumber
    suspicion: int = 0
    phase: OwnedPhase = OwnedPhase.ABSENT
    start_step: StepNumber = StepNumber(0)
    replay_until: StepNumber = StepNumber(0)
    failed: tuple[StepRange, ...] = ()
    void: VoidCause | None = None
    needs_start: bool = False
    passes: int = 0
    predecessor: str | None = None
    kept: KeptSteps = field(default_factory=KeptSteps)
    steps: dict[StepNumber, QueuedStep] = field(default_factory=dict[StepNumber, QueuedStep])
    cancelled: set[StepNumber] = field(default_factory=set[StepNumber])
    last: tuple[StepNumber, str] = (StepNumber(0), "")

    @property
    def replays(self) -> bool:
        """Whether the next step was committed before, so that it runs for the state alone."""
        return self.next_step <= self.replay_until

    @property
    def head(self) -> QueuedStep | None:
        """The step that may run now, if there is one."""
        return self.steps.get(self.next_step) if self.phase is OwnedPhase.READY else None

    @property
    def is_called(self) -> bool:
        """Whether any of its steps is a call, for whose answer another model's step waits."""
        return any(queued.message.chain for queued in self.steps.values())

    @property
    def head_is_cancelled(self) -> bool:
        """Whether the head is cancelled. A replayed step never is: it was answered before, and runs again for the
        state.
        """
        return self.next_step in self.cancelled and not self.replays and self.head is not None

    @property
    def awaits_commit(self) -> bool:
        """Whether the step before the next one is not final yet. A replayed step was final before."""
        return not self.replays and self.committed < self.next_step - 1

    @property
    def newest(self) -> StepNumber:
        """The newest step that was taken in."""
        return max(self.steps, default=StepNumber(max(0, self.next_step - 1)))

    @property
    def open_entry(self) -> str:
        """The inbox entry of the newest step, as long as that is not known to be final; else ""."""
        number, entry = self.last
        return entry if number == self.newest and number > self.committed else ""

    @property
    def entries(self) -> list[str]:
        """All inbox entries of this sequence that are still in the inbox."""
        return [*self.kept.entries, *(queued.step.entry for queued in self.steps.values())]

    def number(self, step: StepNumber) -> int:
        """A step's number since the START; 0 if the START is unknown."""
        return step - self.start_step + 1 if self.start_step else 0


def past(failed: Sequence[StepRange], step: int) -> StepNumber:
    """The first step, from `step` on, that did not fail."""
    for first, last in failed:
        if first <= step <= last:
            step = last + 1
    return StepNumber(step)


class OwnedSequences:
    """All sequences of one model version that this executor owns, by id and by slot.

    mark       of the load that serves the version: states of another load are not used; "" if it is not known
    ready      the ready steps of each instance
    gathering  what each instance has learned about its batches; () where batches are not gathered
    to_fetch   sequences whose checkpoint is to be fetched, in the order in which they came; awaited: those with a step
    by_phase   number of sequences in each phase
    one_by_one  a step begins only when the step before it is final: its answers leave before its commit (decoupled
               models)
    careful    sequences for which that holds while they are here, because owners were lost with one of their steps: if
               the step behind it ends this owner too, its commit must not be lost, or that loss would count for it;
               or because a step has failed
    makes_calls  the model calls others: what it calls from a state that the next owner does not come to stays called
    slots, spare  number of slots here, and how many of them are to be free; spare is 0 where none is kept free
    idle       where slots are kept free: sequences that can leave at no cost, because the mesh holds their states and
               they have no step. The least recently used comes first
    queued, queued_bytes  number of accepted steps that are not concluded, and bytes of their requests
    """

    def __init__(
        self,
        recovery: Recovery,
        ready: Sequence[SlotSteps[QueuedStep]],
        mark: str = "",
        gathering: Sequence[Gathering] = (),
        *,
        slots: int = 0,
        spare: int = 0,
        one_by_one: bool = False,
        makes_calls: bool = False,
    ) -> None:
        self.one_by_one = one_by_one
        self.makes_calls = makes_calls
        self.careful: set[SequenceId] = set()
        self.recovery = recovery
        self.ready = ready
        self.mark = mark
        self.gathering = gathering
        self.by_id: dict[SequenceId, OwnedSequence] = {}
        self.by_slot: dict[tuple[InstanceIndex, SlotIndex], OwnedSequence] = {}
        self.to_fetch: OrderedDict[SequenceId, OwnedSequence] = OrderedDict()
        self.awaited: OrderedDict[SequenceId, OwnedSequence] = OrderedDict()
        self.by_phase: Counter[OwnedPhase] = Counter()
        self.slots = slots
        self.spare = spare
        self.idle: OrderedDict[SequenceId, OwnedSequence] = OrderedDict()
        self.queued = 0
        self.queued_bytes = 0

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def is_busy(self) -> bool:
        """Whether any sequence has a step that runs, or may soon."""
        if len(self.by_id) > self.by_phase[OwnedPhase.READY] or any(map(len, self.ready)):
            return True
        # A step that waits until the one before it is final is offered to no batch yet.
        waits = self.one_by_one or bool(self.careful)
        return waits and any(owned.head is not None for owned in self.by_id.values())

    @property
    def waiting(self) -> int:
        """Number of accepted steps that do not run yet."""
        return self.queued - self.by_phase[OwnedPhase.RUNNING]

    @property
    def suspects(self) -> list[OwnedSequence]:
        """Suspected sequences that wait for their turn to be tried."""
        if not self.by_phase[OwnedPhase.SUSPECTED]:
            return []
        return [owned for owned in self.by_id.values() if owned.phase is OwnedPhase.SUSPECTED]

    def behind_ends(self, slots: int) -> int:
        """Number of accepted steps that would be in Triton's backlog: those of runs that began behind the END of a run
        that has its slot yet, beyond the runs for which another slot would be free. slots: of all instances
        """
        runs: list[list[QueuedStep]] = []
        for owned in self.by_id.values():
            run: list[QueuedStep] = []
            for _, queued in sorted(owned.steps.items()):
                run.append(queued)
                if queued.step.flags & END:
                    run = []
                    runs.append(run)
        later = sorted(filter(None, runs), key=lambda run: run[0].queued_us)
        return sum(map(len, later[max(0, slots - len(self)) :]))

    @property
    def is_crowded(self) -> bool:
        """Whether sequences should leave, and some can. Half of the spare slots may be taken before, so that many leave
        together.
        """
        return bool(self.idle) and 2 * (self.slots - len(self.by_id)) < self.spare

    def runs_one_by_one(self, owned: OwnedSequence) -> bool:
        """Whether a step of the sequence begins only when the step before it is final."""
        return self.one_by_one or owned.sequence in self.careful

    def get(self, sequence: SequenceId, epoch: Epoch) -> OwnedSequence | None:
        """The sequence, if it is owned here in that epoch."""
        owned = self.by_id.get(sequence)
        return owned if owned is not None and owned.epoch == epoch else None

    def next_fetches(self, waited_for: int, idle: int) -> list[OwnedSequence]:
        """Takes out the sequences whose checkpoints are fetched next. Sequences with a step that waits come first, at
        most `waited_for`; only when there are none of these, at most `idle` others.
        """
        queue, most = (self.awaited, waited_for) if self.awaited else (self.to_fetch, idle)
        return [queue.popitem(last=False)[1] for _ in range(min(most, len(queue)))]

    def next_leaving(self, most: int) -> list[OwnedSequence]:
        """Takes out the sequences that are to leave, so that the spare slots are free again."""
        if not self.is_crowded:
            return []
        wanted = self.spare - (self.slots - len(self.by_id))
        return [self.idle.popitem(last=False)[1] for _ in range(min(wanted, most, len(self.idle)))]

    def rest(self, owned: OwnedSequence) -> None:
        """Notes that a sequence has just been used, if it is idle now and can leave at no cost."""
        if not self.spare:
            return
        is_idle = owned.phase is OwnedPhase.READY and not owned.steps and owned.committed == owned.next_step - 1
        if is_idle and not owned.kept.entries:
            self.idle[owned.sequence] = owned

    def fetch(self, owned: OwnedSequence) -> None:
        """Has a sequence's checkpoint fetched."""
        (self.awaited if owned.steps else self.to_fetch)[owned.sequence] = owned

    def move(self, owned: OwnedSequence, how: str) -> None:
        """Changes the phase of a sequence. Raises AssertionError for a move that is not legal."""
        after = OWNED_MOVES.get((owned.phase, how))
        assert after is not None, f"{owned.sequence}: '{how}' while {owned.phase}"
        self.by_phase[owned.phase] -= 1
        self.by_phase[after] += 1
        owned.phase = after

    def put(self, owned: OwnedSequence, queued: QueuedStep) -> None:
        """Queues a step that was taken in. Its sequence is not idle any more."""
        owned.steps[queued.step.step] = queued
        if queued.step.step > owned.last[0]:
            owned.last = queued.step.step, queued.step.entry
        self.idle.pop(owned.sequence, None)
        if self.to_fetch.pop(owned.sequence, None) is not None:
            self.fetch(owned)
        self.queued += 1
        self.queued_bytes += len(queued.step.message)
        if queued.step.suspicion or queued.step.given_up:
            self.careful.add(owned.sequence)

    def take_out(self, owned: OwnedSequence, step: StepNumber) -> None:
        """A step is concluded, or was before."""
        queued = owned.steps.pop(step)
        self.queued -= 1
        self.queued_bytes -= len(queued.step.message)

    def adopt(self, entry: InboxStep | InboxOwned, *, start: StepNumber) -> OwnedSequence:
        """A sequence comes here. start: the step of its START, if that needs no state, so that it can run at once; else
        0, and its checkpoint is to be fetched
        """
        suspicion = entry.suspicion if isinstance(entry, InboxStep) else 0
        owned = OwnedSequence(
            entry.sequence, entry.epoch, entry.instance, entry.slot, start, start, entry.committed, suspicion
        )
        self.by_id[entry.sequence] = owned
        if suspicion:
            self.move(owned, "suspected")
        elif start:
            self.move(owned, "started")
        else:
            self.move(owned, "came")
            self.fetch(owned)
        return owned

    def seat(self, owned: OwnedSequence) -> None:
        """Gives a sequence its slot, which is free."""
        self.by_slot[owned.instance, owned.slot] = owned

    def drop(self, owned: OwnedSequence) -> None:
        """Forgets a sequence. Its ready step leaves its slot, if it had got the slot."""
        del self.by_id[owned.sequence]
        self.careful.discard(owned.sequence)
        self.to_fetch.pop(owned.sequence, None)
        self.awaited.pop(owned.sequence, None)
        self.idle.pop(owned.sequence, None)
        if self.gathering:
            self.gathering[owned.instance].away.pop(owned.sequence, None)
        for step in list(owned.steps):
            self.take_out(owned, step)
        place = (owned.instance, owned.slot)
        if self.by_slot.get(place) is owned:
            del self.by_slot[place]
            self.ready[owned.instance].withdraw(owned.slot)
        self.move(owned, "dropped")
