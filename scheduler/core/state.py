"""What the leader of a model knows: executors with their slots, sequences with their places, and the backlog.

All of it is a picture of Redis and can be made anew from there (`scheduler.rebuild`). Only `scheduler.core.decide`
changes it. The legal moves of a sequence and of an executor stand in the two tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.core.backlog import Backlog, Entry
from scheduler.core.history import History
from scheduler.core.placement import Ring
from scheduler.core.slots import OfferedVersion, SlotAddress, SlotTable
from scheduler.core.tenants import Tenants
from shared.contract.ids import Epoch, ExecutorId, SequenceId


class SequencePhase(StrEnum):
    """Where a sequence stands, as its leader sees it.

    ABSENT     not known: not begun, over, or taken from its executor and not yet back through the starts stream
    WAITING    in the backlog, it has never had a slot
    MOVING     in the backlog, its state comes from another executor
    RETURNING  in the backlog, it was paged and has a step to be run
    ASSIGNING  it has a slot here, Redis has not confirmed it
    LIVE       it has a slot
    YIELDING   it has a slot, and is being asked for it
    """

    ABSENT = "absent"
    WAITING = "waiting"
    MOVING = "moving"
    RETURNING = "returning"
    ASSIGNING = "assigning"
    LIVE = "live"
    YIELDING = "yielding"


IN_LINE = frozenset({SequencePhase.WAITING, SequencePhase.MOVING, SequencePhase.RETURNING})
CONFIRMED = frozenset({SequencePhase.LIVE, SequencePhase.YIELDING})
"""Those that hold a slot in Redis, as far as has been heard."""


class ExecutorPhase(StrEnum):
    """Where an executor stands. Ids are per registration, so there is no way back from LOST.

    SERVING  its slots are given to sequences
    LOST     its sequences are being taken away
    EMPTY    it owns nothing of this model; its registration goes when that is true of every model
    """

    ABSENT = "absent"
    SERVING = "serving"
    LOST = "lost"
    EMPTY = "empty"


SEQUENCE_MOVES: Mapping[tuple[str, str], str] = {
    (SequencePhase.ABSENT, "begun"): SequencePhase.WAITING,
    (SequencePhase.ABSENT, "moved"): SequencePhase.MOVING,
    (SequencePhase.ABSENT, "returned"): SequencePhase.RETURNING,
    (SequencePhase.ABSENT, "found"): SequencePhase.LIVE,
    (SequencePhase.WAITING, "placed"): SequencePhase.ASSIGNING,
    (SequencePhase.MOVING, "placed"): SequencePhase.ASSIGNING,
    (SequencePhase.RETURNING, "placed"): SequencePhase.ASSIGNING,
    (SequencePhase.WAITING, "rejected"): SequencePhase.ABSENT,
    (SequencePhase.MOVING, "rejected"): SequencePhase.ABSENT,
    (SequencePhase.RETURNING, "rejected"): SequencePhase.ABSENT,
    (SequencePhase.WAITING, "cancelled"): SequencePhase.ABSENT,
    (SequencePhase.MOVING, "expired"): SequencePhase.ABSENT,
    (SequencePhase.WAITING, "superseded"): SequencePhase.ABSENT,
    (SequencePhase.MOVING, "superseded"): SequencePhase.ABSENT,
    (SequencePhase.RETURNING, "superseded"): SequencePhase.ABSENT,
    (SequencePhase.ASSIGNING, "confirmed"): SequencePhase.LIVE,
    (SequencePhase.ASSIGNING, "refused"): SequencePhase.ABSENT,
    (SequencePhase.ASSIGNING, "superseded"): SequencePhase.ABSENT,
    (SequencePhase.ASSIGNING, "taken"): SequencePhase.ABSENT,
    (SequencePhase.LIVE, "over"): SequencePhase.ABSENT,
    (SequencePhase.LIVE, "superseded"): SequencePhase.ABSENT,
    (SequencePhase.LIVE, "taken"): SequencePhase.ABSENT,
    (SequencePhase.LIVE, "paged"): SequencePhase.ABSENT,
    (SequencePhase.LIVE, "moved out"): SequencePhase.ABSENT,
    (SequencePhase.LIVE, "asked"): SequencePhase.YIELDING,
    (SequencePhase.YIELDING, "kept"): SequencePhase.LIVE,
    (SequencePhase.YIELDING, "paged"): SequencePhase.ABSENT,
    (SequencePhase.YIELDING, "over"): SequencePhase.ABSENT,
    (SequencePhase.YIELDING, "superseded"): SequencePhase.ABSENT,
    (SequencePhase.YIELDING, "taken"): SequencePhase.ABSENT,
    (SequencePhase.YIELDING, "moved out"): SequencePhase.ABSENT,
}
"""(phase, move) -> phase. *superseded*: the same id waits anew, so its earlier life is over; *taken*: reclaimed;
*paged*: it gave up its slot and is not known until it has a step again; *moved out*: taken from an executor that lives,
to get another slot at once."""

EXECUTOR_MOVES: Mapping[tuple[str, str], str] = {
    (ExecutorPhase.ABSENT, "joined"): ExecutorPhase.SERVING,
    (ExecutorPhase.ABSENT, "lost"): ExecutorPhase.LOST,
    (ExecutorPhase.SERVING, "changed"): ExecutorPhase.SERVING,
    (ExecutorPhase.SERVING, "lost"): ExecutorPhase.LOST,
    (ExecutorPhase.LOST, "emptied"): ExecutorPhase.EMPTY,
    (ExecutorPhase.EMPTY, "forgotten"): ExecutorPhase.ABSENT,
}


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator chose.

    load_factor      bound of an executor's load over the mean
    virtual_nodes    points of an executor on the ring
    forget_after_ms  an empty executor's registration stays so long, so that every other leader has seen it die
    """

    load_factor: float = 1.25
    virtual_nodes: int = 64
    forget_after_ms: int = 6000


NO_EPOCH = Epoch(0)


@dataclass(slots=True)
class Executor:
    """One executor. quiet_since_ms: since when it is EMPTY, or was last tried to be forgotten."""

    executor: ExecutorId
    phase: ExecutorPhase
    versions: tuple[OfferedVersion, ...] = ()
    quiet_since_ms: int = 0


@dataclass(slots=True)
class Sequence:
    """One known sequence.

    entry       its place in the starts stream; None when it was found live
    moving      whether its state comes from another executor
    returning   whether it was paged
    over_epoch  while ASSIGNING: an end that was heard of, possibly of the very epoch that is being given
    times_kept, ask_after_ms  how often it could not be taken out of its slot, and when to try again
    """

    sequence: SequenceId
    version: str
    phase: SequencePhase
    entry: Entry | None = None
    moving: bool = False
    returning: bool = False
    place: SlotAddress | None = None
    epoch: Epoch = NO_EPOCH
    over_epoch: Epoch = NO_EPOCH
    times_kept: int = 0
    ask_after_ms: int = 0


@dataclass(slots=True)
class Wish:
    """An operator wants a sequence elsewhere.

    entry  its place in the starts stream
    to     on which executor; None: on any other
    left   the executor from which it was tried to be taken (of a paged one: to which), None before
    """

    entry: Entry
    to: ExecutorId | None
    until_ms: int
    left: ExecutorId | None = None


@dataclass(slots=True)
class LeaderState:
    """Everything the leader of one model keeps in mind.

    now_ms           the last that was heard
    look_ms          when idle sequences are to be looked for next: before, none can be due
    underway         sequences that were moved out and have not come back yet: version ("" of a paged one: nobody knows
                     it here), and since when
    uneven_since_ms  versions whose load is uneven
    wishes           moves that an operator wants
    """

    policy: Policy = field(default_factory=Policy)
    now_ms: int = 0
    look_ms: int = 0
    executors: dict[ExecutorId, Executor] = field(default_factory=dict[ExecutorId, Executor])
    sequences: dict[SequenceId, Sequence] = field(default_factory=dict[SequenceId, Sequence])
    rings: dict[str, Ring] = field(default_factory=dict[str, Ring])
    backlogs: dict[str, Backlog] = field(default_factory=dict[str, Backlog])
    holders: dict[str, Tenants] = field(default_factory=dict[str, Tenants])
    timeouts: list[tuple[int, Entry, SequenceId]] = field(default_factory=list[tuple[int, Entry, SequenceId]])
    underway: dict[SequenceId, tuple[str, int]] = field(default_factory=dict[SequenceId, tuple[str, int]])
    uneven_since_ms: dict[str, int] = field(default_factory=dict[str, int])
    wishes: dict[SequenceId, Wish] = field(default_factory=dict[SequenceId, Wish])
    history: History = field(default_factory=History)

    def ring(self, version: str) -> Ring:
        """The executors that serve a version."""
        ring = self.rings.get(version)
        if ring is None:
            ring = self.rings[version] = Ring(self.policy.load_factor, self.policy.virtual_nodes)
        return ring

    def backlog(self, version: str) -> Backlog:
        """The sequences that wait for a slot of a version."""
        return self.backlogs.setdefault(version, Backlog())

    def tenants(self, version: str) -> Tenants:
        """The sequences that hold slots of a version."""
        return self.holders.setdefault(version, Tenants())

    def tables(self, executor: ExecutorId) -> list[SlotTable]:
        """An executor's slot tables, by version."""
        return [ring.tables[executor] for _, ring in sorted(self.rings.items()) if executor in ring.tables]

    def table_at(self, place: SlotAddress) -> SlotTable:
        """The slot table that a place belongs to."""
        return self.rings[place.version].tables[place.executor]

    def held_by(self, executor: ExecutorId) -> list[Sequence]:
        """The sequences in an executor's slots, by place."""
        return [self.sequences[sequence] for table in self.tables(executor) for _, sequence in table.holders()]


@dataclass(frozen=True, slots=True)
class StateView:
    """What can be seen of a state from outside, comparable: live sequences, those in line, and executors by phase."""

    live: tuple[tuple[SequenceId, SlotAddress, Epoch], ...]
    waiting: tuple[tuple[str, SequenceId, bool], ...]
    executors: tuple[tuple[ExecutorId, ExecutorPhase], ...]


def view(state: LeaderState) -> StateView:
    """The state as a value."""
    placed = [(s.sequence, s.place, s.epoch) for s in state.sequences.values()]
    return StateView(
        live=tuple(sorted((sequence, place, epoch) for sequence, place, epoch in placed if place is not None)),
        waiting=tuple(
            (version, waiting.sequence, state.sequences[waiting.sequence].moving)
            for version, backlog in sorted(state.backlogs.items())
            for waiting in backlog.in_order()
        ),
        executors=tuple(sorted((e.executor, e.phase) for e in state.executors.values())),
    )
