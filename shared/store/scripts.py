"""The atomic steps of the mesh: one typed wrapper per Lua script, the only place that knows argument order.

Each wrapper takes work of one shard and makes one call. A lost connection leaves a call's outcome unknown; every
script may then be sent again: `commit` and `assign` tell what was done before, `submit` by digest or number.
Scripts run atomically in Redis; see the header of each `.lua` file for keys, arguments and reply.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from importlib import resources
from typing import Any, Generic, TypeVar, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import NoScriptError, ResponseError

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
from shared.contract.limits import JOINED_MAX, LIVE_MAX, LOST_OWNERS_MAX, RETRY_IDS, RETRY_REPLIES, RETRY_REPLY_BYTES
from shared.contract.messages import ReplyMessage, StepFlag, encode
from shared.statistics.tally import ModelLoad
from shared.store.keyspace import Keyspace
from shared.store.link import Link
from shared.store.reading import text_of, value_of


class SubmitCode(IntEnum):
    """What became of a submitted step; negative: refused."""

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


class Submission(msgspec.Struct, frozen=True):
    """A step on its way into a sequence.

    digest         of its request id and content (`shared.contract.step_digest`), or b""
    expected_step  `sequence_step` of the request (1 at START), or None
    message        encoded `InferMessage`
    since_ms       when it was first sent, by the clock of Redis, if it is sent again without knowing what became of it
    """

    sequence: SequenceId
    flags: StepFlag
    digest: bytes
    expected_step: int | None
    model: str
    version: str
    gateway: str
    token: str
    timeout_us: int
    message: bytes
    since_ms: int = -1


class Submitted(msgspec.Struct, frozen=True):
    """code; step: the accepted step's number, or the last committed one (since START) for a refusal;
    extra: the sequence's birth (accepted, JOINED), the stored reply (REPEATED), the expected step (WRONG_STEP)."""

    code: SubmitCode
    step: int
    extra: bytes


class Assignment(msgspec.Struct, frozen=True):
    """A sequence's new place.

    entry  of its wait in the starts stream; a later sequence of the same id has another
    """

    sequence: SequenceId
    entry: str
    model: str
    executor: ExecutorId
    instance: InstanceIndex
    slot: SlotIndex


class Rejection(msgspec.Struct, frozen=True):
    """A waiting sequence that is refused. entry: of its wait; reply: encoded `ReplyMessage` for each of its steps."""

    sequence: SequenceId
    entry: str
    reply: bytes


class Vacation(msgspec.Struct, frozen=True):
    """A live sequence that is to give up its slot, if nothing of it is in flight.

    epoch   in which it was seen in that slot; 0: it has none, because it is paged
    moving  it is to get another slot at once; else it is paged until its next step
    """

    sequence: SequenceId
    epoch: Epoch
    moving: bool = False


class VacateCode(IntEnum):
    """KEPT: it is not what it was thought to be, or a step of it is in flight. VACATED: its slot is free. UNDRAINED: so
    too, but steps since its checkpoint lie in its owner's inbox, to be drained."""

    KEPT = 0
    VACATED = 1
    UNDRAINED = 2


class Cancellation(msgspec.Struct, frozen=True):
    """An accepted step whose caller has gone. birth, step: as `Submitted` told."""

    sequence: SequenceId
    model: str
    birth: str
    step: int
    gateway: str
    token: str


class Orphan(msgspec.Struct, frozen=True):
    """A sequence whose connection is gone before its END.

    token     under which the latest step that came over the connection was sent
    grace_ms  how long it may be idle from now on
    """

    sequence: SequenceId
    model: str
    token: str
    grace_ms: int


class CancelCode(IntEnum):
    """NOTHING: it was answered, or the sequence is over. SHARED: somebody else waits for the same step.
    TOLD: it is cancelled when it comes to be run. REMOVED: it was waiting for a slot, with all of its sequence."""

    SHARED = -1
    NOTHING = 0
    TOLD = 1
    REMOVED = 2


class StepOutcome(IntEnum):
    """How a step went: DONE, the model FAILED it, or VOID: it was not run, because the sequence has no state.
    CANCELLED: it was not run, because its caller has gone; the steps behind it are void. GIVEN_UP: so too, because too
    many executors were lost that were to run it. LOST: so too, because the sequence's state could not be kept."""

    DONE = 0
    FAILED = 1
    VOID = 2
    CANCELLED = 3
    GIVEN_UP = 4
    LOST = 5


class CommitCode(IntEnum):
    """REFUSED: the sequence has another owner; drop it. OVER: committed, and the sequence's slot is free.
    PAGED: committed, and its slot is free, because others wait; it goes on from its checkpoint. OUT_OF_ORDER: the step
    before was not committed; only a fault of ours can bring that about."""

    OUT_OF_ORDER = -2
    REFUSED = -1
    BEFORE = 0
    COMMITTED = 1
    OVER = 2
    PAGED = 3


class StepCommit(msgspec.Struct, frozen=True):
    """One step to be made final.

    reply       encoded `ReplyMessage`, sent on by the script; gateway "" sends it nowhere
    entries     inbox entries that are not needed any more
    base        the step behind which a takeover replays from now on, 0: the one before; None: this step, if entries go.
                A step that failed and is no base is remembered as such, and never replayed
    recoverable  True: from now on a takeover finds the sequence, False: its state would be lost; None: as before
    checkpoint  state tensors by name, encoded; empty when the state did not change
    traceparent  of the step's span; stays with the caller
    counts      packed (`shared.statistics.tally`) counts of this request, counted if this very call commits the step
    execution   packed counts of the model's run, given to the first step of its batch; counted by the first call that
                commits any of the steps it carries: a group that is sent again must be sent as it was
    """

    sequence: SequenceId
    epoch: Epoch
    step: StepNumber
    flags: StepFlag
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

    @property
    def replays_behind(self) -> int:
        """The base as the script takes it."""
        if self.base is None:
            return self.step if self.entries else 0
        return self.base


class KeptReplies(msgspec.Struct, frozen=True):
    """Replies of one sequence that are kept for retries. size: bytes of those beyond the newest, which always is."""

    count: int = RETRY_REPLIES
    size: int = RETRY_REPLY_BYTES


class Totals(msgspec.Struct, frozen=True):
    """added_up: how many packed counts; sums: of each model version, in the order asked for."""

    added_up: int
    sums: list[dict[str, int]]


TOTAL_MAX = 256
"""Packed counts that one call adds up: about 5 us each, and Redis does nothing else meanwhile."""
COUNTS_TTL_MS = 24 * 3600 * 1000
"""How long the counts of a model that nobody serves any more can still be read."""

GAVE_WAY = encode(
    ReplyMessage(
        "",
        error_code=OUTCOMES[Reason.BUSY].code,
        error=f"the step was asked for again more than {JOINED_MAX} times before it was answered: those who asked last "
        "get the answer, or ask again",
        reason=Reason.BUSY,
    )
)
"""What is heard by whoever waits for a step beside too many others."""

COUNTING = frozenset({"commit", "reject", "cancel"})
"""Scripts that make requests final, and so count them: they have the prelude `tally.lua` too."""

WORK = tuple(
    f"work_{name}" for name in ("enqueue", "pull", "take", "read", "finish", "requeue", "withdraw", "refuse", "wake")
)
"""Scripts of stateless work (see `shared.store.work_scripts`), with both preludes and `work.lua`."""

CACHING = frozenset({"work_enqueue", "work_finish"})
"""Those of them that know the response cache."""

NAMES = (
    "submit",
    "assign",
    "attempt",
    "commit",
    "expire",
    "reclaim",
    "reload",
    "drain",
    "reject",
    "cancel",
    "orphan",
    "lead",
    "resign",
    "total",
    "vacate",
    "remove",
    "sweep",
    "lose",
    *WORK,
)

ACCEPTING = frozenset({"submit", "work_enqueue"})
"""Scripts that a Redis without memory refuses before they do anything."""

FINISHING = frozenset(NAMES) - ACCEPTING - {"total"}
"""Scripts that it carries out nevertheless: they finish what was accepted, and that makes room. (`total` can wait.)"""


def script_source(name: str) -> str:
    """A script with its preludes."""
    folder = resources.files("shared.store") / "lua"
    parts = ("common", "tally", name) if name in COUNTING else ("common", name)
    if name in WORK:
        parts = ("common", "tally", "work", *(("cache",) if name in CACHING else ()), name)
    return _shebang(name) + "".join((folder / f"{part}.lua").read_text() for part in parts)


def _shebang(name: str) -> str:
    """What Redis is told of a script; without it, it goes by the first command in the script that writes."""
    if name in ACCEPTING:
        return "#!lua\n"
    return "#!lua flags=allow-oom\n" if name in FINISHING else ""


T = TypeVar("T")


class Call(msgspec.Struct, Generic[T], frozen=True):
    """One call of a script, ready to be sent: alone, or with others in one round trip (`Scripts.run_all`)."""

    script: str
    keys: Sequence[str]
    args: Sequence[Any]
    read: Callable[[Any], T]


class Scripts:
    """The scripts of one mesh on one connection (pool).

    A call of which it must be known whether it happened (`submit` without a request id) belongs on a connection
    without retries: `connect(url, retries=0)`.
    """

    def __init__(self, redis: Redis, keys: Keyspace) -> None:
        # redis-py types its shared sync/async commands as unions; here they are always awaitable.
        self._redis = cast(Any, redis)
        self._keys = keys
        self._sources = {name: script_source(name) for name in NAMES}
        self._digests = {name: hashlib.sha1(text.encode()).hexdigest() for name, text in self._sources.items()}

    def digest(self, name: str) -> str:
        """What a script is called by."""
        return self._digests[name]

    async def run(self, call: Call[T]) -> T:
        """Sends one call."""
        (outcome,) = await self.run_all([call])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def run_all(self, calls: Sequence[Call[T]], link: Link | None = None) -> list[T | Exception]:
        """Sends calls in one round trip, to be carried out in this order; an error is the result of its call alone.

        A script that the server turns out not to know is loaded, and its calls made after the others: calls of which
        the order matters, and of which only some could be unknown, belong into one call.

        link    a connected link to send them on, instead of a connection of the pool
        Raises redis.ConnectionError when the connection is lost: then it is not known which calls were carried out.
        """
        outcomes: list[Any] = await self._send(calls, link)
        unknown = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, NoScriptError)]
        if unknown:
            # A server that was restarted knows no script; then none of the calls was carried out.
            await self._load({calls[index].script for index in unknown}, link)
            for index, outcome in zip(unknown, await self._send([calls[i] for i in unknown], link), strict=True):
                outcomes[index] = outcome
        return [
            outcome if isinstance(outcome, Exception) else call.read(outcome)
            for call, outcome in zip(calls, outcomes, strict=True)
        ]

    async def _load(self, names: Iterable[str], link: Link | None) -> None:
        if link is None:
            for name in names:
                await self._redis.script_load(self._sources[name])
            return
        for loaded in await link.exchange([("SCRIPT", "LOAD", self._sources[name]) for name in names]):
            if isinstance(loaded, Exception):
                raise loaded

    async def _send(self, calls: Sequence[Call[Any]], link: Link | None) -> list[Any]:
        if link is not None:
            return await link.exchange(
                [("EVALSHA", self._digests[c.script], len(c.keys), *c.keys, *c.args) for c in calls]
            )
        pipe = self._redis.pipeline(transaction=False)
        for call in calls:
            pipe.evalsha(self._digests[call.script], len(call.keys), *call.keys, *call.args)
        return await pipe.execute(raise_on_error=False)

    def submit(
        self,
        steps: Sequence[Submission],
        *,
        shard: ShardId,
        backlog_max: int,
        in_flight_max: int,
        live_max: int = LIVE_MAX,
    ) -> Call[list[Submitted]]:
        """Accepts steps of one shard in this order; each has its own outcome.

        backlog_max  sequences of a model in this shard that wait for their first slot   live_max  that have had one
        """
        models = {model: index for index, model in enumerate(dict.fromkeys(step.model for step in steps), 1)}
        keys: list[str] = []
        for model in models:
            keys += (self._keys.starts(shard, model), self._keys.line(shard, model), self._keys.deadlines(shard, model))
        args: list[Any] = [self._keys.inbox_prefix(shard), backlog_max, in_flight_max, RETRY_IDS, live_max, len(models)]
        args += (self._keys.replies_prefix(shard), JOINED_MAX, GAVE_WAY)
        for step in steps:
            own = self._keys.sequence(step.sequence)
            keys += (own.record, own.idle, own.parked)
            args += (
                models[step.model],
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
            )
        return Call("submit", keys, args, _read_submitted)

    def assign(self, assignments: Sequence[Assignment], *, shard: ShardId, term: Term) -> Call[list[Epoch]]:
        """Gives sequences of one model and shard their owners; 0 for one that does not wait any more.

        Raises redis.ResponseError that begins with FENCED when a newer leader exists.
        """
        model = assignments[0].model
        keys = [
            self._keys.fence(shard, model),
            self._keys.epoch(shard),
            self._keys.starts(shard, model),
            self._keys.line(shard, model),
        ]
        args: list[Any] = [term]
        for assignment in assignments:
            own = self._keys.sequence(assignment.sequence)
            keys += (
                own.record,
                own.parked,
                self._keys.inbox(shard, assignment.executor),
                self._keys.owned(shard, assignment.executor, model),
            )
            args += (
                assignment.sequence,
                assignment.entry,
                assignment.executor,
                assignment.instance,
                assignment.slot,
            )
        return Call("assign", keys, args, list)

    def attempt(self, sequence: SequenceId, epoch: Epoch) -> Call[bool]:
        """Writes down that a suspected sequence's owner goes on with it; False when it is not the owner any more."""
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
    ) -> Call[list[CommitCode]]:
        """Makes steps of one model version and shard final, and answers them. Safe to repeat after a lost connection.

        load  what the steps' counts are counted for; None only where they carry none
        kept  replies of each sequence that a retry can still get; None: as many as by default
        mark  what the states of sequences that begin depend on (`executor.models.fingerprints`), "" if nobody asks
        """
        assert load is not None or not any(step.counts or step.execution for step in steps), "counts of nothing"
        counted = load or ModelLoad(model, "", "")
        keys = [
            self._keys.inbox(shard, executor),
            self._keys.owned(shard, executor, model),
            self._keys.deadlines(shard, model),
            self._keys.feed(shard, model),
            self._keys.tally(shard, model, counted.version, counted.generation),
            self._keys.wanted_slots(shard, model, counted.version),
            self._keys.line(shard, model),
        ]
        executions = [step.execution for step in steps if step.execution]
        args: list[Any] = [self._keys.replies_prefix(shard), idle_ms, tombstone_ms]
        kept = kept or KeptReplies()
        args += (executor, kept.count, kept.size, counted.version, mark, len(executions), *executions)
        for step in steps:
            own = self._keys.sequence(step.sequence)
            keys += (own.record, own.idle, own.parked, own.checkpoint)
            args += (
                step.sequence,
                step.epoch,
                step.step,
                int(step.flags),
                int(step.outcome),
                step.gateway,
                step.token,
                step.reply,
                1 if step.keep_reply else 0,
                step.counts,
                step.replays_behind,
                "" if step.recoverable is None else int(step.recoverable),
                len(step.entries),
                *step.entries,
                2 * len(step.checkpoint),
            )
            for name, value in step.checkpoint:
                args += (name, value)
        return Call("commit", keys, args, _read_commit)

    def expire(
        self, sequences: Sequence[SequenceId], *, shard: ShardId, model: str, term: Term, tombstone_ms: int
    ) -> Call[list[bool]]:
        """Ends those of the sequences whose idle marker is gone; True for each that was ended."""
        keys = [
            self._keys.fence(shard, model),
            self._keys.deadlines(shard, model),
            self._keys.feed(shard, model),
            self._keys.line(shard, model),
            self._keys.starts(shard, model),
        ]
        args: list[Any] = [
            term,
            tombstone_ms,
            self._keys.inbox_prefix(shard),
            self._keys.owned_prefix(shard),
            model,
            *sequences,
        ]
        for sequence in sequences:
            own = self._keys.sequence(sequence)
            keys += (own.record, own.idle, own.parked, own.checkpoint)
        return Call("expire", keys, args, _read_flags)

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

        only  of these versions alone
        lost  it is dead: a step that `LOST_OWNERS_MAX` owners in a row were lost with is given up
        """
        keys = [
            self._keys.fence(shard, model),
            self._keys.epoch(shard),
            self._keys.starts(shard, model),
            self._keys.owned(shard, executor, model),
            self._keys.deadlines(shard, model),
            self._keys.feed(shard, model),
            self._keys.line(shard, model),
        ]
        args = [
            term,
            executor,
            count,
            tombstone_ms,
            self._keys.base(shard),
            LOST_OWNERS_MAX if lost else 0,
            model,
            *only,
        ]
        return Call("reclaim", keys, args, int)

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
        """Ends those that the executor holds between two steps with a state of another mark; True for each that was."""
        keys = [
            self._keys.owned(shard, executor, model),
            self._keys.deadlines(shard, model),
            self._keys.feed(shard, model),
        ]
        for sequence in sequences:
            own = self._keys.sequence(sequence)
            keys += (own.record, own.idle, own.parked, own.checkpoint)
        return Call("reload", keys, [executor, version, mark, tombstone_ms, *sequences], _read_flags)

    def vacate(
        self, vacations: Sequence[Vacation], *, shard: ShardId, model: str, term: Term
    ) -> Call[list[VacateCode]]:
        """Takes sequences of one model and shard out of their slots on executors that live, between two steps."""
        keys = [
            self._keys.fence(shard, model),
            self._keys.epoch(shard),
            self._keys.starts(shard, model),
            self._keys.line(shard, model),
        ]
        args: list[Any] = [term, self._keys.inbox_prefix(shard), self._keys.owned_prefix(shard), model]
        for vacation in vacations:
            keys.append(self._keys.sequence(vacation.sequence).record)
            args += (vacation.sequence, vacation.epoch, "m" if vacation.moving else "p")
        return Call("vacate", keys, args, _read_vacated)

    def lose(self, sequence: SequenceId, executor: ExecutorId, epoch: Epoch) -> Call[bool]:
        """Ends a sequence whose record its owner cannot read; False when it is another's."""
        return Call("lose", [self._keys.sequence(sequence).record], [executor, epoch], bool)

    def sweep(self, sequences: Sequence[SequenceId], *, shard: ShardId, model: str, term: Term) -> Call[list[int]]:
        """Puts back what sequences' records say and is nowhere any more; 0 for each that is over, or was lost."""
        keys = [self._keys.fence(shard, model), self._keys.starts(shard, model), self._keys.deadlines(shard, model)]
        keys += [self._keys.sequence(sequence).record for sequence in sequences]
        return Call("sweep", keys, [term, model, self._keys.base(shard), *sequences], list)

    def remove(
        self, entries: Sequence[str | bytes], *, stream: str, shard: ShardId, model: str, term: Term
    ) -> Call[int]:
        """Removes entries of a model's feed or starts on which its leader has acted; how many were there."""
        return Call("remove", [self._keys.fence(shard, model), stream], [term, *entries], int)

    def drain(
        self, executor: ExecutorId, *, shard: ShardId, after: str = "0-0", count: int = 256, alive: bool = False
    ) -> Call[tuple[str, int, int]]:
        """Moves inbox entries that are not an executor's own on: (last entry looked at, how many, how many stayed).

        alive  the executor still reads its inbox: control messages stay there for it
        """
        args = [executor, after, count, self._keys.base(shard), 1 if alive else 0]
        return Call("drain", [self._keys.inbox(shard, executor)], args, _read_drained)

    def reject(self, rejections: Sequence[Rejection], *, shard: ShardId, model: str, term: Term) -> Call[list[int]]:
        """Ends waiting sequences; the number of steps that were answered, -1: it does not wait there any more."""
        keys = [self._keys.fence(shard, model), self._keys.starts(shard, model), self._keys.line(shard, model)]
        args: list[Any] = [term, self._keys.replies_prefix(shard), self._keys.tally_prefix(shard, model, "")]
        for rejection in rejections:
            own = self._keys.sequence(rejection.sequence)
            keys += (own.record, own.parked, own.idle, own.checkpoint)
            args += (rejection.entry, rejection.reply)
        return Call("reject", keys, args, list)

    def cancel(
        self, cancellations: Sequence[Cancellation], *, shard: ShardId, reply: bytes, feed_max: int
    ) -> Call[list[CancelCode]]:
        """Tells the mesh of steps (of one shard) whose callers have gone.

        reply     encoded `ReplyMessage` for the other steps of a waiting sequence
        feed_max  entries of the feed beyond which the scheduler is not told of a sequence that waits no longer
        """
        keys: list[str] = []
        args: list[Any] = [self._keys.replies_prefix(shard), self._keys.inbox_prefix(shard), feed_max, reply]
        for one in cancellations:
            own = self._keys.sequence(one.sequence)
            keys += (own.record, own.parked, own.idle, own.checkpoint)
            keys += (
                self._keys.starts(shard, one.model),
                self._keys.feed(shard, one.model),
                self._keys.line(shard, one.model),
            )
            args += (one.sequence, one.birth, one.step, one.gateway, one.token)
            args.append(self._keys.tally_prefix(shard, one.model, ""))
        return Call("cancel", keys, args, _read_cancelled)

    def orphan(self, orphans: Sequence[Orphan], *, shard: ShardId, gateway: str) -> Call[list[bool]]:
        """Limits the idle time of sequences (of one shard) whose connections to one gateway are gone."""
        keys: list[str] = []
        args: list[Any] = [gateway]
        for one in orphans:
            own = self._keys.sequence(one.sequence)
            keys += (own.record, own.idle, self._keys.deadlines(shard, one.model))
            args += (one.sequence, one.token, one.grace_ms)
        return Call("orphan", keys, args, _read_flags)

    def lead(
        self, terms: Mapping[str, Term], scheduler: SchedulerId, *, lease_ms: int
    ) -> Call[list[Term | ResponseError]]:
        """Takes the lead of models (term 0) or keeps it; for each the term, or 0 when another scheduler leads, or what
        Redis said instead."""
        keys = [self._keys.terms, *map(self._keys.leader, terms)]
        args = [scheduler, lease_ms, *(each for place in terms.items() for each in place)]
        return Call("lead", keys, args, list)

    def resign(self, model: str, scheduler: SchedulerId, *, term: Term) -> Call[bool]:
        """Gives the lead of a model back (term 0: of whatever term); False when it is not this scheduler's."""
        return Call("resign", [self._keys.leader(model)], [scheduler, term], bool)

    def total(
        self, loads: Sequence[ModelLoad], *, shard: ShardId, at_most: int = TOTAL_MAX, read: bool = True
    ) -> Call[Totals]:
        """Adds up what was counted in one shard, and reads the sums. Safe to repeat.

        at_most  packed counts to add up; when as many were, more may be left: call again
        read     False: only add up, return no sums
        """
        keys: list[str] = []
        for load in loads:
            place = (shard, load.model, load.version, load.generation)
            refused = self._keys.tally(shard, load.model, load.version, "")
            keys += (self._keys.tally(*place), refused, self._keys.counts(*place))
        return Call("total", keys, [at_most, COUNTS_TTL_MS, 1 if read else 0], partial(_read_totals, keys[2::3]))


def _read_totals(keys: Sequence[str], reply: list[Any]) -> Totals:
    """keys: of the hashes."""
    added_up, *hashes = reply
    return Totals(int(added_up), [_read_sums(key, flat) for key, flat in zip(keys, hashes, strict=False)])


def _read_sums(key: str, flat: list[bytes]) -> dict[str, int]:
    sums = {text_of(name): value_of(key, data, int) for name, data in zip(flat[::2], flat[1::2], strict=True)}
    return {name: number for name, number in sums.items() if number is not None}


def _read_submitted(replies: list[list[Any]]) -> list[Submitted]:
    return [Submitted(SubmitCode(code), step, _as_bytes(extra)) for code, step, extra in replies]


def _read_commit(codes: list[int]) -> list[CommitCode]:
    return [CommitCode(code) for code in codes]


def _read_cancelled(codes: list[int]) -> list[CancelCode]:
    return [CancelCode(code) for code in codes]


def _read_vacated(codes: list[int]) -> list[VacateCode]:
    return [VacateCode(code) for code in codes]


def _read_flags(flags: list[int]) -> list[bool]:
    return [bool(flag) for flag in flags]


def _read_drained(reply: list[Any]) -> tuple[str, int, int]:
    last, looked_at, stayed = reply
    return _as_bytes(last).decode(), int(looked_at), int(stayed)


def _as_bytes(value: bytes | int) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
