"""Actions: what the core wants done in Redis. `scheduler.effects` carries them out in the order in which they come."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.core.backlog import Entry
from scheduler.core.slots import SlotAddress
from shared.contract.forecast import LineForecast
from shared.contract.ids import Epoch, ExecutorId, InstanceIndex, SequenceId, ShardId, SlotIndex


@dataclass(frozen=True, slots=True)
class Assign:
    """Give a sequence this slot. The outcome comes back as `Assigned`.

    entry   the sequence's entry in the starts stream; tells this wait from another wait of the same sequence
    moving  the sequence's state comes from another executor
    paged   the sequence had given up its slot, and its state comes from its checkpoint
    """

    sequence: SequenceId
    place: SlotAddress
    entry: Entry
    moving: bool = False
    cause: str = ""
    paged: bool = False


@dataclass(frozen=True, slots=True)
class Vacate:
    """Page the sequence in this slot, if it has no open step. `Vacated` says whether it was paged."""

    sequence: SequenceId
    place: SlotAddress
    epoch: Epoch
    cause: str = ""


@dataclass(frozen=True, slots=True)
class WantSlots:
    """Let commits page sequences of a version, until so many slots are free.

    A commit that leaves a sequence without a further step then pages it. The request expires after a short time, and a
    later one for the same version replaces it.
    """

    version: str
    count: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class LayOut:
    """Make free slots of a version spare ones in this shard (`scheduler.core.spares`)."""

    executor: ExecutorId
    version: str
    shard: ShardId
    slots: tuple[tuple[InstanceIndex, SlotIndex], ...]
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Recall:
    """Take an executor's spare slots back, in every shard. `RecallSent` comes back for each."""

    executor: ExecutorId
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Take all sequences of the model away from an executor that lives, then move the steps in its inbox on.

    Each sequence comes back as a moving `SequenceWaits`.

    only  take only sequences of these versions, which the executor serves no more, or these sequences, which cannot
          have the slots that their records name; (): every sequence
    """

    executor: ExecutorId
    cause: str = ""
    only: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReclaimPart:
    """Do as `Reclaim` does with some sequences of a lost executor: first with those that have a step in its inbox.

    `Reclaimed` comes back, and says whether there are more.
    """

    executor: ExecutorId
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove a lost executor's registration, if it owns no sequence of any model. If so, `Forgotten` comes back."""

    executor: ExecutorId
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Reject:
    """End a sequence that waits at this entry. Each of its steps is answered with this message, UNAVAILABLE."""

    sequence: SequenceId
    entry: Entry
    version: str
    message: str
    cause: str = ""


@dataclass(frozen=True, slots=True)
class LookForExpired:
    """End the idle sequences: of those whose deadline is not after `now_ms`, the ones whose idle marker is gone.

    The earliest deadline that was found comes back as `Looked`.
    """

    now_ms: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class MoveOut:
    """Take a sequence out of its slot on a living executor, if it is between two steps and its state is in Redis.

    `MovedOut` says whether it was taken. If so, the sequence then comes back as a moving `SequenceWaits`.

    epoch     the sequence's epoch in that slot; NO_EPOCH for a paged sequence, which has no slot and is to get one
    executor  the sequence's owner; None for a paged sequence
    """

    sequence: SequenceId
    epoch: Epoch
    executor: ExecutorId | None
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Pause:
    """Pause a sequence, wherever it is, and remove the wish. What it leaves comes through the feed, as for one that is
    paged, or that waits no longer.

    until_ms  end of the pause, Redis clock
    entry     the wish's entry in the starts stream
    """

    sequence: SequenceId
    until_ms: int
    entry: Entry
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Remove a wish that was fulfilled, cannot be, or took too long, or a question that was taken in.

    entry  its entry in the starts stream
    """

    sequence: SequenceId
    entry: Entry
    cause: str = ""


@dataclass(frozen=True, slots=True)
class LookAtIdle:
    """Look when idle sequences will expire: at most `count`, those with the earliest deadlines. It comes back as
    `IdleSeen`."""

    count: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell everybody how the model's waiting lines stand. It is forgotten after some seconds."""

    lines: tuple[LineForecast, ...]
    cause: str = ""


Action = (
    Assign
    | Vacate
    | WantSlots
    | MoveOut
    | LayOut
    | Recall
    | Pause
    | Dismiss
    | Reclaim
    | ReclaimPart
    | Forget
    | Reject
    | LookForExpired
    | LookAtIdle
    | Publish
)
