"""The atomic steps of the mesh: one typed wrapper per Lua script. Only these wrappers know the order of arguments.

A call concerns one shard. A lost connection leaves the outcome of a call unknown, so every script may be sent again:
`commit` and `assign` recognise what was done before, `submit` recognises a step by its digest or number.
Scripts run atomically in Redis. The header of each `.lua` file describes its keys, arguments and reply.

A script is a function of a library of its own (FUNCTION LOAD, FCALL), so Redis makes its Lua functions once and not
with each call. The names carry a digest of the text, so several releases may call theirs on one Redis. A library
belongs to the data: it is replicated and comes back with it. Where one is missing, its first caller loads all.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from importlib import resources
from typing import Any, Generic, TypeVar

import msgspec
from redis.exceptions import ResponseError

from shared.contract.errors import OUTCOMES, Reason
from shared.contract.ids import (
    Epoch,
    ExecutorId,
    InstanceIndex,
    SchedulerId,
    SequenceId,
    ShardId,
    SlotIndex,
    StepNumber,
    Term,
)
from shared.contract.limits import (
    ANSWERS_BYTES_MAX,
    JOINED_MAX,
    LIVE_MAX,
    LOST_OWNERS_MAX,
    RETRY_IDS,
    RETRY_REPLIES,
    RETRY_REPLY_BYTES,
)
from shared.contract.messages import ReplyMessage, encode
from shared.contract.tenants import TenantLimits
from shared.statistics.meter import RoundTripMeter
from shared.statistics.tally import ModelLoad
from shared.store.commands import Redis
from shared.store.exported import ExportedSequence
from shared.store.keyspace import Keyspace
from shared.store.link import Link
from shared.store.reading import text_of, value_of


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


class Submitted(msgspec.Struct, frozen=True):
    """What `submit` says of one step.

    step     number of the accepted step; for a refusal, the last accepted step (since START)
    extra    the sequence's birth (accepted, JOINED), or the stored reply (REPEATED)
    run      name of what began with the latest START, given to no other run; "" for a refusal
    cut_off  name of the run that went on until this START began the next one; "" if there was none
    """

    code: SubmitCode
    step: int
    extra: bytes
    run: str = ""
    cut_off: str = ""


class Drawn(msgspec.Struct, frozen=True):
    """How many requests a tenant may send now, at most as many as it wanted, and in how many us the next one."""

    granted: int
    next_us: int


class OfSequence(msgspec.Struct, frozen=True):
    """What a script is told of one sequence: its arguments are the fields, in their order."""

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
    CLOSED   it accepts nothing but a START, and ends as soon as no step is open
    REMOVED  it was waiting for its first slot, and is over
    """

    NOTHING = 0
    CLOSED = 1
    REMOVED = 2


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
    def replays_behind(self) -> int:
        """The base as the script takes it: 0 for "as before"."""
        if self.base is None:
            return self.step if self.entries else 0
        return self.base


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

PRELUDES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "submit",
            "answers",
            "attempt",
            "reload",
            "page",
            "drain",
            "orphan",
            "lead",
            "resign",
            "draw",
            "total",
            "lose",
            "reopen",
            "resume",
        ),
        (),
    ),
    **dict.fromkeys(("expire", "pause", "reclaim", "remove", "sweep", "vacate"), ("leader",)),
    **dict.fromkeys(("commit", "cancel", "end", "count"), ("tally",)),
    **dict.fromkeys(("assign", "reject"), ("leader", "tally")),
    **dict.fromkeys(
        [f"work_{name}" for name in ("pull", "take", "read", "answers", "requeue", "withdraw", "refuse", "wake")],
        ("tally", "work"),
    ),
    **dict.fromkeys(("work_enqueue", "work_finish"), ("tally", "work", "cache")),
}
"""Script -> what stands before it, behind `common.lua`. Those of stateless work: `shared.store.work_scripts`."""
NAMES = tuple(PRELUDES)

ACCEPTING = frozenset({"submit", "work_enqueue", "reopen"})
"""Scripts that a Redis without memory refuses before they do anything: they bring in new requests and sequences."""

FINISHING = frozenset(NAMES) - ACCEPTING
"""Scripts that a Redis without memory runs nevertheless: they finish what was accepted, and that frees memory."""


LUA = resources.files("shared.store") / "lua"
EACH_CALL = "-- each call\n"
"""The line of a `.lua` file below which stands what runs with each call. Without it that is all of the file."""
LIBRARIES = "seqmesh_"
"""How the name of every library begins."""


def script_source(name: str) -> str:
    """The library of a script, but for what its name depends on: its digest."""
    defined, called = "", ""
    for part in ("common", *PRELUDES[name], name):
        above, line, below = (LUA / f"{part}.lua").read_text().rpartition(EACH_CALL)
        defined, called = defined + above, called + line + below
    flags = "'allow-oom'" if name in FINISHING else ""
    return (
        f"{defined}offered().register_function({{ function_name = NAME, flags = {{ {flags} }}, "
        f"callback = function(keys, args)\n{called}end }})\n"
    )


def function_name(name: str, source: str) -> str:
    """What Redis calls the script of this source."""
    return f"{name}_{hashlib.sha1(source.encode()).hexdigest()[:16]}"


def library(function: str, source: str) -> str:
    """A script as FUNCTION LOAD takes it."""
    return f"#!lua name={LIBRARIES}{function}\nlocal NAME = '{function}'\n{source}"


T = TypeVar("T")


class Call(msgspec.Struct, Generic[T], frozen=True):
    """One call of a script, ready to be sent: alone, or with others in one round trip (`Scripts.run_all`)."""

    script: str
    keys: Sequence[str]
    args: Sequence[Any]
    read: Callable[[Any], T]


class Scripts:
    """The scripts of one mesh on one connection (pool).

    Some calls must not be repeated unknowingly (`submit` without a request id). They belong on a connection without
    retries: `connect(url, retries=0)`.
    """

    def __init__(self, redis: Redis, keys: Keyspace, *, trips: RoundTripMeter | None = None) -> None:
        """trips: measures the round trips; None: nobody does"""
        self._redis = redis
        self._keys = keys
        self._trips = trips
        self._sources = {name: script_source(name) for name in NAMES}
        self._functions = {name: function_name(name, source) for name, source in self._sources.items()}

    def function(self, name: str) -> str:
        """The name by which Redis knows the script."""
        return self._functions[name]

    def library(self, name: str) -> str:
        """The script as FUNCTION LOAD takes it."""
        return library(self._functions[name], self._sources[name])

    async def run(self, call: Call[T]) -> T:
        (outcome,) = await self.run_all([call])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def run_all(self, calls: Sequence[Call[T]], link: Link | None = None) -> list[T | Exception]:
        """Sends calls in one round trip; Redis runs them in this order. An error is the result of its own call alone.

        If the server does not know a script, all scripts are loaded, and its calls are made after the other calls. So
        calls whose order matters belong together in one script call.

        link    a connected link to send them on, instead of a connection of the pool
        Raises redis.ConnectionError when the connection is lost: then it is not known which calls were run.
        """
        sent_ns = time.perf_counter_ns()
        functions = self._functions
        commands = [("FCALL", functions[call.script], len(call.keys), *call.keys, *call.args) for call in calls]
        outcomes = await self._exchanged(commands, link)
        if self._trips is not None and calls:
            self._trips.took(calls[0].script, time.perf_counter_ns() - sent_ns)
        unknown = [index for index, outcome in enumerate(outcomes) if is_unknown(outcome)]
        if unknown:
            # The data is new, or a scheduler of another release has removed the library. None of these calls was run.
            await self._load(link)
            commands = [commands[index] for index in unknown]
            again = await self._exchanged(commands, link)
            for index, outcome in zip(unknown, again, strict=True):
                outcomes[index] = outcome
        return [
            outcome if isinstance(outcome, Exception) else call.read(outcome)
            for call, outcome in zip(calls, outcomes, strict=True)
        ]

    async def forget_others(self) -> int:
        """Removes the libraries of other releases; returns how many. A process of such a release that is still there
        loads its own again.
        """
        own = {LIBRARIES + function for function in self._functions.values()}
        listed = await self._redis.function_list(f"{LIBRARIES}*")
        names = [text_of(found[found.index(b"library_name") + 1]) for found in listed]
        others = [name for name in names if name not in own]
        # Whoever comes at the same time may have removed one of them.
        removed = await self._piped([("FUNCTION", "DELETE", name) for name in others])
        return sum(not isinstance(reply, Exception) for reply in removed)

    async def _load(self, link: Link | None) -> None:
        """Loads all scripts: later, without memory, Redis would refuse those that finish what was accepted."""
        # REPLACE: another process may have loaded the same library meanwhile.
        commands = [("FUNCTION", "LOAD", "REPLACE", self.library(name)) for name in NAMES]
        for reply in await self._exchanged(commands, link):
            if isinstance(reply, Exception):
                raise reply

    def _exchanged(self, commands: Sequence[Sequence[Any]], link: Link | None) -> Awaitable[list[Any]]:
        """One round trip, over the link if there is one. An error reply is an exception in its place."""
        return link.exchange(commands) if link is not None else self._piped(commands)

    async def _piped(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """One round trip on a connection of the pool. An error reply is an exception in its place."""
        pipe = self._redis.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        return await pipe.execute(raise_on_error=False)

    def submit(
        self,
        steps: Sequence[Submission],
        *,
        backlog_max: int,
        in_flight_max: int,
        live_max: int = LIVE_MAX,
    ) -> Call[list[Submitted]]:
        """Accepts steps of one shard in this order; each has its own outcome.

        backlog_max  most sequences of a model in this shard that wait for their first slot
        live_max     most sequences of a model in this shard that have had a slot
        """
        args: list[Any] = [backlog_max, in_flight_max, RETRY_IDS, live_max, JOINED_MAX, GAVE_WAY]
        for step in steps:
            args += (
                step.sequence,
                int(step.flags),
                step.digest,
                "" if step.expected_step is None else step.expected_step,
                step.version,
                step.gateway,
                step.token,
                step.timeout_us,
                step.message,
                step.since_ms,
                step.tenant,
                step.tenant_max,
            )
        return Call("submit", self._keys.of_sequences(step.sequence for step in steps), args, _read_submitted)

    def assign(self, assignments: Sequence[Assignment], *, shard: ShardId, model: str, term: Term) -> Call[list[Epoch]]:
        """Gives sequences of one model and shard their owners.

        Returns the new epochs; 0 for a sequence that does not wait any more.
        Raises redis.ResponseError that begins with FENCED when a newer leader exists.
        """
        return self._of_each("assign", assignments, self._of_leader(shard, model), (term,), list)

    def attempt(self, sequence: SequenceId, epoch: Epoch) -> Call[bool]:
        """Notes that the owner of a suspected sequence runs its next step. False if the sequence has another owner
        now.
        """
        return Call("attempt", [self._keys.sequence(sequence).record], [epoch], bool)

    def commit(
        self,
        steps: Sequence[StepCommit],
        *,
        shard: ShardId,
        executor: ExecutorId,
        model: str,
        idle_ms: int,
        tombstone_ms: int,
        load: ModelLoad | None = None,
        kept: KeptReplies | None = None,
        mark: str = "",
        journal: JournalBounds = NO_JOURNAL,
    ) -> Call[list[CommitCode]]:
        """Makes steps of one model version and shard final, and answers them. Safe to repeat after a lost connection.

        load  the load of the model that the steps' counts belong to; None only if no step carries counts
        kept  replies of each sequence that a retry can still get; None: the default number
        mark  names what the states of new sequences depend on (`executor.models.fingerprints`); "": states are not
              compared
        journal  of each sequence
        """
        executions = [step.execution for step in steps if step.execution]
        assert load is not None or not (executions or any(step.counts for step in steps)), "counts of nothing"
        counted = load or ModelLoad(model, "", "")
        keys = [
            self._keys.inbox(shard, executor),
            self._keys.owned(shard, executor, model),
            self._keys.deadlines(shard, model),
            self._keys.feed(shard, model),
            self._keys.tally(shard, model, counted.version, counted.generation),
            self._keys.wanted_slots(shard, model, counted.version),
            self._keys.line(shard, model),
            *self._keys.of_sequences(step.sequence for step in steps),
        ]
        kept = kept or KeptReplies()
        args: list[Any] = [idle_ms, tombstone_ms, executor, kept.count, kept.size, counted.version, mark]
        args += (journal.steps, journal.size)
        args += (len(executions), *executions)
        for step in steps:
            args += (
                step.sequence,
                step.epoch,
                step.step,
                int(step.flags),
                int(step.outcome),
                step.gateway,
                step.token,
                step.reply,
                int(step.keep_reply),
                step.counts,
                step.replays_behind,
                "" if step.recoverable is None else int(step.recoverable),
                len(step.entries),
                *step.entries,
                int(step.anew),
                2 * len(step.checkpoint),
            )
            for name, value in step.checkpoint:
                args += (name, value)
            if journal.steps:
                args.append(step.entry)
        return Call("commit", keys, args, _read_committed)

    def answers(
        self, steps: Sequence[StepAnswers], executor: ExecutorId, *, kept_bytes: int = ANSWERS_BYTES_MAX
    ) -> Call[list[bool]]:
        """Writes answers of open steps of one shard; False for each whose sequence has another owner. Safe to repeat.

        kept_bytes  of the answers of one step that are kept for a retry
        """
        args: list[Any] = [executor, kept_bytes]
        for step in steps:
            args += (step.epoch, step.step, step.gateway, step.token, int(step.keep), len(step.answers))
            for numbered in step.answers:
                args += numbered
        return Call("answers", [self._keys.sequence(step.sequence).record for step in steps], args, each_as(bool))

    def expire(
        self, sequences: Sequence[SequenceId], *, shard: ShardId, model: str, term: Term, tombstone_ms: int
    ) -> Call[list[bool]]:
        """Ends the sequences whose idle marker has run out; True for each that was ended."""
        keys = self._of_leader(shard, model) + self._keys.of_sequences(sequences)
        return Call("expire", keys, [term, tombstone_ms, *sequences], each_as(bool))

    def reclaim(
        self,
        executor: ExecutorId,
        *,
        shard: ShardId,
        model: str,
        term: Term,
        count: int,
        tombstone_ms: int,
        only: Iterable[str] = (),
        lost: bool = False,
    ) -> Call[int]:
        """Takes up to `count` sequences from an executor; returns how many it took or looked at, 0 when none is left.

        only  takes sequences of these versions only
        lost  the executor is dead: a step with which `LOST_OWNERS_MAX` owners in a row were lost is given up
        """
        keys = [*self._of_leader(shard, model), self._keys.owned(shard, executor, model)]
        return Call("reclaim", keys, [term, executor, count, tombstone_ms, LOST_OWNERS_MAX if lost else 0, *only], int)

    def reload(
        self,
        sequences: Sequence[SequenceId],
        *,
        shard: ShardId,
        executor: ExecutorId,
        model: str,
        version: str,
        mark: str,
        tombstone_ms: int,
    ) -> Call[list[bool]]:
        """Ends the sequences that the executor holds between two steps with a state of another mark.

        Returns True for each that was ended.
        """
        keys = [
            self._keys.owned(shard, executor, model),
            self._keys.deadlines(shard, model),
            self._keys.feed(shard, model),
        ]
        keys += self._keys.of_sequences(sequences)
        return Call("reload", keys, [executor, version, mark, tombstone_ms, *sequences], each_as(bool))

    def page(
        self, owned: Sequence[tuple[SequenceId, Epoch]], *, shard: ShardId, executor: ExecutorId, model: str
    ) -> Call[list[bool]]:
        """Pages idle sequences of one model and shard, each in the epoch in which the executor owns it. True for each
        that is paged.
        """
        keys = [
            self._keys.owned(shard, executor, model),
            self._keys.feed(shard, model),
            self._keys.line(shard, model),
            *self._keys.of_sequences(sequence for sequence, _ in owned),
        ]
        return Call("page", keys, [executor, *(word for one in owned for word in one)], each_as(bool))

    def vacate(
        self, vacations: Sequence[Vacation], *, shard: ShardId, model: str, term: Term
    ) -> Call[list[VacateCode]]:
        """Takes sequences of one model and shard out of their slots, between two steps, on executors that live."""
        return self._of_each("vacate", vacations, self._of_leader(shard, model), (term,), each_as(VacateCode))

    def pause(
        self, pauses: Sequence[Pausing], *, shard: ShardId, model: str, term: Term
    ) -> Call[list[ExecutorId | None]]:
        """Pauses sequences of one model and shard, also in the middle of a step.

        Returns for each the executor whose inbox is to be drained, "" for none; None if it is not paused.
        """
        return self._of_each("pause", pauses, self._of_leader(shard, model), (term,), _read_owners)

    def resume(self, sequences: Sequence[SequenceId]) -> Call[list[bool]]:
        """Resumes sequences of one shard; False for each that is not paused. Safe to repeat."""
        return self._of_each("resume", [OfSequence(sequence) for sequence in sequences], (), (), each_as(bool))

    def lose(self, sequence: SequenceId, executor: ExecutorId, epoch: Epoch) -> Call[bool]:
        """Ends a sequence whose record its owner cannot read; False if another executor owns it."""
        return Call("lose", [self._keys.sequence(sequence).record], [executor, epoch], bool)

    def sweep(self, sequences: Sequence[SequenceId], *, shard: ShardId, model: str, term: Term) -> Call[list[int]]:
        """Writes again what sequences' records say and other keys have lost; 0 for each sequence that is over, or was
        lost.
        """
        keys = self._of_leader(shard, model) + self._keys.of_sequences(sequences)
        return Call("sweep", keys, [term, *sequences], list)

    def remove(
        self, entries: Sequence[str | bytes], *, stream: str, shard: ShardId, model: str, term: Term
    ) -> Call[int]:
        """Removes entries of a model's feed or starts on which its leader has acted; returns how many were there."""
        return Call("remove", [*self._of_leader(shard, model), stream], [term, *entries], int)

    def drain(
        self, executor: ExecutorId, *, shard: ShardId, after: str = "0-0", count: int = 256, alive: bool = False
    ) -> Call[tuple[str, int, int]]:
        """Moves inbox entries that do not belong to an executor any more to their present places.

        alive    the executor still reads its inbox: control messages stay there for it
        returns  the last entry looked at, how many were looked at, and how many stayed
        """
        return Call("drain", [self._keys.inbox(shard, executor)], [executor, after, count, int(alive)], _read_drained)

    def reject(self, rejections: Sequence[Rejection], *, shard: ShardId, model: str, term: Term) -> Call[list[int]]:
        """Ends waiting sequences.

        Returns for each the number of steps answered, -1 if it does not wait under that entry any more.
        """
        return self._of_each("reject", rejections, self._of_leader(shard, model), (term,), list)

    def cancel(self, cancellations: Sequence[Cancellation], *, reply: bytes, feed_max: int) -> Call[list[CancelCode]]:
        """Tells the mesh of steps (of one shard) whose callers have gone.

        reply     encoded `ReplyMessage` for the other steps of a waiting sequence
        feed_max  entries of the feed from which on the scheduler is not told that a sequence waits no longer
        """
        return self._of_each("cancel", cancellations, (), (feed_max, reply), each_as(CancelCode))

    def orphan(self, orphans: Sequence[Orphan], *, gateway: str) -> Call[list[bool]]:
        """Limits the idle time of sequences (of one shard) whose connections to one gateway were closed."""
        return self._of_each("orphan", orphans, (), (gateway,), each_as(bool))

    def end(self, endings: Sequence[Ending], *, tombstone: bytes, reply: bytes) -> Call[list[EndCode]]:
        """Ends sequences of one shard. Safe to repeat.

        tombstone  one of `shared.contract.record.TOMBSTONES`: what later steps hear
        reply      encoded `ReplyMessage` for the steps of a sequence that waits for its first slot; b"": they are run
        """
        return self._of_each("end", endings, (), (tombstone, reply), each_as(EndCode))

    def reopen(
        self,
        sequence: SequenceId,
        exported: ExportedSequence,
        *,
        idle_ms: int,
        live_max: int,
        pageable: bool,
    ) -> Call[ReopenCode]:
        """Makes an open sequence from an exported one. live_max: as of `submit`; pageable: whether it may be paged"""
        record = [word for field in exported.record.items() for word in field]
        journal = [word for field in exported.journal.items() for word in field]
        checkpoint = [word for field in exported.checkpoint.items() for word in field]
        about = (sequence, exported.version, idle_ms, live_max, int(pageable), exported.last_step, exported.start_step)
        args = [*about, len(record), *record, len(journal), *journal, *checkpoint]
        return Call("reopen", self._keys.of_sequences([sequence]), args, ReopenCode)

    def count(self, counts: Sequence[tuple[ModelLoad, bytes]], *, shard: ShardId) -> Call[int]:
        """Counts answered requests, or measurements: packed counts by the load that they belong to; returns how many.
        Not safe to repeat.
        """
        keys = [self._keys.tally(shard, load.model, load.version, load.generation) for load, _ in counts]
        return Call("count", keys, [packed for _, packed in counts], int)

    def lead(
        self, terms: Mapping[str, Term], scheduler: SchedulerId, *, lease_ms: int
    ) -> Call[list[Term | ResponseError]]:
        """Takes the lead of models (term 0) or keeps it.

        Returns for each model the term, 0 if another scheduler leads it, or the error that Redis has for it.
        """
        keys = [self._keys.terms, *map(self._keys.leader, terms)]
        args = [scheduler, lease_ms, *(arg for model_and_term in terms.items() for arg in model_and_term)]
        return Call("lead", keys, args, list)

    def resign(self, model: str, scheduler: SchedulerId, *, term: Term) -> Call[bool]:
        """Gives the lead of a model back (term 0: whatever the term is); False if another scheduler has it."""
        return Call("resign", [self._keys.leader(model)], [scheduler, term], bool)

    def draw(self, tenant: str, limits: TenantLimits, wanted: int) -> Call[Drawn]:
        """Takes requests from what a tenant may send now. limits: with `steps_per_s` above 0; wanted: from 1"""
        args = [wanted, round(1e6 / limits.steps_per_s), limits.burst_max]
        return Call("draw", [self._keys.allowance(tenant)], args, lambda reply: Drawn(*map(int, reply)))

    def total(
        self, loads: Sequence[ModelLoad], *, shard: ShardId, at_most: int = TOTAL_MAX, read: bool = True
    ) -> Call[Totals]:
        """Adds up what was counted in one shard, and reads the sums. Safe to repeat.

        at_most  most packed counts to add up; if so many were added up, more may be left: call again
        read     False: only add up, return no sums
        """
        keys: list[str] = []
        for load in loads:
            counted = (shard, load.model, load.version, load.generation)
            refused = self._keys.tally(shard, load.model, load.version, "")
            keys += (self._keys.tally(*counted), refused, self._keys.counts(*counted))
        return Call("total", keys, [at_most, COUNTS_TTL_MS, int(read)], partial(_read_totals, keys[2::3]))

    def _of_each(
        self,
        script: str,
        told: Sequence[OfSequence],
        keys: Sequence[str],
        args: Sequence[Any],
        read: Callable[[Any], T],
    ) -> Call[T]:
        """A call that concerns several sequences. keys, args: those of the whole call, which come first"""
        # Redis takes no booleans.
        own = [int(arg) if isinstance(arg, bool) else arg for one in told for arg in msgspec.structs.astuple(one)]
        return Call(script, [*keys, *self._keys.of_sequences(one.sequence for one in told)], [*args, *own], read)

    def _of_leader(self, shard: ShardId, model: str) -> list[str]:
        """The first keys of every script of a model's leader (`leader.lua`)."""
        return [
            self._keys.fence(shard, model),
            self._keys.epoch(shard),
            self._keys.starts(shard, model),
            self._keys.feed(shard, model),
            self._keys.deadlines(shard, model),
            self._keys.line(shard, model),
        ]


def is_unknown(outcome: object) -> bool:
    """Whether a reply says that the server does not have the script, and so did not run it."""
    return isinstance(outcome, ResponseError) and "Function not found" in str(outcome)


def each_as(kind: Callable[[int], T]) -> Callable[[list[int]], list[T]]:
    """Reads a reply with one number for each sequence, step or request."""
    return lambda numbers: [kind(number) for number in numbers]


_COMMIT_CODES = {int(code): code for code in CommitCode}


def _read_committed(numbers: list[int]) -> list[CommitCode]:
    # Once for each step: the call of an enumeration takes many times as long.
    return [_COMMIT_CODES[number] for number in numbers]


def _read_totals(keys: Sequence[str], reply: list[Any]) -> Totals:
    """Reads the reply of `total.lua`. keys: of the hashes of sums, in the order of the reply"""
    added_up, *hashes = reply
    return Totals(int(added_up), [_read_sums(key, flat) for key, flat in zip(keys, hashes, strict=False)])


def _read_sums(key: str, flat: list[bytes]) -> dict[str, int]:
    sums = {text_of(name): value_of(key, data, int) for name, data in zip(flat[::2], flat[1::2], strict=True)}
    return {name: number for name, number in sums.items() if number is not None}


_SUBMIT_CODES = {int(code): code for code in SubmitCode}


def _read_submitted(replies: list[list[Any]]) -> list[Submitted]:
    return [
        Submitted(_SUBMIT_CODES[code], step, _as_bytes(extra), *map(text_of, runs))
        for code, step, extra, *runs in replies
    ]


def _read_owners(reply: list[Any]) -> list[ExecutorId | None]:
    return [None if owner is None else ExecutorId(text_of(owner)) for owner in reply]


def _read_drained(reply: list[Any]) -> tuple[str, int, int]:
    last, looked_at, stayed = reply
    return _as_bytes(last).decode(), int(looked_at), int(stayed)


def _as_bytes(value: bytes | int) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
