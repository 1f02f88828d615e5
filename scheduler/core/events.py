"""What the scheduler of one model hears. Every event may come late or twice; the core recognises that.

cause   names the stream entry, tick or call that an event came from; it goes into the history and into the actions
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.core.backlog import Entry
from scheduler.core.slots import OfferedVersion, SlotAddress
from shared.contract.ids import Epoch, ExecutorId, SequenceId


@dataclass(frozen=True, slots=True)
class ExecutorSeen:
    """An executor lives and offers these versions of the model; said again when they change."""

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
    """While rebuilding: Redis says that a sequence holds this slot."""

    sequence: SequenceId
    place: SlotAddress
    epoch: Epoch
    cause: str = ""


@dataclass(frozen=True, slots=True)
class SequenceWaits:
    """A sequence has no slot: it is new, or (moving) its executor was lost, or it was paged and has a step again.

    timeout_us  how long it may wait, 0 for ever; honoured here only (triton-spec 1.7)
    returning   it was paged
    """

    sequence: SequenceId
    version: str
    entry: Entry
    moving: bool = False
    timeout_us: int = 0
    cause: str = ""
    returning: bool = False


@dataclass(frozen=True, slots=True)
class PatienceLowered:
    """A step was queued behind a waiting sequence's that may wait less long than those before it (triton-spec 1.7).

    entry        the place in which the sequence waits
    deadline_ms  by when it must have its slot, Redis clock
    """

    sequence: SequenceId
    entry: Entry
    deadline_ms: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class WaitEnded:
    """A sequence waits no longer in that place. kind: c the caller of one of its steps has gone (triton-spec 1.8),
    x it was between two owners, and its idle time is over."""

    sequence: SequenceId
    entry: Entry
    kind: str = "c"
    cause: str = ""


@dataclass(frozen=True, slots=True)
class SequenceOver:
    """A sequence of that epoch holds its slot no longer. kind: e ended, x expired, f failed at START, o lost,
    c cancelled, p paged."""

    sequence: SequenceId
    epoch: Epoch
    kind: str = "e"
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Assigned:
    """What became of an `Assign`: the epoch it was given, or 0 when the sequence did not wait any more."""

    sequence: SequenceId
    entry: Entry
    epoch: Epoch
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Vacated:
    """What became of a `Vacate`: whether the sequence of that epoch has given up its slot."""

    sequence: SequenceId
    epoch: Epoch
    freed: bool
    cause: str = ""


@dataclass(frozen=True, slots=True)
class MovedOut:
    """What became of a `MoveOut`. is_taken: the sequence has no slot any more; else nothing has changed."""

    sequence: SequenceId
    epoch: Epoch
    is_taken: bool
    cause: str = ""


@dataclass(frozen=True, slots=True)
class MoveWished:
    """An operator wants a sequence on another executor (`seqmesh move`).

    to     on which one; None: any other
    entry  the wish's place in the starts stream
    """

    sequence: SequenceId
    to: ExecutorId | None
    entry: Entry
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """A `Reclaim` is done: the executor owns no sequence of the model, and its inbox holds none of their steps."""

    executor: ExecutorId
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A `Forget` is done: nothing in Redis names the executor any more."""

    executor: ExecutorId
    cause: str = ""


@dataclass(frozen=True, slots=True)
class VersionsWithdrawn:
    """Versions that were unloaded everywhere: nobody will come who serves those that wait for them."""

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
    """What time it is by the clock of Redis, for the events that follow."""

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
    | SequenceWaits
    | PatienceLowered
    | WaitEnded
    | SequenceOver
    | Assigned
    | Vacated
    | MovedOut
    | MoveWished
    | Reclaimed
    | Forgotten
    | VersionsWithdrawn
    | Looked
    | ClockRead
    | Tick
)
