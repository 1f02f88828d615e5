"""Which services run beside each other: each tells its release and format, and logs services of another format.

Different formats are normal during a rolling upgrade, and no fault. If they stay, the operator should see it. So each
is logged once, and `seqmesh drain --list` shows it.
"""

from __future__ import annotations

import asyncio
import random
import socket
import uuid
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec
from redis.exceptions import RedisError

from shared.process import logs
from shared.store.agreement import agree
from shared.store.commands import Redis
from shared.store.connections.redis_client import redis_now_ms
from shared.store.keyspace import Keyspace
from shared.store.reading import clock_ms, text_of, value_of
from shared.store.release import FORMAT, RELEASE
from shared.store.vital import vital

TELL_EVERY_S = 5.0
FORGET_AFTER_MS = 60_000
"""A service that has not told its release for so long counts as gone."""
LINE_LENGTH_MAX = 512
"""Most bytes of one service's line."""
LOOPBACK = ("127.", "[::1]", "localhost")


class ServiceLine(msgspec.Struct, frozen=True):
    """What a service tells of itself.

    service  gateway, scheduler or executor
    told_ms  clock of Redis
    host     name of the machine that it runs on
    grpc     of a gateway: where executors reach its gRPC port, for models that call others: `grpc://HOST:PORT`, or
             `grpcs:` where the port speaks TLS; "": it takes no calls
    """

    service: str
    name: str
    release: str
    format: str
    told_ms: int
    host: str = ""
    grpc: str = ""


_decoder = msgspec.json.Decoder(ServiceLine)


class Company:
    def __init__(self, redis: Redis, keys: Keyspace, service: str, name: str) -> None:
        self._redis = redis
        self._keys = keys
        self._service = service
        self._name = name
        # Several processes may have one name; each has a line of its own.
        self._id = f"{name}-{uuid.uuid4().hex[:8]}"
        self._heard: set[tuple[str, str, str]] = set()
        self._grpc = ""
        self._changed = asyncio.Event()

    def takes_calls(self, grpc: str) -> None:
        """Tells from now on, and at once, where executors reach this gateway (`ServiceLine.grpc`)."""
        self._grpc = grpc
        self._changed.set()

    async def run(self) -> None:
        """Writes this service's line at intervals, for ever; removes it at the end.

        Raises UnfitRedisError when the mesh has become another one than the service has joined.
        """
        try:
            while True:
                try:
                    self.hear(await self.tell())
                except (RedisError, OSError) as error:
                    logs.debug("release not told", cause=str(error))
                # Not `asyncio.wait_for`: in Python 3.11 it loses a cancellation that comes just as it is done.
                with suppress(TimeoutError):
                    async with asyncio.timeout(TELL_EVERY_S):
                        await self._changed.wait()
                self._changed.clear()
        finally:
            await self._leave()

    async def tell(self) -> list[ServiceLine]:
        """Writes this service's line, removes the lines of gone services, and returns the others. Raises what redis-py
        and `agree` raise.
        """
        now_ms = await redis_now_ms(self._redis)
        line = ServiceLine(self._service, self._name, RELEASE, FORMAT, now_ms, socket.gethostname(), self._grpc)
        await self._redis.eval(*vital(("HSET", self._keys.services, self._id, msgspec.json.encode(line))))
        # After the line, and `seqmesh reshard` looks for lines after it has claimed the keys: one sees the other.
        await agree(self._redis, self._keys.prefix, known=self._keys.shards)
        present, gone = await _read(self._redis, self._keys)
        if gone:
            await self._redis.hdel(self._keys.services, *gone)
        return present

    def hear(self, lines: Iterable[ServiceLine]) -> None:
        """Logs each other format when it first appears."""
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
            # A stop must not wait for a Redis that is gone; the line is forgotten by its age then.
            async with asyncio.timeout(1):
                await self._redis.hdel(self._keys.services, self._id)
        except (RedisError, OSError) as error:
            logs.debug("release not taken back", cause=str(error))


async def services(redis: Redis, keys: Keyspace) -> list[ServiceLine]:
    """The lines of all services. Raises what redis-py raises."""
    present, _ = await _read(redis, keys)
    return present


async def _read(redis: Redis, keys: Keyspace) -> tuple[list[ServiceLine], list[bytes]]:
    """The lines of present services, and the ids of gone ones. A line that cannot be read counts as gone."""
    pipe = redis.pipeline(transaction=False)
    # Together: who is frozen between two round trips would take every other service for gone.
    pipe.hgetall(keys.services)
    pipe.time()
    raw, time = await pipe.execute()
    now_ms = clock_ms(time)
    read = {id: value_of(keys.services, data, _decode, field=text_of(id)) for id, data in raw.items()}
    # A line from the future counts as gone too: it would stay for ever.
    present = {
        id: line for id, line in read.items() if line is not None and abs(line.told_ms - now_ms) < FORGET_AFTER_MS
    }
    return list(present.values()), [id for id in read if id not in present]


def _decode(data: bytes) -> ServiceLine:
    if len(data) > LINE_LENGTH_MAX:
        raise ValueError(f"{len(data)} bytes")
    return _decoder.decode(data)


def call_addresses(lines: list[ServiceLine]) -> list[str]:
    """The addresses that gateways tell, in the order in which they should be tried: those on this machine first,
    otherwise by chance. Another machine's loopback address is nobody's.
    """
    here = socket.gethostname()
    found = [line for line in lines if line.grpc and (line.host == here or not _names_loopback(line.grpc))]
    random.shuffle(found)
    return [line.grpc for line in sorted(found, key=lambda line: line.host != here)]


def _names_loopback(address: str) -> bool:
    return urlsplit(address).netloc.startswith(LOOPBACK)
