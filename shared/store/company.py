"""Who runs beside whom: each service says its release and format, and hears of those that speak another one.

A mixture is what a rolling upgrade looks like, and no fault; one that stays is for the operator to see. So it is logged
once, and `seqmesh drain --list` shows it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.process import logs
from shared.store.keyspace import Keyspace
from shared.store.reading import text_of, value_of
from shared.store.redis_client import redis_now_ms
from shared.store.release import FORMAT, RELEASE

TELL_EVERY_S = 5.0
FORGET_AFTER_MS = 60_000
"""Since its last word a service counts as gone."""
LINE_LENGTH_MAX = 512
"""Of one service's word, bytes."""


class ServiceLine(msgspec.Struct, frozen=True):
    """A service's word. service: gateway, scheduler or executor; told_ms: clock of Redis."""

    service: str
    name: str
    release: str
    format: str
    told_ms: int


_decoder = msgspec.json.Decoder(ServiceLine)


class Company:
    """One service among the others of its mesh."""

    def __init__(self, redis: Redis, keys: Keyspace, service: str, name: str) -> None:
        # redis-py types its shared sync/async commands as unions; here they are always awaitable.
        self._redis = cast("Any", redis)
        self._keys = keys
        self._service = service
        self._name = name
        # Of several processes with one name each has its own word.
        self._id = f"{name}-{uuid.uuid4().hex[:8]}"
        self._heard: set[tuple[str, str, str]] = set()

    async def run(self) -> None:
        """Says its word now and then, for ever; takes it back at the end."""
        try:
            while True:
                try:
                    self.hear(await self.tell())
                except (RedisError, OSError) as error:
                    logs.debug("release not told", cause=str(error))
                await asyncio.sleep(TELL_EVERY_S)
        finally:
            await self._leave()

    async def tell(self) -> list[ServiceLine]:
        """Says this service's word; returns everybody's, and removes those of the gone. Raises what redis-py raises."""
        now_ms = await redis_now_ms(self._redis)
        line = ServiceLine(self._service, self._name, RELEASE, FORMAT, now_ms)
        await self._redis.hset(self._keys.services, self._id, msgspec.json.encode(line))
        present, gone = split(self._keys, await self._redis.hgetall(self._keys.services), now_ms)
        if gone:
            await self._redis.hdel(self._keys.services, *gone)
        return present

    def hear(self, lines: Iterable[ServiceLine]) -> None:
        """Logs each format that is not this one's, when it comes."""
        others = {(line.service, line.release, line.format) for line in lines if line.format != FORMAT}
        for service, release, other in sorted(others - self._heard):
            logs.warning(
                "a service of another format is in the mesh",
                service=service,
                release=release,
                format=other,
                own_release=RELEASE,
                own_format=FORMAT,
                remedy="none during an upgrade; end it by bringing all services to one release",
            )
        self._heard = others

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(1):
                await self._redis.hdel(self._keys.services, self._id)
        except (RedisError, OSError) as error:
            logs.debug("release not taken back", cause=str(error))


async def services(redis: Redis, keys: Keyspace) -> list[ServiceLine]:
    """The words of all services. Raises what redis-py raises."""
    return split(keys, await cast("Any", redis).hgetall(keys.services), await redis_now_ms(redis))[0]


def split(keys: Keyspace, raw: Mapping[bytes, bytes], now_ms: int) -> tuple[list[ServiceLine], list[bytes]]:
    """The words of those who are there, and the ids of the gone. What cannot be read is gone, too."""

    def decode(data: bytes) -> ServiceLine:
        if len(data) > LINE_LENGTH_MAX:
            raise ValueError(f"{len(data)} bytes")
        return _decoder.decode(data)

    read: dict[bytes, ServiceLine | None] = {
        id: value_of(keys.services, data, decode, field=text_of(id)) for id, data in raw.items()
    }
    # A word from the future is none: it would stay for ever.
    present = {
        id: line for id, line in read.items() if line is not None and abs(line.told_ms - now_ms) < FORGET_AFTER_MS
    }
    return list(present.values()), [id for id in read if id not in present]
