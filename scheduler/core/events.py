"""Events: what the core is told. Every event may come late or twice; the core recognises that.

cause   names the stream entry, tick or call that an event came from; it goes into the history and into the actions
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.core.backlog import Entry
from scheduler.core.slots import OfferedVersion, SlotAddress
from shared.contract.ids import Epoch, ExecutorId, SequenceId, ShardId


@dataclass(frozen=True, slots=True)
class ExecutorSeen:
    """An executor lives and offers these versions of the model. Comes again when the versions change."""

    executor: ExecutorId
    versions: tuple[OfferedVersion, ...]
    cause: str = ""


@dataclass(frozen=True, slots=True)
class ExecutorLost:
    """An executor's lease has ended, or it is leaving: its sequences must be moved."""

    executor: ExecutorId
    cause: str = ""


@dataclass(frozen=True, slots=True)
class SequenceFound:
    """While rebuilding: Redis says that a sequence holds this slot. tenant: whose it is"""

    sequence: SequenceId
    place: SlotAddress
    epoch: Epoch
    cause: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class ContendersFound:
    """While rebuilding: Redis says of several sequences that they hold the same slot of an executor."""

    executor: ExecutorId
    sequences: tuple[SequenceId, ...]
    cause: str = ""


@dataclass(frozen=True, slots=True)
class EpochsFound:
    """While rebuilding: the newest epoch of each shard. A sequence with an earlier one is found, or is over."""

    newest: Mapping[ShardId, Epoch]


@dataclass(frozen=True, slots=True)
class SequenceWaits:
    """A sequence waits for a slot: it is new, it was taken from its executor (moving), or it was paged and has a step.

    timeout_us  how long it may wait, 0 for ever; counts for the wait of a new sequence only (triton-spec 1.7)
    returning   it was paged
    tenant      whose it is; "": nobody's in particular
    """

    sequence: SequenceId
    version: str
    entry: Entry
    moving: bool = False
    timeout_us: int = 0
    cause: str = ""
    returning: bool = False
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class PatienceLowered:
    """A waiting sequence got a further step, whose timeout ends before those of its earlier steps (triton-spec 1.7).

    entry        the sequence's entry in the starts stream
    deadline_ms  by when the sequence must have its slot, Redis clock
    """

    sequence: SequenceId
    entry: Entry
    deadline_ms: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class IdleTimeCut:
    """A sequence may be idle for less long than was known: an operator or its client ends it, or its client has gone.

    until_ms  when its idle time is over, Redis clock
    """

    sequence: SequenceId
    until_ms: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class WaitEnded:
    """A sequence does not wait at that entry any more.

    kind  c: the client of one of its steps has left (triton-spec 1.8); x: its idle time ended while it was between two
          owners; h: it was paused
    """

    sequence: SequenceId
    entry: Entry
    kind: str = "c"
    cause: str = ""


@dataclass(frozen=True, slots=True)
class SequenceOver:
    """A sequence does not hold the slot of that epoch any more.

    kind      e: ended, x: expired, f: failed at START, o: lost, c: cancelled, p: paged, u: its record could not be read
    is_spare  its slot is a spare one now; else it is free
    """

    sequence: SequenceId
    epoch: Epoch
    kind: str = "e"
    cause: str = ""
    is_spare: bool = False


@dataclass(frozen=True, slots=True)
class SpareTaken:
    """A sequence has taken a spare slot (`scheduler.core.spares`). tenant: whose it is; taken_ms: when, Redis clock"""

    sequence: SequenceId
    place: SlotAddress
    epoch: Epoch
    tenant: str = ""
    cause: str = ""
    taken_ms: int = 0


@dataclass(frozen=True, slots=True)
class RecallSent:
    """The outcome of a `Recall` in one shard. number: what `SparesRecalled` will name"""

    executor: ExecutorId
    shard: ShardId
    number: int


@dataclass(frozen=True, slots=True)
class SparesRecalled:
    """An executor's spare slots were recalled in a shard. All that were taken before have been named."""

    executor: ExecutorId
    shard: ShardId
    number: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Assigned:
    """The outcome of an `Assign`: the sequence's new epoch, or 0 when the sequence did not wait any more."""

    sequence: SequenceId
    entry: Entry
    epoch: Epoch
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Vacated:
    """The outcome of a `Vacate`. freed: whether the sequence has given up its slot."""

    sequence: SequenceId
    epoch: Epoch
    freed: bool
    cause: str = ""


@dataclass(frozen=True, slots=True)
class MovedOut:
    """The outcome of a `MoveOut`. is_taken: the sequence has no slot any more; else nothing has changed."""

    sequence: SequenceId
    epoch: Epoch
    is_taken: bool
    cause: str = ""


@dataclass(frozen=True, slots=True)
class MoveWished:
    """An operator wants a sequence on another executor (`seqmesh seq move`).

    to     the wished executor; None: any other than the present one
    entry  the wish's entry in the starts stream
    """

    sequence: SequenceId
    to: ExecutorId | None
    entry: Entry
    cause: str = ""


@dataclass(frozen=True, slots=True)
class PauseWished:
    """An operator wants a sequence to run nothing (`seqmesh seq pause`).

    until_ms  end of the pause, Redis clock
    entry     the wish's entry in the starts stream
    """

    sequence: SequenceId
    until_ms: int
    entry: Entry
    cause: str = ""


@dataclass(frozen=True, slots=True)
class ForecastAsked:
    """Somebody wants to know how the model's waiting lines stand. sequence: the one that it is about

    entry  the question's entry in the starts stream
    """

    sequence: SequenceId
    entry: Entry
    cause: str = ""


@dataclass(frozen=True, slots=True)
class IdleSeen:
    """A `LookAtIdle` is done. expiries: idle sequences, and in how many ms each of them expires"""

    expiries: tuple[tuple[SequenceId, int], ...]
    cause: str = ""


@dataclass(frozen=True, slots=True)
class SharesSeen:
    """The operator has set how slots are shared among tenants. shares: as in `Turns`"""

    shares: Mapping[str, int]
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """A `ReclaimPart` is done.

    is_all  the executor owns no sequence of the model any more, and its inbox holds no step of one that was taken
    """

    executor: ExecutorId
    is_all: bool
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A `Forget` is done: nothing in Redis names the executor any more."""

    executor: ExecutorId
    cause: str = ""


@dataclass(frozen=True, slots=True)
class VersionsWithdrawn:
    """Versions that every executor has unloaded: the sequences that wait for a slot of them will never get one."""

    model: str
    versions: tuple[str, ...]
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Looked:
    """A `LookForExpired` is done. first_ms: the earliest deadline that it found; None when there is none."""

    now_ms: int
    first_ms: int | None
    cause: str = ""


@dataclass(frozen=True, slots=True)
class ClockRead:
    """The time by the clock of Redis. Comes before the events of a turn, and lets takeovers go on."""

    now_ms: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. now_ms: the clock of Redis, which also stamps the stream entries."""

    now_ms: int
    cause: str = ""


Event = (
    ExecutorSeen
    | ExecutorLost
    | SequenceFound
    | ContendersFound
    | EpochsFound
    | SequenceWaits
    | PatienceLowered
    | IdleTimeCut
    | WaitEnded
    | SequenceOver
    | SpareTaken
    | RecallSent
    | SparesRecalled
    | Assigned
    | Vacated
    | MovedOut
    | MoveWished
    | PauseWished
    | ForecastAsked
    | IdleSeen
    | SharesSeen
    | Reclaimed
    | Forgotten
    | VersionsWithdrawn
    | Looked
    | ClockRead
    | Tick
)
