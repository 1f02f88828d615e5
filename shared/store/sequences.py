"""The sequences of a model as an operator sees them: which there are, what is known of each, their end, their copies.

A list costs nothing while nobody asks for it: it is put together from what the mesh keeps for its own use. Live
sequences stand in their owners' sets, waiting and moving ones in the starts stream, and all that have had a commit
among the deadlines. A sequence that is over is found by its id alone, while its tombstone stays.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from shared.contract.errors import Code, Reason
from shared.contract.ids import CorrelationId, SequenceId, correlation_id_of, is_nameable, model_of, sequence_id
from shared.contract.limits import CORRELATION_ID_CHARS_MAX, LIVE_MAX, PAUSE_MS_MAX
from shared.contract.messages import ReplyMessage, ServedModel, encode
from shared.contract.record import (
    ACCEPTED,
    BIRTH,
    CANCELLED,
    CHECKPOINTED,
    CLOSED,
    COMMITTED,
    DURABLE,
    ENDED,
    EPOCH,
    EXPIRED,
    FAILED,
    FIRST_EPOCH,
    INSTANCE,
    LATEST,
    LIVE,
    LOST,
    MOVING,
    NO_ENTRY,
    OWNER,
    PAGED,
    PAUSE,
    SLOT,
    START,
    STATE,
    TENANT,
    TOMBSTONES,
    VERSION,
    WAIT_ENTRY,
    WAITING,
)
from shared.contract.state_fields import state_of_field
from shared.store.commands import Redis
from shared.store.exported import ExportedSequence, ExportError, check, is_portable
from shared.store.forecasts import Forecasts
from shared.store.journals import SIZE, Journal, JournalError, NoSequenceError, journal_of, read_journal
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.moving import moved
from shared.store.reading import text_of, value_of
from shared.store.redis_client import redis_now_ms
from shared.store.release import RELEASE
from shared.store.script_values import EndCode, Ending, ReopenCode
from shared.store.scripts import Scripts
from shared.store.wishes import NO_LEADER, WishEntry, fulfilled

STATES = {
    WAITING: "waiting",
    LIVE: "live",
    MOVING: "moving",
    PAGED: "paged",
    ENDED: "ended",
    EXPIRED: "expired",
    FAILED: "failed",
    LOST: "lost",
    CANCELLED: "cancelled",
}
"""The states of a record by their names (docs/reference/keys.md)."""
PAUSED = "paused"
"""What a sequence is called that moves nowhere, because an operator paused it."""
OPEN_STATES = ("waiting", "live", "moving", "paged", PAUSED)
"""States of sequences that are not over."""
BETWEEN_EXPORTS_S = (0.05, 0.2, 1.0)
"""Pauses between two looks at a sequence that is to be exported and has an open step."""
IN_LINE = ("waiting", "moving")
"""States of sequences that wait for a slot."""
LEADER_S = 15.0
"""How long an operator's wish waits for its model's leader."""
READ_AT_ONCE = 512
"""Records, or members of a set, that are read in one round trip."""
FIELDS_READ = (
    *(STATE, OWNER, INSTANCE, SLOT, EPOCH, VERSION, BIRTH, ACCEPTED, COMMITTED, CHECKPOINTED, START, CLOSED),
    *(DURABLE, LATEST, FIRST_EPOCH, WAIT_ENTRY, PAUSE, TENANT),
)
ENDED_BY_OPERATOR = encode(
    ReplyMessage(
        "",
        error_code=Code.CANCELLED,
        error="an operator has ended the sequence before it had a slot",
        reason=Reason.CANCELLED,
    )
)
"""The reply to the steps of a sequence that is ended while it waits for its first slot."""


NOT_JOURNALED = (
    "its steps are not kept: give its model the parameter journal_steps, and journal_bytes if a first step is larger "
    "than 16 MiB; then begin the sequence again"
)


class PauseError(Exception):
    """A sequence is not paused, or not resumed, and why."""

    def __init__(self, reason: str, code: Code = Code.INVALID_ARG) -> None:
        super().__init__(reason)
        self.code = code


class SequenceStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the mesh holds of one sequence, at one moment. Steps count from the latest START, times are Redis' clock.

    requested_version  the version that the client names in its requests, "" if it names none
    version            the version that it runs on
    state              one of `STATES`, or `PAUSED`
    executor, instance, slot, epoch  of its owner; absent while it has none
    last_step          the last accepted step, as `sequence_step` counts
    open_steps         accepted steps that are not answered
    behind             answered steps since the last checkpoint: a takeover runs them again
    recoverable        whether a takeover finds the state
    closed             whether nothing but a START is accepted
    has_moved          whether it has changed its slot since it got the first one
    begun_ms, used_ms  when the sequence began, and when its last step was accepted; ms since 1970
    idle_left_ms       how much of its idle time is left; absent with open steps, in a pause, and when it is over
    paused_until_ms    end of the pause, ms since 1970; absent unless the sequence is paused
    tenant             whose it is, "" if nobody's in particular
    place              in the line of its version, from 1; absent unless it waits for a slot
    wait_ms            how long it will still wait, about; absent if nothing is known
    wait_low_ms, wait_high_ms  four of five such waits end between them; absent if nothing is known
    """

    model: str
    id: CorrelationId
    state: str
    version: str
    last_step: int
    open_steps: int
    behind: int
    recoverable: bool
    closed: bool
    begun_ms: int
    used_ms: int
    requested_version: str = ""
    executor: str = ""
    instance: int | None = None
    slot: int | None = None
    epoch: int | None = None
    idle_left_ms: int | None = None
    has_moved: bool = False
    paused_until_ms: int | None = None
    tenant: str = ""
    place: int | None = None
    wait_ms: int | None = None
    wait_low_ms: int | None = None
    wait_high_ms: int | None = None


SORT_KEYS: dict[str, Callable[[SequenceStatus], Any]] = {
    "id": lambda one: (isinstance(one.id, str), one.id, one.requested_version),
    "begun": lambda one: one.begun_ms,
    "used": lambda one: one.used_ms,
    "steps": lambda one: one.last_step,
    "open": lambda one: one.open_steps,
}
"""What a list may be sorted by."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which sequences a list shows.

    states    their states; empty: every one
    executor  the owner's name or id; "": any
    version   the version that they run on; "": any
    tenant    whose they are; "": anybody's
    prefix    the begin of the id, written as text
    sort      one of `SORT_KEYS`; with `-` before it the other way round
    """

    states: frozenset[str] = frozenset()
    executor: str = ""
    version: str = ""
    tenant: str = ""
    prefix: str = ""
    sort: str = "id"

    def shows(self, one: SequenceStatus) -> bool:
        if one.state not in (self.states or OPEN_STATES) or (self.version and one.version != self.version):
            return False
        if self.tenant and one.tenant != self.tenant:
            return False
        # An executor's id is its name and a random part.
        return not self.executor or self.executor in (one.executor, one.executor.rpartition("-")[0])

    def sorted(self, found: Iterable[SequenceStatus]) -> list[SequenceStatus]:
        by_id = sorted(found, key=SORT_KEYS["id"])
        return sorted(by_id, key=SORT_KEYS[self.sort.removeprefix("-")], reverse=self.sort.startswith("-"))


class Sequences:
    """The sequences of the mesh's models."""

    def __init__(self, redis: Redis, keys: Keyspace, membership: Membership) -> None:
        self._redis = redis
        self._keys = keys
        self._membership = membership
        self._scripts = Scripts(redis, keys)
        self._forecasts = Forecasts(redis, keys)

    async def matching(self, model: str, wanted: Wanted) -> list[SequenceStatus]:
        """The open sequences of a model that are wanted, sorted. One that begins or ends meanwhile may be missing."""
        names = {name async for name in self._names(model) if _id_text(name).startswith(wanted.prefix)}
        found: list[SequenceStatus] = []
        for piece in _pieces(sorted(names)):
            found += filter(wanted.shows, [one for one in await self.statuses(piece) if one is not None])
        return wanted.sorted(found)

    async def some(
        self, model: str, prefix: str, *, found_max: int, looked_at_max: int
    ) -> tuple[list[SequenceId], bool]:
        """Open sequences of a model whose id begins with this, at most so many, and whether these are all of them.

        looked_at_max  names that are looked at, some of them more than once
        """
        found: set[SequenceId] = set()
        looked_at = 0
        async for name in self._names(model):
            if len(found) == found_max or looked_at == looked_at_max:
                return sorted(found), False
            looked_at += 1
            if _id_text(name).startswith(prefix):
                found.add(name)
        return sorted(found), True

    async def statuses(self, sequences: Sequence[SequenceId]) -> list[SequenceStatus | None]:
        """Each sequence's status; None for one that the mesh does not know, or whose record cannot be read."""
        pipe = self._redis.pipeline(transaction=False)
        for sequence in sequences:
            own = self._keys.sequence(sequence)
            pipe.hmget(own.record, FIELDS_READ)
            pipe.pttl(own.idle)
        replies = await pipe.execute()
        return [
            value_of(self._keys.sequence(sequence).record, record, partial(_status, sequence, idle_left_ms=idle))
            for sequence, record, idle in zip(sequences, replies[::2], replies[1::2], strict=True)
        ]

    async def foretold(self, statuses: Sequence[SequenceStatus]) -> list[SequenceStatus]:
        """The statuses, of one model, with the place and the expected wait of each sequence that waits for a slot.

        Nothing is added while nobody leads the model.
        """
        waiting = next((_name(one) for one in statuses if one.state in IN_LINE), None)
        forecast = await self._forecasts.of(waiting) if waiting is not None else None
        if forecast is None:
            return list(statuses)
        found = [forecast.of(_name(one)) if one.state in IN_LINE else None for one in statuses]
        return [
            one if outlook is None else msgspec.structs.replace(one, **outlook.facts)
            for one, outlook in zip(statuses, found, strict=True)
        ]

    async def state_bytes(self, sequence: SequenceId) -> dict[str, int]:
        """Size of each state in the checkpoint, and of its other fields (docs/reference/keys.md), in bytes; empty
        without a checkpoint.
        """
        key = self._keys.sequence(sequence).checkpoint
        fields = [text_of(name) for name in await self._redis.hkeys(key) if name != b"n"]
        pipe = self._redis.pipeline(transaction=False)
        for field in fields:
            pipe.hstrlen(key, field)
        sizes: Counter[str] = Counter()
        for field, size in zip(fields, await pipe.execute(), strict=True):
            sizes[state_of_field(field)] += size
        return dict(sizes)

    async def export_bytes(self, sequence: SequenceId) -> int:
        """About how large an exported sequence is: its state and its journal."""
        size = value_of(
            self._keys.journal(sequence), await self._redis.hget(self._keys.journal(sequence), SIZE) or b"0", int
        )
        return sum((await self.state_bytes(sequence)).values()) + max(0, size or 0)

    async def end(self, sequence: SequenceId) -> EndCode:
        """Ends a sequence. Safe to repeat."""
        (code,) = await self._scripts.run(
            self._scripts.end([Ending(sequence)], tombstone=CANCELLED, reply=ENDED_BY_OPERATOR)
        )
        return code

    async def pause(self, sequence: SequenceId, pause_ms: int) -> SequenceStatus:
        """Pauses a sequence for so long, from now on. Safe to repeat.

        Raises PauseError with the reason for a sequence that is not paused then.
        """
        assert 0 < pause_ms <= PAUSE_MS_MAX, "no longer than the bound"
        until_ms = await redis_now_ms(self._redis) + pause_ms
        _check_pausable(await self._status(sequence))
        wish = WishEntry("z", {"u": until_ms})
        if not await fulfilled(self._redis, self._keys, sequence, wish, patience_s=LEADER_S):
            raise PauseError(NO_LEADER, Code.UNAVAILABLE)
        status = await self._status(sequence)
        _check_pausable(status)
        if status.state != PAUSED:
            raise PauseError(
                "somebody has resumed it, or its scheduler is of a release that cannot pause", Code.UNAVAILABLE
            )
        return status

    async def move(self, sequence: SequenceId, to: str = "", *, leaving: str = "") -> str:
        """Moves a sequence (see `shared.store.moving.moved`)."""
        members = await self._membership.members()
        return await moved(self._redis, self._keys, members, sequence, to, leaving=leaving)

    async def resume(self, sequence: SequenceId) -> SequenceStatus:
        """Resumes a sequence; one that is not paused stays as it is. Raises PauseError if it is not open."""
        await self._scripts.run(self._scripts.resume([sequence]))
        return await self._status(sequence)

    async def _status(self, sequence: SequenceId) -> SequenceStatus:
        (status,) = await self.statuses([sequence])
        if status is None or status.state not in OPEN_STATES:
            raise PauseError("there is no such open sequence", Code.NOT_FOUND)
        return status

    async def export(self, sequence: SequenceId) -> ExportedSequence:
        """A sequence with its state, as it stands between two steps. It goes on where it is.

        Raises ExportError for one that is not open, has an open step, or whose state is not in Redis as it is now.
        """
        own = self._keys.sequence(sequence)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(own.record)
            pipe.hgetall(own.checkpoint)
            pipe.hgetall(self._keys.journal(sequence))
            record, checkpoint, journal = await pipe.execute()
        fields = {text_of(name): record[name] for name in record}
        last = last_checkpointed(fields, checkpoint)
        exported = ExportedSequence(
            model=model_of(sequence),
            version=text_of(fields[VERSION]),
            id=correlation_id_of(sequence),
            last_step=last,
            start_step=int(fields[START]),
            record={name: value for name, value in fields.items() if is_portable(name)},
            checkpoint={text_of(name): value for name, value in checkpoint.items() if name != b"n"},
            exported_ms=await redis_now_ms(self._redis),
            release=RELEASE,
            journal=journal_of(journal, record),
        )
        check(exported)
        return exported

    async def journal(self, sequence: SequenceId) -> Journal:
        """The steps of a sequence that its journal holds, also of one that is over while its tombstone stays.

        Raises JournalError if it has none, or none that can be read.
        """
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(self._keys.sequence(sequence).record)
            pipe.hgetall(self._keys.journal(sequence))
            record, journal = await pipe.execute()
        if not record:
            raise NoSequenceError("there is no such sequence")
        start, committed = int(record[START.encode()]), int(record[COMMITTED.encode()])
        if committed < start:
            raise JournalError("its first step is not answered yet")
        steps = read_journal(journal_of(journal, record), start)
        if not steps:
            raise JournalError(NOT_JOURNALED)
        return Journal(model_of(sequence), text_of(record[VERSION.encode()]), steps, committed - start + 1)

    async def export_when_idle(self, sequence: SequenceId) -> ExportedSequence:
        """As `export`; for a moment it is waited for that the sequence's steps are answered."""
        for wait_s in BETWEEN_EXPORTS_S:
            try:
                return await self.export(sequence)
            except ExportError as error:
                if error.code is not Code.UNAVAILABLE:
                    raise
                await asyncio.sleep(wait_s)
        return await self.export(sequence)

    async def fork(self, origin: SequenceId, copy: SequenceId) -> ExportedSequence:
        """Opens a copy of a sequence under an id that has no open one. Raises ExportError as `export` and `reopen`."""
        exported = (await self.export_when_idle(origin)).without_replies()
        await self.reopen(copy, exported)
        return exported

    async def reopen(self, sequence: SequenceId, exported: ExportedSequence) -> None:
        """Opens an exported sequence under an id. It gets a slot with its next step.

        Raises ExportError if no executor serves its version, no client could name the id, the id has an open sequence,
        or there are too many.
        """
        if not is_nameable(correlation_id_of(sequence)):
            raise ExportError(
                "no client could go on with such an id: take a number from 1 on, or a text of 1 to "
                f"{CORRELATION_ID_CHARS_MAX} bytes"
            )
        served = await self._serving(model_of(sequence), exported.version)
        call = self._scripts.reopen(
            sequence, exported, idle_ms=served.idle_ms, live_max=LIVE_MAX, pageable=served.pageable
        )
        code = await self._scripts.run(call)
        if code is ReopenCode.EXISTS:
            raise ExportError(
                f"'{correlation_id_of(sequence)}' has an open sequence: end it first, or take another id",
                Code.ALREADY_EXISTS,
            )
        if code is ReopenCode.FULL:
            raise ExportError(f"model '{exported.model}' has as many live sequences as it may", Code.UNAVAILABLE)

    async def _serving(self, model: str, version: str) -> ServedModel:
        """What an executor that serves a version offers. Raises ExportError if none does."""
        for member in await self._membership.members():
            for served in member.registration.models:
                if member.usable and (served.model, served.version) == (model, version) and served.idle_ms:
                    return served
        raise ExportError(f"no executor serves version {version} of model '{model}' with sequences")

    async def _names(self, model: str) -> AsyncIterator[SequenceId]:
        """Every open sequence of a model, some more than once."""
        executors = [member.registration.executor for member in await self._membership.members()]
        for shard in self._keys.shard_ids():
            async for name, _ in self._redis.zscan_iter(self._keys.deadlines(shard, model), count=READ_AT_ONCE):
                yield SequenceId(text_of(name))
            for executor in executors:
                async for name in self._redis.sscan_iter(self._keys.owned(shard, executor, model), count=READ_AT_ONCE):
                    yield SequenceId(text_of(name))
            async for name in self._in_line(self._keys.starts(shard, model)):
                yield name

    async def _in_line(self, starts: str) -> AsyncIterator[SequenceId]:
        begin = "-"
        while entries := await self._redis.xrange(starts, begin, count=READ_AT_ONCE):
            for _, fields in entries:
                if b"q" in fields:
                    yield SequenceId(text_of(fields[b"q"]))
            begin = f"({text_of(entries[-1][0])}"


def _check_pausable(status: SequenceStatus) -> None:
    """Raises PauseError for a sequence that cannot be paused as it stands."""
    if status.state == "waiting":
        raise PauseError("it waits for its first slot and runs nothing yet: pause it when it has one, or end it")
    if not status.recoverable:
        raise PauseError("only its model knows its state: see sequence_recovery among the model's parameters")
    if status.closed and not status.open_steps:
        raise PauseError("it is about to end")


def last_checkpointed(record: Mapping[str, bytes], checkpoint: Mapping[bytes, bytes]) -> int:
    """The last step of a sequence whose state is wholly in its checkpoint. Raises ExportError for any other."""
    if not record or record[STATE] in TOMBSTONES:
        raise ExportError("there is no such open sequence", Code.NOT_FOUND)
    accepted, committed, checkpointed = (record.get(field) for field in (ACCEPTED, COMMITTED, CHECKPOINTED))
    if accepted != committed:
        raise ExportError("it has an open step: try again when that is answered", Code.UNAVAILABLE)
    if record.get(DURABLE) != b"1":
        raise ExportError("only its model knows its state: see sequence_recovery among the model's parameters")
    if committed != checkpointed or checkpoint.get(b"n") != committed:
        raise ExportError(
            "its checkpoint is older than its last step (checkpoint_interval): try again later", Code.UNAVAILABLE
        )
    return int(committed or 0)


def _pieces(names: Sequence[SequenceId]) -> Iterable[Sequence[SequenceId]]:
    return (names[begin : begin + READ_AT_ONCE] for begin in range(0, len(names), READ_AT_ONCE))


def _name(status: SequenceStatus) -> SequenceId:
    return sequence_id(status.model, status.requested_version, status.id)


def _id_text(sequence: SequenceId) -> str:
    return sequence.split("|", 2)[-1][1:]


def _status(sequence: SequenceId, record: Sequence[bytes | None], *, idle_left_ms: int) -> SequenceStatus | None:
    """Raises one of `FAILURES` for a record that cannot be read."""
    state, owner, instance, slot, epoch, version, birth, *counts, closed, durable, latest = record[:-4]
    first_epoch, waits, pause, tenant = record[-4:]
    is_paused = waits == NO_ENTRY
    if state is None:
        return None
    accepted, committed, checkpointed, start = (int(count or 0) for count in counts)
    model, requested, _ = sequence.split("|", 2)
    live = state == LIVE
    return SequenceStatus(
        model=model,
        id=correlation_id_of(sequence),
        state=PAUSED if is_paused else STATES[state],
        version=text_of(version or b""),
        last_step=max(0, accepted - start + 1),
        open_steps=accepted - committed,
        behind=max(0, committed - checkpointed),
        recoverable=durable == b"1",
        closed=closed == b"1",
        begun_ms=int((birth or b"0").partition(b"-")[0]),
        used_ms=int((latest or b"0").split()[0]),
        requested_version=requested,
        executor=text_of(owner or b"") if live else "",
        instance=int(instance or 0) if live else None,
        slot=int(slot or 0) if live else None,
        epoch=int(epoch or 0) if live else None,
        idle_left_ms=idle_left_ms if idle_left_ms >= 0 and not is_paused else None,
        has_moved=None not in (epoch, first_epoch) and epoch != first_epoch,
        paused_until_ms=int((pause or b"").split()[0]) if is_paused else None,
        tenant=text_of(tenant or b""),
    )
