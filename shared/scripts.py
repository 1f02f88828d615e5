"""The atomic steps of the mesh: one typed wrapper per Lua script, the only place that knows argument order.

Each wrapper takes work of one shard and makes one call. A lost connection leaves a call's outcome unknown; every
script may then be sent again: `commit` and `assign` tell what was done before, `submit` by request id.
Scripts run atomically in Redis; see the header of each `.lua` file for keys, arguments and reply.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib import resources
from typing import Any, Generic, TypeVar, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from shared.ids import Epoch, ExecutorId, InstanceIndex, SchedulerId, SequenceId, ShardId, SlotIndex, StepNumber, Term
from shared.keyspace import Keyspace
from shared.link import Link
from shared.messages import StepFlag


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


class Submission(msgspec.Struct, frozen=True):
    """A step on its way into a sequence.

    expected_step  `sequence_step` of the request (1 at START), or None
    message        encoded `InferMessage`
    """

    sequence: SequenceId
    flags: StepFlag
    request_id: str
    expected_step: int | None
    model: str
    version: str
    gateway: str
    token: str
    timeout_us: int
    message: bytes


class Submitted(msgspec.Struct, frozen=True):
    """code; step: the accepted step's number, or the last committed one (since START) for a refusal;
    extra: the stored reply (REPEATED), the expected step (WRONG_STEP)."""

    code: SubmitCode
    step: int
    extra: bytes


class Assignment(msgspec.Struct, frozen=True):
    """A sequence's new place."""

    sequence: SequenceId
    model: str
    executor: ExecutorId
    instance: InstanceIndex
    slot: SlotIndex


class Outcome(IntEnum):
    """How a step went: DONE, the model FAILED it, or VOID: it was not run, because the sequence has no state."""

    DONE = 0
    FAILED = 1
    VOID = 2


class CommitCode(IntEnum):
    """REFUSED: the sequence has another owner; drop it. OVER: committed, and the sequence's slot is free.
    OUT_OF_ORDER: the step before was not committed; only a fault of ours can bring that about."""

    OUT_OF_ORDER = -2
    REFUSED = -1
    BEFORE = 0
    COMMITTED = 1
    OVER = 2


class StepCommit(msgspec.Struct, frozen=True):
    """One step to be made final.

    reply       encoded `ReplyMessage`, sent on by the script; gateway "" sends it nowhere
    entries     inbox entries that this step's checkpoint makes unnecessary; empty: no checkpoint with this step
    checkpoint  state tensors by name, encoded; empty when the state did not change
    traceparent  of the step's span; stays with the caller
    """

    sequence: SequenceId
    epoch: Epoch
    step: StepNumber
    flags: StepFlag
    outcome: Outcome
    gateway: str
    token: str
    reply: bytes
    request_id: str = ""
    keep_reply: bool = False
    entries: Sequence[str] = ()
    checkpoint: Sequence[tuple[str, bytes]] = ()
    traceparent: str = ""


class WorkItem(msgspec.Struct, frozen=True):
    """A stateless request for its work stream. queue_bound: of its own queue policy, 0 for none."""

    stream: str
    gateway: str
    token: str
    message: bytes
    queue_bound: int = 0


class WorkDone(msgspec.Struct, frozen=True):
    """A stateless request's answer."""

    stream: str
    entry: str
    gateway: str
    token: str
    reply: bytes


def _source(name: str) -> str:
    folder = resources.files("shared") / "lua"
    return (folder / "common.lua").read_text() + (folder / f"{name}.lua").read_text()


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call of a script, ready to be sent: alone, or with others in one round trip (`Scripts.run_all`)."""

    script: str
    keys: Sequence[str]
    args: Sequence[Any]
    read: Callable[[Any], T]


NAMES = ("submit", "assign", "commit", "expire", "reclaim", "drain", "reject", "enqueue", "finish", "lead", "resign")


class Scripts:
    """The scripts of one mesh on one connection (pool).

    A call of which it must be known whether it happened (`submit` without a request id) belongs on a connection
    without retries: `connect(url, retries=0)`.
    """

    def __init__(self, redis: Redis, keys: Keyspace) -> None:
        # redis-py types its shared sync/async commands as unions; here they are always awaitable.
        self._redis = cast(Any, redis)
        self._keys = keys
        self._sources = {name: _source(name) for name in NAMES}
        self._digests = {name: hashlib.sha1(text.encode()).hexdigest() for name, text in self._sources.items()}

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
            for name in {calls[index].script for index in unknown}:
                await self._redis.script_load(self._sources[name])
            for index, outcome in zip(unknown, await self._send([calls[i] for i in unknown], link), strict=True):
                outcomes[index] = outcome
        return [
            outcome if isinstance(outcome, Exception) else call.read(outcome)
            for call, outcome in zip(calls, outcomes, strict=True)
        ]

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
        self, steps: Sequence[Submission], *, shard: ShardId, backlog_max: int, in_flight_max: int
    ) -> Call[list[Submitted]]:
        """Accepts steps of one shard in this order; each has its own outcome."""
        keys: list[str] = []
        args: list[Any] = [self._keys.inbox_prefix(shard), backlog_max, in_flight_max]
        for step in steps:
            own = self._keys.sequence(step.sequence)
            keys += (own.record, own.idle, own.parked, self._keys.starts(shard, step.model))
            args += (
                step.sequence,
                int(step.flags),
                step.request_id,
                "" if step.expected_step is None else step.expected_step,
                step.version,
                step.gateway,
                step.token,
                step.timeout_us,
                step.message,
            )
        return Call("submit", keys, args, _read_submitted)

    def assign(self, assignments: Sequence[Assignment], *, shard: ShardId, term: Term) -> Call[list[Epoch]]:
        """Gives sequences of one model and shard their owners; 0 for one that does not wait any more.

        Raises redis.ResponseError that begins with FENCED when a newer leader exists.
        """
        model = assignments[0].model
        keys = [self._keys.fence(shard, model), self._keys.epoch(shard), self._keys.starts(shard, model)]
        args: list[Any] = [term]
        for assignment in assignments:
            own = self._keys.sequence(assignment.sequence)
            keys += (
                own.record,
                own.parked,
                self._keys.inbox(shard, assignment.executor),
                self._keys.owned(shard, assignment.executor, model),
            )
            args += (assignment.sequence, assignment.executor, assignment.instance, assignment.slot)
        return Call("assign", keys, args, list)

    def commit(
        self,
        steps: Sequence[StepCommit],
        *,
        shard: ShardId,
        executor: ExecutorId,
        model: str,
        idle_ms: int,
        tombstone_ms: int,
    ) -> Call[list[CommitCode]]:
        """Makes one batch's steps of one shard final, and answers them. Safe to repeat after a lost connection."""
        keys = [
            self._keys.inbox(shard, executor),
            self._keys.owned(shard, executor, model),
            self._keys.deadlines(shard, model),
            self._keys.feed(shard, model),
        ]
        args: list[Any] = [self._keys.replies_prefix(shard), idle_ms, tombstone_ms]
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
                step.request_id,
                1 if step.keep_reply else 0,
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
        keys = [self._keys.fence(shard, model), self._keys.deadlines(shard, model), self._keys.feed(shard, model)]
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
        self, executor: ExecutorId, *, shard: ShardId, model: str, term: Term, count: int, tombstone_ms: int
    ) -> Call[int]:
        """Takes up to `count` sequences from an executor; returns how many it looked at, 0 when none is left."""
        keys = [
            self._keys.fence(shard, model),
            self._keys.epoch(shard),
            self._keys.starts(shard, model),
            self._keys.owned(shard, executor, model),
            self._keys.deadlines(shard, model),
            self._keys.feed(shard, model),
        ]
        return Call("reclaim", keys, [term, executor, count, tombstone_ms, self._keys.base(shard)], int)

    def drain(
        self, executor: ExecutorId, *, shard: ShardId, after: str = "0-0", count: int = 256, alive: bool = False
    ) -> Call[tuple[str, int, int]]:
        """Moves inbox entries that are not an executor's own on: (last entry looked at, how many, how many stayed).

        alive  the executor still reads its inbox: control messages stay there for it
        """
        args = [executor, after, count, self._keys.base(shard), 1 if alive else 0]
        return Call("drain", [self._keys.inbox(shard, executor)], args, _read_drained)

    def reject(
        self, rejections: Sequence[tuple[SequenceId, bytes]], *, shard: ShardId, model: str, term: Term
    ) -> Call[list[int]]:
        """Ends waiting sequences; each of their steps gets the encoded reply. -1: it does not wait any more."""
        keys = [self._keys.fence(shard, model), self._keys.starts(shard, model)]
        args: list[Any] = [term, self._keys.replies_prefix(shard)]
        for sequence, reply in rejections:
            own = self._keys.sequence(sequence)
            keys += (own.record, own.parked, own.idle, own.checkpoint)
            args += (sequence, reply)
        return Call("reject", keys, args, list)

    def lead(self, model: str, scheduler: SchedulerId, *, lease_ms: int, term: Term) -> Call[Term]:
        """Takes the lead of a model (term 0) or keeps it; the term, or 0 when another scheduler leads."""
        keys = [self._keys.leader(model), self._keys.terms]
        return Call("lead", keys, [model, scheduler, lease_ms, term], Term)

    def resign(self, model: str, scheduler: SchedulerId, *, term: Term) -> Call[bool]:
        """Gives the lead of a model back; False when it was lost before."""
        return Call("resign", [self._keys.leader(model)], [scheduler, term], bool)

    def enqueue(self, items: Sequence[WorkItem], *, bound: int) -> Call[list[bool]]:
        """Puts stateless requests (of one shard) on their work streams; False: that queue is full."""
        args: list[Any] = [bound]
        for item in items:
            args += (item.gateway, item.token, item.message, item.queue_bound)
        return Call("enqueue", [item.stream for item in items], args, _read_flags)

    def finish(self, done: Sequence[WorkDone], *, shard: ShardId, group: str, consumer: str) -> Call[list[bool]]:
        """Answers stateless requests of one shard; False: another consumer has claimed it."""
        args: list[Any] = [group, self._keys.replies_prefix(shard), consumer]
        for item in done:
            args += (item.entry, item.gateway, item.token, item.reply)
        return Call("finish", [item.stream for item in done], args, _read_flags)


def _read_submitted(replies: list[list[Any]]) -> list[Submitted]:
    return [Submitted(SubmitCode(code), step, _as_bytes(extra)) for code, step, extra in replies]


def _read_commit(codes: list[int]) -> list[CommitCode]:
    return [CommitCode(code) for code in codes]


def _read_flags(flags: list[int]) -> list[bool]:
    return [bool(flag) for flag in flags]


def _read_drained(reply: list[Any]) -> tuple[str, int, int]:
    last, looked_at, stayed = reply
    return _as_bytes(last).decode(), int(looked_at), int(stayed)


def _as_bytes(value: bytes | int) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
