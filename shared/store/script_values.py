"""What scripts are told, and what they say: the values of the calls of `shared.store.scripts`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec

from shared.contract.errors import OUTCOMES, Code, Reason
from shared.contract.ids import Epoch, ExecutorId, InstanceIndex, SequenceId, ShardId, SlotIndex, StepNumber, Term
from shared.contract.limits import JOINED_MAX, RETRY_REPLIES, RETRY_REPLY_BYTES
from shared.contract.messages import ReplyMessage, encode
from shared.store.reading import text_of


class SubmitCode(IntEnum):
    """What became of a submitted step; negative: it was refused. The header of `submit.lua` describes each code."""

    DELIVERED = 0
    WAITING = 1
    REPEATED = 2
    JOINED = 3
    NEVER_SEEN = -1
    ENDED = -2
    EXPIRED = -3
    FAILED = -4
    LOST = -5
    BACKLOG_FULL = -6
    BUSY = -7
    WRONG_STEP = -8
    CANCELLED = -9
    LATE = -11
    ANSWERED = -12
    EXISTS = -13
    QUOTA = -14


class Submission(msgspec.Struct, frozen=True):
    """A step on its way into a sequence.

    digest         of its request id and content (`shared.contract.step_digest`), or b""
    expected_step  `sequence_step` of the request (1 at START), or None
    message        encoded `InferMessage`
    since_ms       when the step was first sent (clock of Redis), if the gateway sends it again without knowing what
                   became of it; else -1
    tenant         whose sequence it is, if it begins one; "": nobody's in particular
    tenant_max     most live sequences of the tenant in this shard; 0: any number
    prefers        the executor whose spare slots a new sequence may take; "": none
    """

    sequence: SequenceId
    flags: int
    digest: bytes
    expected_step: int | None
    version: str
    gateway: str
    token: str
    timeout_us: int
    message: bytes
    since_ms: int = -1
    tenant: str = ""
    tenant_max: int = 0
    prefers: str = ""


class Submitted(msgspec.Struct, frozen=True):
    """What `submit` says of one step.

    step     number of the accepted step; for a refusal, the last accepted step (since START)
    run      name of what began with the latest START, given to no other run; "" for a refusal, and for a step before it
    extra    the stored reply (REPEATED), the sequence's birth (JOINED), or which bound is reached (BACKLOG_FULL)
    cut_off  name of the run that went on until this START began the next one; "" if there was none
    """

    code: SubmitCode
    step: int
    run: str = ""
    extra: bytes = b""
    cut_off: str = ""

    @property
    def birth(self) -> str:
        """Tells the accepted step's sequence from earlier and later ones under the same id."""
        return text_of(self.extra) if self.code is SubmitCode.JOINED else self.run.partition(".")[0]


class Drawn(msgspec.Struct, frozen=True):
    """How many requests a tenant may send now, at most as many as it wanted, and in how many us the next one."""

    granted: int
    next_us: int


class LedShard(NamedTuple):
    """Where the leader of a model acts, and in which term. Its scripts raise redis.ResponseError that begins with
    FENCED when a newer leader has acted there.
    """

    shard: ShardId
    model: str
    term: Term


class OfSequence(msgspec.Struct, frozen=True):
    """What a script is told of one sequence: its record is a key, the other fields are arguments, in their order."""

    sequence: SequenceId


class Assignment(OfSequence, frozen=True):
    """A sequence's new executor, instance and slot.

    entry  id of its wait in the starts stream; a later sequence of the same id waits under another entry
    """

    entry: str
    executor: ExecutorId
    instance: InstanceIndex
    slot: SlotIndex


class Rejection(OfSequence, frozen=True):
    """A waiting sequence that is refused. entry: id of its wait; reply: encoded `ReplyMessage` for each of its steps"""

    entry: str
    reply: bytes


class Vacation(OfSequence, frozen=True):
    """A live sequence that shall give up its slot, if it has no open step.

    epoch   in which the scheduler saw it in that slot; 0: it has no slot, because it is paged
    moving  True: it gets another slot at once; False: it is paged until its next step
    """

    epoch: Epoch
    moving: bool = False


class VacateCode(IntEnum):
    """What became of a `Vacation`.

    KEPT       it keeps its slot: the scheduler's view of it is outdated, or it has an open step
    VACATED    its slot is free
    UNDRAINED  its slot is free, but its owner's inbox holds steps since its checkpoint: the inbox must be drained
    """

    KEPT = 0
    VACATED = 1
    UNDRAINED = 2


class ExpiryCode(IntEnum):
    """What became of a sequence that was looked at because its idle time may be over.

    OPEN     it is not over, or was before
    EXPIRED  it was idle for too long
    ENDED    its idle time was over because an operator or a client had ended it
    """

    OPEN = 0
    EXPIRED = 1
    ENDED = 2


class Cancellation(OfSequence, frozen=True):
    """An accepted step whose caller has gone. birth, step: from its `Submitted`"""

    birth: str
    step: int
    gateway: str
    token: str


class Orphan(OfSequence, frozen=True):
    """A sequence whose connection was closed before its END.

    token     token of the latest step that came over the connection
    grace_ms  how long the sequence may be idle from now on
    """

    token: str
    grace_ms: int


class Pausing(OfSequence, frozen=True):
    """A sequence that is to run nothing. until_ms: end of the pause, clock of Redis"""

    until_ms: int


class Ending(OfSequence, frozen=True):
    """A sequence that is to end. run: as `Submitted.run`, or "" for whatever run it is in"""

    run: str = ""


def ended_by(who: str) -> bytes:
    """The encoded reply to the steps of a sequence that is ended while it waits for its first slot."""
    error = f"{who} has ended the sequence before it had a slot"
    return encode(ReplyMessage("", error_code=Code.CANCELLED, error=error, reason=Reason.CANCELLED))


class CancelCode(IntEnum):
    """What became of a `Cancellation`.

    SHARED   another caller waits for the same step: nothing was cancelled
    NOTHING  the step was answered before, or the sequence is over
    TOLD     the step will not be run, unless its owner has begun to
    REMOVED  the sequence was waiting for its first slot; all of it was removed
    """

    SHARED = -1
    NOTHING = 0
    TOLD = 1
    REMOVED = 2


class EndCode(IntEnum):
    """What became of an `Ending`.

    NOTHING  there is none, or it is over already
    ENDS     it accepts nothing but a START; no step is open, so its leader ends it now
    REMOVED  it was waiting for its first slot, and is over
    CLOSED   it accepts nothing but a START, and ends when its open steps have been answered
    """

    NOTHING = 0
    ENDS = 1
    REMOVED = 2
    CLOSED = 3


class ReopenCode(IntEnum):
    """What became of an exported sequence that is to be opened again.

    FULL    the model has as many live sequences as it may
    EXISTS  the id has an open sequence
    DONE    it goes on with its next step
    """

    FULL = -1
    EXISTS = 0
    DONE = 1


class StepOutcome(IntEnum):
    """How a step went.

    DONE       the model ran it
    FAILED     the model failed
    VOID       it was not run, because the sequence has no state
    CANCELLED  it was not run, because its caller has gone; the sequence's later steps are void
    GIVEN_UP   it was not run, because too many executors were lost with it
    LOST       it was not run, because the sequence's state could not be kept
    """

    DONE = 0
    FAILED = 1
    VOID = 2
    CANCELLED = 3
    GIVEN_UP = 4
    LOST = 5


class CommitCode(IntEnum):
    """What became of a `StepCommit`.

    OUT_OF_ORDER  the step before it is not committed; only a fault of the executor can bring that about
    REFUSED       the sequence has another owner: the executor must drop it
    BEFORE        it was committed by an earlier call
    COMMITTED     it is committed
    OVER          it is committed, and the sequence is over: its slot is free
    PAGED         it is committed, and the sequence's slot is free, because other sequences wait; the sequence goes on
                  from its checkpoint
    """

    OUT_OF_ORDER = -2
    REFUSED = -1
    BEFORE = 0
    COMMITTED = 1
    OVER = 2
    PAGED = 3


class StepCommit(msgspec.Struct, frozen=True):
    """One step to be made final.

    flags       of `StepFlag`
    reply       encoded `ReplyMessage`; the script sends it to the gateway, or nowhere if gateway is ""
    entries     inbox entries that are not needed any more
    base        the step after which a takeover replays from now on; 0: as before; None: this step if it has entries,
                else as before. A step that failed and is no base is remembered as failed, and never replayed
    recoverable  True: from now on a takeover finds the sequence's state, False: it does not any more; None: as before
    checkpoint  fields of the checkpoint and their values; empty if the state did not change
    anew        no other field of the checkpoint before it stays
    entry       the step's own inbox entry, of which the journal gets its request; "" if the model keeps no journal
    traceparent  of the step's span; not sent to the script
    counts      packed counts (`shared.statistics.tally`) of this request; they count if this very call commits the step
    execution   packed counts of the model's run, given to the first step of its batch. They count with the first call
                that commits any of its steps, so a group that is sent again must be sent unchanged
    """

    sequence: SequenceId
    epoch: Epoch
    step: StepNumber
    flags: int
    outcome: StepOutcome
    gateway: str
    token: str
    reply: bytes
    keep_reply: bool = False
    entries: Sequence[str] = ()
    checkpoint: Sequence[tuple[str, bytes]] = ()
    traceparent: str = ""
    counts: bytes = b""
    execution: bytes = b""
    base: StepNumber | None = None
    recoverable: bool | None = None
    anew: bool = False
    entry: str = ""

    @property
    def usual_base(self) -> int:
        """The base that `commit` takes if it is not told another one."""
        return self.step if self.entries else 0


class StepAnswers(OfSequence, frozen=True):
    """Answers of an open step that are not its last one.

    keep     its caller can repeat the step
    answers  numbers, rising, and encoded `ReplyMessage`s
    """

    epoch: Epoch
    step: StepNumber
    gateway: str
    token: str
    keep: bool
    answers: Sequence[tuple[int, bytes]]


class KeptReplies(msgspec.Struct, frozen=True):
    """How many replies of one sequence are kept for retries.

    size  bytes of all of them but the newest, which is kept whatever its size
    """

    count: int = RETRY_REPLIES
    size: int = RETRY_REPLY_BYTES


class JournalBounds(msgspec.Struct, frozen=True):
    """How much of a sequence's run its journal holds. size: bytes of the steps' requests and replies together"""

    steps: int
    size: int


NO_JOURNAL = JournalBounds(0, 0)


class Totals(msgspec.Struct, frozen=True):
    """Reply of `total`. added_up: how many packed counts; sums: of each load, in the order asked for"""

    added_up: int
    sums: list[dict[str, int]]


TOTAL_MAX = 256
"""Packed counts that one call adds up: about 5 us each, during which Redis does nothing else."""
COUNTS_TTL_MS = 24 * 3600 * 1000
"""How long the counts of a model can still be read when no executor serves it any more."""

GAVE_WAY = encode(
    ReplyMessage(
        "",
        error_code=OUTCOMES[Reason.BUSY].code,
        error=f"the step was asked for again more than {JOINED_MAX} times before it was answered: those who asked last "
        "get the answer, or ask again",
        reason=Reason.BUSY,
        step=0xFFFFFFFF,
    )
)
"""The reply to the oldest caller of a step when one caller too many waits for it. `submit.lua` writes the sequence's
last step over the four bytes of this one, which occur once."""
