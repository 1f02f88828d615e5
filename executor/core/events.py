"""Events: what `executor.core.decide` takes in.

The control messages of the inbox are events as they are: `InboxOwned`, `InboxCancelled`, `InboxVacated` and
`InboxExpired`. A step comes as a `QueuedStep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from executor.core.actions import BatchMember, RunBatch
from executor.core.state import Checkpoint, OwnedSequence, QueuedStep
from shared.contract.ids import Epoch, SequenceId, StepNumber
from shared.contract.messages import InboxCancelled, InboxExpired, InboxOwned, InboxVacated


class SuspectTried(msgspec.Struct, frozen=True, eq=False):
    """The turn of a suspected sequence has come."""

    owned: OwnedSequence


class CheckpointFetched(msgspec.Struct, frozen=True, eq=False):
    """What Redis holds of a sequence. checkpoint: None if it waits for an owner, or its record cannot be read"""

    owned: OwnedSequence
    checkpoint: Checkpoint | None


class StateLoaded(msgspec.Struct, frozen=True, eq=False):
    """The engine has taken a sequence's state. is_usable: False if it could not"""

    owned: OwnedSequence
    is_usable: bool = True


class RowEnd(StrEnum):
    """What became of a row.

    DONE    the step succeeded
    AGAIN   the model wants another pass of it before it answers (triton-spec 1.10)
    FAILED  it failed, and left its sequence's state as it was
    OPEN    its answers come one by one (decoupled models): `StepEnded` follows
    SAVED   it failed, and what it left of the state is in the answer, to be checkpointed
    LOST    it failed, and its sequence has no state any more
    """

    DONE = "done"
    AGAIN = "again"
    OPEN = "open"
    FAILED = "failed"
    SAVED = "saved"
    LOST = "lost"


class BatchDone(msgspec.Struct, frozen=True, eq=False):
    """A batch has run. ends: one for each row, None for a null row"""

    batch: RunBatch
    ends: Sequence[RowEnd | None]


class StepEnded(msgspec.Struct, frozen=True, eq=False):
    """The model has given its last answer to a step that its batch left open, and every answer before it is written."""

    member: BatchMember
    end: RowEnd


class StepsFinal(msgspec.Struct, frozen=True):
    """Redis has made these steps final, and their sequences go on here. In the order of each sequence."""

    steps: Sequence[tuple[SequenceId, Epoch, StepNumber]]


class OwnershipOver(msgspec.Struct, frozen=True):
    """A sequence is over, has another owner, or has given up its slot with a commit."""

    sequence: SequenceId
    epoch: Epoch


ExecutorEvent = (
    QueuedStep
    | InboxOwned
    | InboxCancelled
    | InboxVacated
    | InboxExpired
    | SuspectTried
    | CheckpointFetched
    | StateLoaded
    | BatchDone
    | StepEnded
    | StepsFinal
    | OwnershipOver
)
