"""Who is in the mesh: executors register and hold a lease; models are published for those without a repository.

A registration says what an executor can do, its lease says that it lives. Only the lease's end (or a registration
marked as leaving) makes a member dead; silence on a stream does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import msgspec
from redis.asyncio import Redis

from shared.ids import ExecutorId
from shared.keyspace import Keyspace
from shared.messages import ExecutorRegistration, ModelRecord

_registration_decoder = msgspec.json.Decoder(ExecutorRegistration)
_record_decoder = msgspec.json.Decoder(ModelRecord)


@dataclass(frozen=True, slots=True)
class Member:
    """A registered executor; `alive` is whether its lease holds."""

    registration: ExecutorRegistration
    alive: bool

    @property
    def usable(self) -> bool:
        """Alive and not about to leave: new sequences may go there."""
        return self.alive and not self.registration.leaving


class Membership:
    """Registrations, leases and models of one mesh, in Redis."""

    def __init__(self, redis: Redis, keys: Keyspace) -> None:
        # redis-py types its shared sync/async commands as unions; here they are always awaitable.
        self._redis = cast(Any, redis)
        self._keys = keys
        self._read: dict[str, tuple[bytes, ModelRecord]] = {}
        self._decoded: dict[bytes, ExecutorRegistration] = {}

    async def register(self, registration: ExecutorRegistration, *, lease_ms: int) -> None:
        """Writes an executor's registration and takes its lease, both at once."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(self._keys.executors, registration.executor, msgspec.json.encode(registration))
            pipe.set(self._keys.executor_lease(registration.executor), "1", px=lease_ms)
            await pipe.execute()

    async def update(self, registration: ExecutorRegistration) -> None:
        """Writes a registration anew; the lease stays as it is."""
        await self._redis.hset(self._keys.executors, registration.executor, msgspec.json.encode(registration))

    async def renew(self, executor: ExecutorId, *, lease_ms: int) -> bool:
        """Extends a lease that still holds; False when it has ended: then the executor must drop all it holds."""
        # Not SET, which a Redis without memory refuses.
        return bool(await self._redis.pexpire(self._keys.executor_lease(executor), lease_ms))

    async def leave(self, registration: ExecutorRegistration) -> None:
        """Says that an executor has stopped; its sequences are taken over at once."""
        leaving = msgspec.structs.replace(registration, leaving=True)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(self._keys.executors, registration.executor, msgspec.json.encode(leaving))
            pipe.delete(self._keys.executor_lease(registration.executor))
            await pipe.execute()

    async def is_leaving(self, executor: ExecutorId) -> bool:
        """Whether an executor has said that it stops, and did not just end."""
        data: bytes | None = await self._redis.hget(self._keys.executors, executor)
        return data is not None and _registration_decoder.decode(data).leaving

    async def give_up(self, executor: ExecutorId) -> None:
        """Ends an executor's lease before its time: it is as good as dead, and others take over at once."""
        await self._redis.delete(self._keys.executor_lease(executor))

    async def drain(self, who: str, now_ms: int) -> None:
        """Asks an executor, by its name or id, to hand over what it owns and to stay out of the mesh."""
        await self._redis.hset(self._keys.drained, who, now_ms)

    async def undrain(self, who: str) -> bool:
        """Takes that back; False when nobody had asked for it."""
        return bool(await self._redis.hdel(self._keys.drained, who))

    async def drained(self) -> list[str]:
        """Names and ids of executors that are to stay out of the mesh."""
        return sorted(name.decode() for name in await self._redis.hkeys(self._keys.drained))

    async def is_drained(self, *names: str) -> bool:
        """Whether one of an executor's names is among them."""
        return any(since is not None for since in await self._redis.hmget(self._keys.drained, names))

    async def remove(self, executor: ExecutorId) -> None:
        """Forgets an executor whose sequences have all been moved."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hdel(self._keys.executors, executor)
            for shard in self._keys.shard_ids():
                pipe.delete(self._keys.inbox(shard, executor))
            await pipe.execute()

    async def members(self) -> list[Member]:
        """Every registered executor, dead ones too, ordered by id."""
        raw: dict[bytes, bytes] = await self._redis.hgetall(self._keys.executors)
        # They are asked for many times a second, hold a line for each model, and hardly ever change.
        self._decoded = {data: self._decoded.get(data) or _registration_decoder.decode(data) for data in raw.values()}
        registrations = sorted(self._decoded.values(), key=lambda r: r.executor)
        if not registrations:
            return []
        leases = await self._redis.mget([self._keys.executor_lease(r.executor) for r in registrations])
        return [Member(r, lease is not None) for r, lease in zip(registrations, leases, strict=True)]

    async def publish(self, record: ModelRecord) -> None:
        """Makes a loaded model's configuration known to the mesh."""
        await self._redis.hset(self._keys.models, record.config.name, msgspec.json.encode(record))

    async def model(self, name: str) -> ModelRecord | None:
        """One model as it was published last; decoded once, however often it is asked for."""
        data: bytes | None = await self._redis.hget(self._keys.models, name)
        if data is None:
            self._read.pop(name, None)
            return None
        return self._record(name, data)

    def _record(self, name: str, data: bytes) -> ModelRecord:
        known = self._read.get(name)
        if known is None or known[0] != data:
            known = self._read[name] = (data, _record_decoder.decode(data))
        return known[1]

    async def models(self) -> dict[str, ModelRecord]:
        """Every model that was published, by name, decoded as by `model`. Whether somebody serves it, `members` say."""
        raw: dict[bytes, bytes] = await self._redis.hgetall(self._keys.models)
        return {(text := name.decode()): self._record(text, data) for name, data in raw.items()}
