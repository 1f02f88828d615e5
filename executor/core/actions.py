"""Actions: what `executor.core.decide` wants done. `executor.sequences.sequence_model` carries them out, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from executor.core.recovery import Change
from executor.core.state import Checkpoint, OwnedSequence, QueuedStep, VoidCause
from shared.contract.ids import InstanceIndex, SequenceId, SlotIndex, StepNumber


class BatchMember(msgspec.Struct, frozen=True, eq=False):
    """A step in a batch. save: its state goes to Redis with its commit"""

    owned: OwnedSequence
    queued: QueuedStep
    save: bool


class RunBatch(msgspec.Struct, frozen=True, eq=False):
    """Run these steps together; `BatchDone` follows.

    members  None is a null row
    began_us  when the engine was given it; a staged batch runs later, when the one before it has ended
    gained   rows that it gained by waiting for them; None if it did not wait
    """

    instance: InstanceIndex
    members: Sequence[BatchMember | None]
    began_us: int
    gained: int | None = None


class HowAnswered(StrEnum):
    """How a step came to its answer.

    RAN        the model ran it
    REFUSED    the model cannot take it
    VOID       its sequence has no state
    CANCELLED  its caller has gone
    GIVEN_UP   it is likely to kill its executor
    """

    RAN = "ran"
    REFUSED = "refused"
    VOID = "void"
    CANCELLED = "cancelled"
    GIVEN_UP = "given up"


class StepAnswer(msgspec.Struct, frozen=True, eq=False):
    """Commit a step with its answer.

    row     its row in the batch, if it was run
    cause   why its sequence has no state, if that is the answer
    number  its number since the START of its sequence; 0 if that is unknown
    change  what the commit changes about the sequence's recovery
    predecessor  trace context of the last step before a takeover, if this is the first traced step behind it; else None
    """

    queued: QueuedStep
    how: HowAnswered
    number: int
    change: Change
    row: int = 0
    cause: VoidCause | None = None
    predecessor: str | None = None


class Commit(msgspec.Struct, frozen=True, eq=False):
    """Commit these steps, in this order. batch: the batch of which the model ran some of them is counted with them"""

    instance: InstanceIndex
    answers: Sequence[StepAnswer]
    batch: bool = False


class LoadState(msgspec.Struct, frozen=True, eq=False):
    """Give the engine a sequence's state; `StateLoaded` follows."""

    owned: OwnedSequence
    checkpoint: Checkpoint


class Release(msgspec.Struct, frozen=True):
    """Tell the model that it may forget a sequence, and drop its state. slot: None if another sequence has it"""

    instance: InstanceIndex
    sequence: SequenceId
    slot: SlotIndex | None


class Describe(msgspec.Struct, frozen=True, eq=False):
    """Describe the state of a sequence that has expired in the log, if the model asks for that."""

    owned: OwnedSequence
    last_step: StepNumber


class Remove(msgspec.Struct, frozen=True):
    """Remove entries from the inbox: no takeover will need them."""

    entries: Sequence[str]


class Tell(msgspec.Struct, frozen=True, eq=False):
    """Log what happened to a sequence. level: name of a `logs.Level`"""

    level: str
    what: str
    owned: OwnedSequence
    fields: Mapping[str, int]


ExecutorAction = Commit | LoadState | Release | Describe | Remove | Tell
