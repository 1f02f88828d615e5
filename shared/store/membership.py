"""The members of the mesh: executors register and hold a lease; they publish their models for services without a
repository.

A registration says what an executor can do, its lease says that it lives. Only the end of the lease (or a registration
marked as leaving) makes a member dead; silence on a stream does not.

An executor whose registration cannot be read is treated as leaving: its sequences are moved, and it registers again
(`is_known`). A model whose record cannot be read does not exist until it is published again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import msgspec

from shared.contract.ids import ExecutorId, entry_key
from shared.contract.messages import ExecutorRegistration, ModelRecord
from shared.store.commands import Pipeline, Redis, Value
from shared.store.digests import DigestedHash
from shared.store.keyspace import Keyspace
from shared.store.reading import clock_ms, text_of, value_of
from shared.store.vital import vital

UNKNOWN_PID = -1
"""Process id in the place of a registration that could not be read."""
REMOVE_EMPTY = """#!lua flags=allow-oom
return redis.call('XLEN', KEYS[1]) == 0 and redis.call('DEL', KEYS[1]) or 0
"""
"""Removes a stream without entries, if it is one at that moment."""

T = TypeVar("T")

_registration_decoder = msgspec.json.Decoder(ExecutorRegistration)
_record_decoder = msgspec.json.Decoder(ModelRecord)


@dataclass(frozen=True, slots=True)
class Member:
    """A registered executor. alive: whether its lease holds"""

    registration: ExecutorRegistration
    alive: bool

    @property
    def usable(self) -> bool:
        """Whether new sequences may go there: it is alive and not leaving."""
        return self.alive and not self.registration.leaving


class Membership:
    """Registrations, leases and models of one mesh, in Redis."""

    def __init__(self, redis: Redis, keys: Keyspace) -> None:
        self._redis = redis
        self._keys = keys
        self._registrations = DigestedHash(redis, keys.executors, keys.executor_digests, self._registration)
        self._records = DigestedHash(redis, keys.models, keys.model_digests, self._record)
        self._known: list[ExecutorId] = []

    async def register(self, registration: ExecutorRegistration, *, lease_ms: int) -> None:
        """Writes an executor's registration and takes its lease, both atomically."""
        # Together: a registration without a lease would look like a dead executor.
        lease = ("SET", self._keys.executor_lease(registration.executor), "1", "PX", lease_ms)
        await self._redis.eval(*vital(*self._told(registration), lease))

    async def update(self, registration: ExecutorRegistration) -> None:
        """Replaces a registration; the lease stays as it is."""
        await self._redis.eval(*vital(*self._told(registration)))

    def _told(self, registration: ExecutorRegistration) -> tuple[Sequence[Value], Sequence[Value]]:
        """The commands that write a registration."""
        return self._registrations.written(registration.executor, msgspec.json.encode(registration))

    async def renew(self, executor: ExecutorId, *, lease_ms: int) -> bool:
        """Extends a lease that still holds; False if it has ended: then the executor must drop everything that it
        owns.
        """
        # PEXPIRE and not SET: a lease that has ended must not come back. Also a Redis without memory takes it.
        return bool(await self._redis.pexpire(self._keys.executor_lease(executor), lease_ms))

    async def leave(self, registration: ExecutorRegistration) -> None:
        """Marks an executor as leaving and ends its lease; its sequences are taken over at once."""
        leaving = msgspec.structs.replace(registration, leaving=True)
        # Together: the end of a lease without the mark would look like a death.
        await self._redis.eval(*vital(*self._told(leaving), ("DEL", self._keys.executor_lease(registration.executor))))

    async def is_leaving(self, executor: ExecutorId) -> bool:
        """Whether an executor has marked itself as leaving; False if it just died."""
        found = await self._registrations.one(executor)
        return found is not None and found.leaving

    async def is_known(self, executor: ExecutorId) -> bool:
        """Whether an executor is registered, and its registration can be read."""
        found = await self._registrations.one(executor)
        return found is not None and not is_unknown(found)

    async def give_up(self, executor: ExecutorId) -> None:
        """Ends an executor's lease at once, so that others take over."""
        await self._redis.delete(self._keys.executor_lease(executor))

    async def drain(self, who: str, now_ms: int) -> None:
        """Asks an executor, by its name or id, to hand over its sequences and to stay out of the mesh."""
        await self._redis.hset(self._keys.drained, who, now_ms)

    async def undrain(self, who: str) -> bool:
        """Takes a drain back; False if there was none."""
        return bool(await self._redis.hdel(self._keys.drained, who))

    async def drained(self) -> list[str]:
        """Names and ids of drained executors."""
        return sorted(text_of(name) for name in await self._redis.hkeys(self._keys.drained))

    async def is_drained(self, *names: str) -> bool:
        return any(since is not None for since in await self._redis.hmget(self._keys.drained, names))

    async def remove(self, executor: ExecutorId) -> bool:
        """Forgets an executor whose sequences have all been moved. Returns whether it was there."""
        # No transaction: a Redis without memory refuses one, whatever it does.
        async with self._redis.pipeline(transaction=False) as pipe:
            for shard in self._keys.shards:
                # Steps of a sequence that by its record is still there would be lost (`scheduler.sweep` finds them).
                pipe.eval(REMOVE_EMPTY, 1, self._keys.inbox(shard, executor))
            self._registrations.remove(pipe, executor)
            *_, removed = await pipe.execute()
        return bool(removed)

    async def members(self) -> list[Member]:
        """Every registered executor, dead ones too, ordered by id."""
        members, _ = await self.look()
        return members

    async def look(self) -> tuple[list[Member], int]:
        """The members, and the clock of Redis then, ms. One round trip, or more if executors have come, gone or
        changed.
        """
        while True:
            known = self._known

            def leases_and_time(pipe: Pipeline) -> None:
                for executor in known:  # noqa: B023  it is called before the next turn
                    pipe.exists(self._keys.executor_lease(executor))
                pipe.time()

            found, (*leases, time) = await self._registrations.all(leases_and_time)
            registrations = sorted(found, key=lambda r: r.executor)
            self._known = [registration.executor for registration in registrations]
            if self._known == known:
                members = [
                    Member(registration, alive=lease == 1 and not is_unknown(registration))
                    for registration, lease in zip(registrations, leases, strict=True)
                ]
                return members, clock_ms(time)

    def _registration(self, name: bytes, data: bytes) -> ExecutorRegistration:
        executor = ExecutorId(text_of(name))

        def decode(data: bytes) -> ExecutorRegistration:
            found = _registration_decoder.decode(data)
            entry_key(found.applied)
            if found.executor != executor:
                raise ValueError(f"it is the one of {found.executor}")
            others = self._registrations.known
            return msgspec.structs.replace(
                found,
                models=_shared(found.models, [one.models for one in others]),
                repository=_shared(found.repository, [one.repository for one in others]),
            )

        return value_of(self._keys.executors, data, decode, field=executor) or ExecutorRegistration(
            executor, name=executor, host="", pid=UNKNOWN_PID, started_ms=0, leaving=True
        )

    async def publish_changed(self, records: Iterable[ModelRecord]) -> None:
        """Publishes the records that the mesh does not have, or has otherwise, as far as digests tell."""
        values = {record.config.name: msgspec.json.encode(record) for record in records}
        for name in await self._records.different(values):
            await self._redis.eval(*vital(*self._records.written(name, values[name])))

    async def publish(self, record: ModelRecord) -> None:
        await self._redis.eval(*vital(*self._records.written(record.config.name, msgspec.json.encode(record))))

    async def model(self, name: str) -> ModelRecord | None:
        """One model as it was published last; decoded once per content. None if no executor published it, or it cannot
        be read.
        """
        return await self._records.one(name)

    def _record(self, name: bytes, data: bytes) -> ModelRecord | None:
        model = text_of(name)

        def decode(data: bytes) -> ModelRecord:
            record = _record_decoder.decode(data)
            if record.config.name != model:
                raise ValueError(f"it is the one of {record.config.name}")
            return record

        found: ModelRecord | None = value_of(self._keys.models, data, decode, field=model)
        return found

    async def unknown(self, records: Sequence[ModelRecord]) -> list[ModelRecord]:
        """The records that the mesh does not have, or has in a form that cannot be read."""
        if not records:
            return []
        found = await self._records.some(record.config.name for record in records)
        return [record for record in records if found.get(record.config.name) is None]

    async def models(self) -> dict[str, ModelRecord]:
        """Every published model by name, decoded as by `model`. Whether an executor serves a model, `members` tells."""
        found, _ = await self._records.all()
        return {record.config.name: record for record in found if record is not None}


def _shared(mine: tuple[T, ...], others: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
    """An equal one of the others, if there is one: executors of one repository say the same of it, in thousands of
    lines, which are kept once.
    """
    distinct = {id(other): other for other in others}.values()
    return next((other for other in distinct if other == mine), mine)


def lines_of(told: Iterable[tuple[T, ...]]) -> Iterable[T]:
    """The lines of what several executors tell; what they tell alike, and is kept once, counts once."""
    return chain.from_iterable({id(one): one for one in told}.values())


def is_unknown(registration: ExecutorRegistration) -> bool:
    """Whether this registration stands for one that could not be read."""
    return registration.pid == UNKNOWN_PID
