"""The sequences of a model, for an operator: which there are, their end, their pauses, their copies.

A list costs nothing while nobody asks for it: it is put together from what the mesh keeps for its own use. Live
sequences stand in their owners' sets, waiting and moving ones in the starts stream, and all that have had a commit
among the deadlines. A sequence that is over is found by its id alone, while its tombstone stays.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Container, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec

from shared.contract.errors import Code, NotDoneError
from shared.contract.ids import (
    SequenceId,
    ShardId,
    correlation_id_of,
    is_nameable,
    model_of,
    requested_version_of,
)
from shared.contract.limits import CORRELATION_ID_CHARS_MAX, LIVE_MAX, PAUSE_MS_MAX
from shared.contract.messages import ServedModel
from shared.contract.model_config import ModelConfig
from shared.contract.record import (
    ACCEPTED,
    CANCELLED,
    CHECKPOINTED,
    COMMITTED,
    DURABLE,
    LOST,
    MARK,
    START,
    STATE,
    TOMBSTONES,
    VERSION,
)
from shared.contract.state_fields import MODEL_FIELD, state_of_field
from shared.store.commands import Redis
from shared.store.connections.redis_client import redis_now_ms
from shared.store.exported import ExportedSequence, check, is_portable
from shared.store.forecasts import Forecasts
from shared.store.journals import SIZE, Journal, journal_of, read_journal
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.moving import moved
from shared.store.reading import FAILURES, text_of, value_of
from shared.store.release import RELEASE
from shared.store.script_values import EndCode, Ending, ReopenCode, ended_by
from shared.store.scripts import Scripts
from shared.store.sequence_status import FIELDS_READ, IN_LINE, OPEN_STATES, PAUSED, SequenceStatus, Wanted, status_of
from shared.store.wishes import NO_LEADER, WishEntry, fulfilled

BETWEEN_EXPORTS_S = (0.05, 0.2, 1.0)
"""Pauses between two looks at a sequence that is to be exported and has an open step."""
LEADER_S = 15.0
"""How long an operator's wish waits for its model's leader."""
READ_AT_ONCE = 128
"""Records, or members of a set, that are read in one round trip."""
ENDED_BY_OPERATOR = ended_by("an operator")
NOT_JOURNALED = (
    "its steps are not kept: give its model the parameter journal_steps, and journal_bytes if a first step is larger "
    "than 16 MiB; then begin the sequence again"
)


def kept_by(config: ModelConfig) -> str:
    """Who keeps the sequences of an ensemble, none of which has its name; "" for any other model."""
    if not config.ensemble:
        return ""
    models = ", ".join(dict.fromkeys(step.model for step in config.ensemble))
    return f"model '{config.name}' is an ensemble: its sequences are kept by the models of its steps ({models})"


class StateSizes(msgspec.Struct, frozen=True):
    """How large a checkpoint is, in bytes.

    state_bytes        of each state, by its name
    model_state_bytes  of what the model's own method gave; 0 if it gave nothing
    """

    state_bytes: dict[str, int]
    model_state_bytes: int = 0


class Sequences:
    """The sequences of the mesh's models. live_max: of one model and shard; no copy is opened beyond it"""

    def __init__(self, redis: Redis, keys: Keyspace, membership: Membership, *, live_max: int = LIVE_MAX) -> None:
        self._redis = redis
        self._keys = keys
        self._membership = membership
        self._live_max = live_max
        self._scripts = Scripts(redis, keys)
        self._forecasts = Forecasts(redis, keys)

    async def page(
        self, model: str, wanted: Wanted, begin: int = 0, end: int | None = None, *, without: Container[ShardId] = ()
    ) -> tuple[list[SequenceStatus], int]:
        """The open sequences of a model that are wanted, sorted: a part of them, and how many there are in all. Of the
        others only what decides is read. One that begins or ends meanwhile may be missing.

        without  shards that are not looked at
        """
        names = {name async for name in self._names(model, without) if _id_text(name).startswith(wanted.prefix)}
        fields = None if end is None else wanted.fields
        found = wanted.sorted(await self._shown(sorted(names), wanted, fields))
        page = found[begin:end]
        if end is not None:
            page = await self._shown([one.sequence for one in page], wanted)
        return page, len(found)

    async def _shown(
        self, sequences: Sequence[SequenceId], wanted: Wanted, fields: Sequence[str] | None = None
    ) -> list[SequenceStatus]:
        shown: list[SequenceStatus] = []
        for piece in _pieces(sequences):
            shown += filter(wanted.shows, [one for one in await self.statuses(piece, fields) if one is not None])
        return shown

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

    async def statuses(
        self, sequences: Sequence[SequenceId], fields: Sequence[str] | None = None
    ) -> list[SequenceStatus | None]:
        """Each sequence's status; None for one that the mesh does not know, or whose record cannot be read.

        fields  of their records that are read, STATE among them. None: all that are of use, and the idle time
        """
        pipe = self._redis.pipeline(transaction=False)
        records = self._keys.records(sequences)
        for record in records:
            pipe.hmget(record, fields or FIELDS_READ)
        if fields is None:
            for sequence in sequences:
                pipe.pttl(self._keys.sequence(sequence).idle)
        replies = await pipe.execute()
        idle = replies[len(records) :] or [-1] * len(records)
        return [
            value_of(record, found, partial(status_of, sequence, fields or FIELDS_READ, idle_left_ms=idle_ms))
            for sequence, record, found, idle_ms in zip(sequences, records, replies[: len(records)], idle, strict=True)
        ]

    async def foretold(self, statuses: Sequence[SequenceStatus]) -> list[SequenceStatus]:
        """The statuses, of one model, with the place and the expected wait of each sequence that waits for a slot.

        Nothing is added while nobody leads the model.
        """
        waiting = next((one.sequence for one in statuses if one.state in IN_LINE), None)
        forecast = await self._forecasts.of(waiting) if waiting is not None else None
        if forecast is None:
            return list(statuses)
        found = [forecast.of(one.sequence) if one.state in IN_LINE else None for one in statuses]
        return [
            one if outlook is None else msgspec.structs.replace(one, **outlook.facts)
            for one, outlook in zip(statuses, found, strict=True)
        ]

    async def state_sizes(self, sequence: SequenceId) -> StateSizes:
        """How large a sequence's checkpoint is; without one nothing has a size."""
        key = self._keys.sequence(sequence).checkpoint
        fields = [text_of(name) for name in await self._redis.hkeys(key)]
        pipe = self._redis.pipeline(transaction=False)
        for field in fields:
            pipe.hstrlen(key, field)
        sizes: Counter[str] = Counter()
        found: dict[str, int] = dict(zip(fields, await pipe.execute(), strict=True))
        for field, size in found.items():
            if (state := state_of_field(field)) is not None:
                sizes[state] += size
        return StateSizes(dict(sizes), found.get(MODEL_FIELD, 0))

    async def export_bytes(self, sequence: SequenceId) -> int:
        """About how large an exported sequence is: its state and its journal."""
        size = value_of(
            self._keys.journal(sequence), await self._redis.hget(self._keys.journal(sequence), SIZE) or b"0", int
        )
        sizes = await self.state_sizes(sequence)
        return sum(sizes.state_bytes.values()) + sizes.model_state_bytes + max(0, size or 0)

    async def end(self, sequence: SequenceId, *, is_lost: bool = False) -> EndCode:
        """Ends a sequence. Safe to repeat.

        is_lost  it is given up: it is over at once, and its open steps are told that it is lost
        """
        tombstone = LOST if is_lost else CANCELLED
        (code,) = await self._scripts.run(
            self._scripts.end([Ending(sequence)], tombstone=tombstone, reply=ENDED_BY_OPERATOR)
        )
        return code

    async def pause(self, sequence: SequenceId, pause_ms: int) -> SequenceStatus:
        """Pauses a sequence for so long, from now on. Safe to repeat.

        Raises NotDoneError with the reason for a sequence that is not paused then.
        """
        assert 0 < pause_ms <= PAUSE_MS_MAX, "no longer than the bound"
        # The clock of the server that times the pause.
        until_ms = await redis_now_ms(self._redis.home(self._keys.sequence(sequence).record)) + pause_ms
        _check_pausable(await self._status(sequence))
        wish = WishEntry("z", {"u": until_ms})
        if not await fulfilled(self._redis, self._keys, sequence, wish, patience_s=LEADER_S):
            raise NotDoneError(NO_LEADER, Code.UNAVAILABLE)
        status = await self._status(sequence)
        _check_pausable(status)
        if status.state != PAUSED:
            raise NotDoneError(
                "somebody has resumed it, or its scheduler is of a release that cannot pause", Code.UNAVAILABLE
            )
        return status

    async def move(self, sequence: SequenceId, to: str = "", *, leaving: str = "") -> str:
        """Moves a sequence (see `shared.store.moving.moved`)."""
        members = await self._membership.members()
        return await moved(self._redis, self._keys, members, sequence, to, leaving=leaving)

    async def resume(self, sequence: SequenceId) -> SequenceStatus:
        """Resumes a sequence; one that is not paused stays as it is. Raises NotDoneError if it is not open."""
        await self._scripts.run(self._scripts.resume([sequence]))
        return await self._status(sequence)

    async def _status(self, sequence: SequenceId) -> SequenceStatus:
        (status,) = await self.statuses([sequence])
        if status is None or status.state not in OPEN_STATES:
            raise NotDoneError("there is no such open sequence", Code.NOT_FOUND)
        return status

    async def export(self, sequence: SequenceId) -> ExportedSequence:
        """A sequence with its state, as it stands between two steps. It goes on where it is.

        Raises NotDoneError for one that is not open, has an open step, or whose state is not in Redis as it is now.
        """
        own = self._keys.sequence(sequence)
        # No transaction: a Redis without memory refuses one, also of reads. A step in between shows in the record.
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(own.record)
            pipe.hgetall(own.checkpoint)
            pipe.hgetall(self._keys.journal(sequence))
            pipe.hgetall(own.record)
            record, checkpoint, journal, record_now = await pipe.execute()
        if record_now != record:
            raise NotDoneError("it has just changed: try again later", Code.UNAVAILABLE)
        fields = {text_of(name): record[name] for name in record}
        with readable():
            last = last_checkpointed(fields, checkpoint)
            version, start = text_of(fields[VERSION]), int(fields[START])
        exported = ExportedSequence(
            model=model_of(sequence),
            version=version,
            id=correlation_id_of(sequence),
            last_step=last,
            start_step=start,
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

        Raises NotDoneError if it has none, or none that can be read.
        """
        # The journal first: then it is a beginning of what the record tells, whatever comes in between. No transaction,
        # which a Redis without memory refuses.
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(self._keys.journal(sequence))
            pipe.hgetall(self._keys.sequence(sequence).record)
            journal, record = await pipe.execute()
        if not record:
            raise NotDoneError("there is no such sequence", Code.NOT_FOUND)
        with readable():
            start, committed = int(record[START.encode()]), int(record[COMMITTED.encode()])
            version = text_of(record[VERSION.encode()])
        if committed < start:
            raise NotDoneError("its first step is not answered yet")
        steps = read_journal(journal_of(journal, record), start)
        if not steps:
            raise NotDoneError(NOT_JOURNALED)
        return Journal(model_of(sequence), version, steps, committed - start + 1)

    async def export_when_idle(self, sequence: SequenceId) -> ExportedSequence:
        """As `export`; for a moment it is waited for that the sequence's steps are answered."""
        for wait_s in BETWEEN_EXPORTS_S:
            try:
                return await self.export(sequence)
            except NotDoneError as error:
                if error.code is not Code.UNAVAILABLE:
                    raise
                await asyncio.sleep(wait_s)
        return await self.export(sequence)

    async def fork(self, origin: SequenceId, copy: SequenceId) -> ExportedSequence:
        """Opens a copy of a sequence under an id that has no open one. Raises NotDoneError as `export` and `reopen`."""
        exported = (await self.export_when_idle(origin)).without_replies()
        await self.reopen(copy, exported)
        return exported

    async def reopen(self, sequence: SequenceId, exported: ExportedSequence) -> None:
        """Opens an exported sequence under an id. It gets a slot with its next step; one that is to keep its slot gets
        it at once.

        Raises NotDoneError if no executor serves its version, or none could go on from its state, no client could name
        the id, clients are to name another version, the id has an open sequence, or there are too many.
        """
        if not is_nameable(correlation_id_of(sequence)):
            raise NotDoneError(
                "no client could go on with such an id: take a number from 1 on, or a text of 1 to "
                f"{CORRELATION_ID_CHARS_MAX} bytes"
            )
        requested = requested_version_of(sequence)
        # One with @ is no client's, but names an ensemble and its step (docs/guides/ensembles.md).
        if requested not in ("", exported.version) and not requested.startswith("@"):
            raise NotDoneError(
                f"it is of version {exported.version}, and a client that names version {requested} must not get its "
                f"answers: name version {exported.version}, or none"
            )
        served = await self._serving(model_of(sequence), exported.version, text_of(exported.record.get(MARK, b"")))
        record = await self._membership.model(model_of(sequence))
        # What an executor announces is shorter where sequences may be orphans: nobody's connection to this one is gone.
        idle_ms = record.config.idle_ms if record is not None else served.idle_ms
        call = self._scripts.reopen(
            sequence, exported, idle_ms=idle_ms, live_max=self._live_max, pageable=served.pageable
        )
        code = await self._scripts.run(call)
        if code is ReopenCode.EXISTS:
            raise NotDoneError(
                f"{correlation_id_of(sequence)!r} has an open sequence: end it first, or take another id",
                Code.ALREADY_EXISTS,
            )
        if code is ReopenCode.FULL:
            raise NotDoneError(f"model '{exported.model}' has as many live sequences as it may", Code.UNAVAILABLE)

    async def _serving(self, model: str, version: str, mark: str) -> ServedModel:
        """What an executor offers that serves a version and goes on from states of a mark. Raises NotDoneError if none
        does.
        """
        offers = [
            served
            for member in await self._membership.members()
            for served in member.registration.models
            if member.usable and (served.model, served.version) == (model, version) and served.idle_ms
        ]
        if not offers:
            raise NotDoneError(f"no executor serves version {version} of model '{model}' with sequences")
        for served in offers:
            if not mark or served.mark in ("", mark):
                return served
        raise NotDoneError(
            f"its state is of other files, or of another configuration, than version {version} of model '{model}' is "
            "served with: load those that it was exported from"
        )

    async def _names(self, model: str, without: Container[ShardId] = ()) -> AsyncIterator[SequenceId]:
        """Every open sequence of a model, some more than once."""
        executors = [member.registration.executor for member in await self._membership.members()]
        for shard in (shard for shard in self._keys.shards if shard not in without):
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
    """Raises NotDoneError for a sequence that cannot be paused as it stands."""
    if status.state == "waiting":
        raise NotDoneError("it waits for its first slot and runs nothing yet: pause it when it has one, or end it")
    if not status.recoverable:
        raise NotDoneError("only its model knows its state: see sequence_recovery among the model's parameters")
    if status.closed and not status.open_steps:
        raise NotDoneError("it is about to end")


@contextmanager
def readable() -> Generator[None]:
    """Raises NotDoneError where a record cannot be read."""
    try:
        yield
    except FAILURES as damage:
        raise NotDoneError(f"its record in Redis cannot be read ({damage!r}): begin another one") from damage


def last_checkpointed(record: Mapping[str, bytes], checkpoint: Mapping[bytes, bytes]) -> int:
    """The last step of a sequence whose state is wholly in its checkpoint. Raises NotDoneError for any other."""
    if not record or record[STATE] in TOMBSTONES:
        raise NotDoneError("there is no such open sequence", Code.NOT_FOUND)
    accepted, committed, checkpointed = (record.get(field) for field in (ACCEPTED, COMMITTED, CHECKPOINTED))
    if accepted != committed:
        raise NotDoneError("it has an open step: try again when that is answered", Code.UNAVAILABLE)
    if record.get(DURABLE) != b"1":
        raise NotDoneError("only its model knows its state: see sequence_recovery among the model's parameters")
    if not checkpoint:
        raise NotDoneError(
            "Redis holds no checkpoint of it: there is none yet (checkpoint_interval: try again later), or never one, "
            "because its steps are replayed (sequence_recovery)",
            Code.UNAVAILABLE,
        )
    # Not by the step that the checkpoint names: one that failed behind it has left the state as it was.
    if committed != checkpointed:
        raise NotDoneError(
            "its checkpoint is older than its last step (checkpoint_interval): try again later", Code.UNAVAILABLE
        )
    return int(committed or 0)


def _pieces(names: Sequence[SequenceId]) -> Iterable[Sequence[SequenceId]]:
    return (names[begin : begin + READ_AT_ONCE] for begin in range(0, len(names), READ_AT_ONCE))


def _id_text(sequence: SequenceId) -> str:
    return sequence.split("|", 2)[-1][1:]
