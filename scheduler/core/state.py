"""What the leader of a model knows: executors with their slots, sequences with their slots, and the backlog.

All of it can be rebuilt from Redis (`scheduler.rebuild`). Only `scheduler.core.decide` and the modules that it calls
change it. The tables SEQUENCE_MOVES and EXECUTOR_MOVES are the legal changes of phase.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.core.backlog import Backlog, Entry, Turns
from scheduler.core.freed_slots import FreedSlots
from scheduler.core.history import History
from scheduler.core.placement import Ring
from scheduler.core.slot_holders import SlotHolders
from scheduler.core.slots import OfferedVersion, SlotAddress, SlotTable
from shared.contract.hashing import VIRTUAL_NODES
from shared.contract.ids import Epoch, ExecutorId, SequenceId, ShardId, first_shards

Lent = Mapping[ShardId, frozenset[SlotAddress]]
"""By shard: the slots that its sequences hold, or may hold."""


class SequencePhase(StrEnum):
    """The phase of a sequence, as its leader sees it.

    ABSENT     not known: not begun, over, or taken from its executor and not yet back through the starts stream
    WAITING    in the backlog; it has never had a slot
    MOVING     in the backlog; it had a slot, and its state comes from its former executor
    RETURNING  in the backlog; it was paged and has a step to be run
    ASSIGNING  the leader has given it a slot, and Redis has not confirmed that yet
    LIVE       it has a slot
    YIELDING   it has a slot, and is being asked to give it up
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
"""Phases in which the sequence holds a slot in Redis, as far as the leader has heard."""
WITH_SLOT = CONFIRMED | {SequencePhase.ASSIGNING}


class ExecutorPhase(StrEnum):
    """The phase of an executor. An executor that comes back has a new id, so no move leads back from LOST.

    SERVING  its slots are given to sequences
    LOST     its sequences are being reclaimed, a part in each turn
    EMPTY    it owns no sequence of this model; its registration is removed when that is true of every model
    """

    ABSENT = "absent"
    SERVING = "serving"
    LOST = "lost"
    EMPTY = "empty"


_ABSENT, _WAITING, _MOVING, _RETURNING, _ASSIGNING, _LIVE, _YIELDING = SequencePhase

SEQUENCE_MOVES: Mapping[tuple[SequencePhase, str], SequencePhase] = {
    (before, move): after
    for move, (befores, after) in {
        "begun": ({_ABSENT}, _WAITING),
        "moved": ({_ABSENT}, _MOVING),
        "returned": ({_ABSENT}, _RETURNING),
        "found": ({_ABSENT}, _LIVE),
        # It has taken a spare slot.
        "seated": ({_ABSENT}, _LIVE),
        "placed": (IN_LINE, _ASSIGNING),
        "confirmed": ({_ASSIGNING}, _LIVE),
        "asked": ({_LIVE}, _YIELDING),
        "kept": ({_YIELDING}, _LIVE),
        "cancelled": ({_WAITING}, _ABSENT),
        "expired": ({_MOVING}, _ABSENT),
        # An operator paused it while it waited for a slot.
        "paused": ({_MOVING, _RETURNING}, _ABSENT),
        "rejected": (IN_LINE, _ABSENT),
        "refused": ({_ASSIGNING}, _ABSENT),
        "over": (CONFIRMED, _ABSENT),
        # It gave up its slot; the leader knows it again when it has a step, or is resumed after a pause.
        "paged": (CONFIRMED, _ABSENT),
        # Taken from a living executor, to get another slot at once.
        "moved out": (CONFIRMED, _ABSENT),
        # Reclaimed from its executor.
        "taken": (WITH_SLOT, _ABSENT),
        # A later sequence with the same id waits or is live, so this one is over.
        "superseded": (IN_LINE | WITH_SLOT, _ABSENT),
    }.items()
    for before in befores
}
"""(phase, move) -> phase."""

EXECUTOR_MOVES: Mapping[tuple[ExecutorPhase, str], ExecutorPhase] = {
    (ExecutorPhase.ABSENT, "joined"): ExecutorPhase.SERVING,
    (ExecutorPhase.ABSENT, "lost"): ExecutorPhase.LOST,
    (ExecutorPhase.SERVING, "changed"): ExecutorPhase.SERVING,
    (ExecutorPhase.SERVING, "lost"): ExecutorPhase.LOST,
    (ExecutorPhase.LOST, "emptied"): ExecutorPhase.EMPTY,
    (ExecutorPhase.EMPTY, "forgotten"): ExecutorPhase.ABSENT,
}


@dataclass(frozen=True, slots=True)
class Policy:
    """The operator's settings.

    load_factor      the most that an executor's load may be, as a multiple of the mean
    virtual_nodes    points of an executor on the ring
    forget_after_ms  how long an empty executor's registration stays, so that every other leader has seen it die
    spare_slots      most slots of an executor and version that are laid out; 0: none are
    shards           those of the mesh
    """

    load_factor: float = 1.25
    virtual_nodes: int = VIRTUAL_NODES
    forget_after_ms: int = 6000
    spare_slots: int = 32
    shards: tuple[ShardId, ...] = first_shards(1)


NO_EPOCH = Epoch(0)


@dataclass(slots=True)
class Executor:
    """One executor.

    quiet_since_ms  when it became EMPTY, or when it was last tried to forget it
    spare_in        shards in which slots of it may be spare
    recalls         shards in which its spare slots are being recalled -> number of the recall; NO_EPOCH: not sent yet
    """

    executor: ExecutorId
    phase: ExecutorPhase
    versions: tuple[OfferedVersion, ...] = ()
    quiet_since_ms: int = 0
    spare_in: set[ShardId] = field(default_factory=set[ShardId])
    recalls: dict[ShardId, int] = field(default_factory=dict[ShardId, int])


@dataclass(slots=True)
class Sequence:
    """One known sequence.

    entry         its entry in the starts stream; None when it was found live at a rebuild
    tenant        whose it is; "": nobody's in particular
    place         its slot; None while it is in the backlog
    over_epoch    while ASSIGNING: the highest epoch of which an end was heard, possibly the one that is being given
    times_stayed  how often it could not be taken out of its slot
    ask_after_ms  when to try that again
    """

    sequence: SequenceId
    version: str
    phase: SequencePhase
    entry: Entry | None = None
    tenant: str = ""
    place: SlotAddress | None = None
    epoch: Epoch = NO_EPOCH
    over_epoch: Epoch = NO_EPOCH
    times_stayed: int = 0
    ask_after_ms: int = 0


@dataclass(slots=True)
class Wish:
    """An operator's wish to move a sequence.

    entry     the wish's entry in the starts stream
    to        the wished executor; None: any other than the present one
    until_ms  when the wish is given up
    left      the executor that the sequence was last taken out of, or tried to be; for a paged sequence the wished
              executor; None before the first attempt
    """

    entry: Entry
    to: ExecutorId | None
    until_ms: int
    left: ExecutorId | None = None


@dataclass(slots=True)
class LeaderState:
    """Everything that the leader of one model knows.

    now_ms           the latest time that was heard, Redis clock
    look_ms          when to look for idle sequences next; none can be due before
    rings            by version: the executors that serve it
    backlogs         by version: the sequences that wait for a slot
    holders          by version: the sequences that hold slots
    timeouts         heap of (deadline, entry, sequence) of waiting sequences
    underway         sequences that were moved out and have not come back yet -> version, and since when. The version of
                     a paged sequence is "": the leader does not know it
    uneven_since_ms  versions whose load is uneven -> since when
    wishes           operators' wishes, one per sequence
    freed            by version: how often slots become free
    withheld         of each shard whose node of a Cluster is away: the slots that its sequences may hold, which nobody
                     else gets. All other shards are led as ever; when the node is back, another leader leads all
    found_until      epochs up to which sequences were found when the state was rebuilt, by shard
    used             versions that have had sequences
    superseded       sequences of whose end the feed is still to tell, by epoch -> the slot, which counts as spare
    recalled         versions whose spare slots were recalled: some are laid out again when nobody waits
    shares           of tenants (`Turns`)
    forecast_until_ms, forecast_next_ms  until when forecasts are wanted, and when the next one is due
    """

    policy: Policy = field(default_factory=Policy)
    now_ms: int = 0
    look_ms: int = 0
    executors: dict[ExecutorId, Executor] = field(default_factory=dict[ExecutorId, Executor])
    sequences: dict[SequenceId, Sequence] = field(default_factory=dict[SequenceId, Sequence])
    rings: dict[str, Ring] = field(default_factory=dict[str, Ring])
    backlogs: defaultdict[str, Backlog] = field(default_factory=lambda: defaultdict[str, Backlog](Backlog))
    holders: defaultdict[str, SlotHolders] = field(default_factory=lambda: defaultdict[str, SlotHolders](SlotHolders))
    timeouts: list[tuple[int, Entry, SequenceId]] = field(default_factory=list[tuple[int, Entry, SequenceId]])
    underway: dict[SequenceId, tuple[str, int]] = field(default_factory=dict[SequenceId, tuple[str, int]])
    uneven_since_ms: dict[str, int] = field(default_factory=dict[str, int])
    wishes: dict[SequenceId, Wish] = field(default_factory=dict[SequenceId, Wish])
    freed: defaultdict[str, FreedSlots] = field(default_factory=lambda: defaultdict[str, FreedSlots](FreedSlots))
    withheld: Lent = field(default_factory=dict[ShardId, frozenset[SlotAddress]])
    found_until: Mapping[ShardId, Epoch] = field(default_factory=dict[ShardId, Epoch])
    used: set[str] = field(default_factory=set[str])
    superseded: dict[tuple[SequenceId, Epoch], SlotAddress] = field(
        default_factory=dict[tuple[SequenceId, Epoch], SlotAddress]
    )
    recalled: set[str] = field(default_factory=set[str])
    shares: Mapping[str, int] = field(default_factory=dict[str, int])
    forecast_until_ms: int = 0
    forecast_next_ms: int = 0
    history: History = field(default_factory=History)

    @property
    def shards(self) -> tuple[ShardId, ...]:
        """The shards that are led: all but those that are away."""
        return tuple(shard for shard in self.policy.shards if shard not in self.withheld)

    def ring(self, version: str) -> Ring:
        """The executors that serve a version, with their slots."""
        ring = self.rings.get(version)
        if ring is None:
            ring = self.rings[version] = Ring(self.policy.load_factor, self.policy.virtual_nodes)
        return ring

    def forget_gone_versions(self) -> None:
        """Forgets versions that no executor offers and for which nobody waits: they come and go for as long as a leader
        leads, and each tick looks at all that it knows."""
        for version in [one for one, ring in self.rings.items() if not (ring.tables or self.backlogs[one])]:
            for known in (self.rings, self.backlogs, self.holders, self.freed, self.uneven_since_ms):
                known.pop(version, None)
            self.used.discard(version)

    def turns(self, version: str) -> Turns:
        """What decides which tenant gets the next slot of a version."""
        return Turns(self.holders[version].by_tenant, self.shares)

    def tables(self, executor: ExecutorId) -> list[SlotTable]:
        """An executor's slot tables, in the order of the versions."""
        return [ring.tables[executor] for _, ring in sorted(self.rings.items()) if executor in ring.tables]

    def table_at(self, place: SlotAddress) -> SlotTable:
        """The slot table that a slot belongs to."""
        return self.rings[place.version].tables[place.executor]

    def held_by(self, executor: ExecutorId) -> list[Sequence]:
        """The sequences in an executor's slots."""
        return [self.sequences[sequence] for table in self.tables(executor) for sequence in table.sequences()]

    def move(self, sequence: Sequence, how: str, cause: str) -> None:
        """Changes the phase of a sequence by the table, and keeps its version's `SlotHolders` in step with it."""
        before = sequence.phase
        sequence.phase = after = self.history.step(SEQUENCE_MOVES, sequence.sequence, how, before, cause)
        holders = self.holders[sequence.version]
        if before is SequencePhase.LIVE:
            holders.remove(sequence.sequence)
        if after is SequencePhase.LIVE:
            holders.add(sequence.sequence)
        if change := (after in WITH_SLOT) - (before in WITH_SLOT):
            holders.count(sequence.tenant, change)
            if change < 0:
                self.backlogs[sequence.version].reconsider(sequence.tenant)
        holders.asked += (after is SequencePhase.YIELDING) - (before is SequencePhase.YIELDING)

    def move_executor(self, executor: Executor, how: str, cause: str) -> None:
        """Changes the phase of an executor by the table."""
        executor.phase = self.history.step(EXECUTOR_MOVES, executor.executor, how, executor.phase, cause)
