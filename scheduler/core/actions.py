"""What the scheduler of one model wants done. Actions are carried out in the order in which they are given."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.core.backlog import Entry
from scheduler.core.slots import SlotAddress
from shared.contract.ids import Epoch, ExecutorId, SequenceId


@dataclass(frozen=True, slots=True)
class Assign:
    """Give a sequence this slot. Its outcome comes back as `Assigned`.

    entry   its place in the starts stream; tells this wait from another one of the same sequence
    moving  its state comes from another executor
    paged   it had given up its slot: its state comes from its checkpoint
    """

    sequence: SequenceId
    place: SlotAddress
    entry: Entry
    moving: bool = False
    cause: str = ""
    paged: bool = False


@dataclass(frozen=True, slots=True)
class Vacate:
    """Page a sequence that holds this slot, if no step of it is in flight. `Vacated` says whether it was."""

    sequence: SequenceId
    place: SlotAddress
    epoch: Epoch
    cause: str = ""


@dataclass(frozen=True, slots=True)
class WantSlots:
    """Have so many sequences of the version paged by the commits that leave them without a step; for a while, or until
    it is said again."""

    version: str
    count: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Take sequences of the model away from an executor, then move the steps in its inbox on (`Drain`).

    The sequences come back as `SequenceWaits`, moving; when all are taken, `Reclaimed` does.

    only  those of these versions, which it serves no more; (): every sequence
    """

    executor: ExecutorId
    cause: str = ""
    only: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Drain:
    """Move the steps of an executor's inbox that are not its own any more to where they belong."""

    executor: ExecutorId
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove a lost executor's registration, if it owns nothing of any model any more; then `Forgotten` comes."""

    executor: ExecutorId
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Reject:
    """End a sequence that waits in this place: each of its steps gets this message, UNAVAILABLE."""

    sequence: SequenceId
    entry: Entry
    version: str
    message: str
    cause: str = ""


@dataclass(frozen=True, slots=True)
class LookForExpired:
    """Look at the sequences whose deadline is not after `now_ms`, and end those whose idle marker is gone. What
    was found comes back as `Looked`."""

    now_ms: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class MoveOut:
    """Take a sequence out of its slot on an executor that lives, if it is between two steps and its state is in Redis.
    What became of it comes back as `MovedOut`; then the sequence itself comes back as `SequenceWaits`, moving.

    epoch     in which it was seen there; NO_EPOCH: it is to get a slot though it is paged
    executor  its owner; None if it is paged
    """

    sequence: SequenceId
    epoch: Epoch
    executor: ExecutorId | None
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Remove a wish: it came true, cannot come true, or took too long. entry: its place in the starts stream."""

    sequence: SequenceId
    entry: Entry
    cause: str = ""


Action = Assign | Vacate | WantSlots | MoveOut | Dismiss | Reclaim | Drain | Forget | Reject | LookForExpired
