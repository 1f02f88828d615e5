"""What all processes of a mesh agree on: its schema and its shards, in the mesh's record in Redis.

The first process fixes them. Whoever comes later takes them from there, or is refused with the remedy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TypeVar

from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError

from shared.contract.ids import ShardId, first_shards
from shared.process import logs
from shared.store.commands import Redis
from shared.store.connections.cluster_redis import ClusterRedis, shards_of_cluster
from shared.store.connections.fitness import UnfitRedisError, check_servers
from shared.store.connections.redis_client import connect
from shared.store.connections.redis_py import CONNECTION_LOST, NOT_SERVING, REFUSED
from shared.store.connections.redis_url import url_without_password
from shared.store.keyspace import SCHEMA_VERSION, SHARDS_MAX, SHARDS_OF_A_NEW_MESH, Keyspace
from shared.store.reading import value_of
from shared.store.release import RELEASE

T = TypeVar("T")

NOT_SERVING_PAUSE_S = 1.0
SILENCE_TOLD_AFTER_S = 5.0
"""How long a service that starts waits for Redis before it says so: a silent server is given up after 96 s only."""
SCHEMAS_MAX = 1000
RESHARDING = "0"
"""The mesh's shards in its record while `seqmesh reshard` moves the keys: no process of any release takes them for its
own."""


@asynccontextmanager
async def joined(url: str, prefix: str, shards: int, *, name: str) -> AsyncGenerator[tuple[Redis, Keyspace]]:
    """A client for the start of a service, and the keys of the mesh that it has joined. It waits as `when_it_serves`;
    for a Redis that cannot be reached a few seconds, for a silent one a minute and a half. Raises UnfitRedisError, as
    `join_mesh`, and also if Redis cannot be reached, or refuses to serve.
    """
    with needed_at_start(url):
        async with connect(url, name=name) as redis:
            tell = partial(logs.warning, "waiting for redis", cause="the mesh is not joined yet")
            silence = asyncio.get_running_loop().call_later(SILENCE_TOLD_AFTER_S, tell)
            try:
                keys = await when_it_serves(partial(join_mesh, redis, prefix, shards))
            finally:
                silence.cancel()
            yield redis, keys


async def when_it_serves(call: Callable[[], Awaitable[T]]) -> T:
    """The result of a call that may be repeated. It is, for as long as Redis answers that it cannot serve yet: a large
    file takes it minutes to load.
    """
    while True:
        try:
            return await call()
        except NOT_SERVING as error:
            logs.warning("waiting for redis", cause=str(error))
            await asyncio.sleep(NOT_SERVING_PAUSE_S)


@contextmanager
def needed_at_start(url: str) -> Generator[None]:
    """Errors of Redis within the block become UnfitRedisError."""
    try:
        yield
    except REFUSED as error:
        raise refusal(url, error) from error
    except NOT_SERVING as error:
        raise UnfitRedisError(f"Redis at {url_without_password(url)} cannot serve now: {error}") from error
    except CONNECTION_LOST as error:
        raise UnfitRedisError(
            f"Redis at {url_without_password(url)} cannot be reached (--redis-url names another): {error}"
        ) from error


def refusal(url: str, error: Exception) -> UnfitRedisError:
    """What to tell of one of REFUSED."""
    match error:
        case OutOfMemoryError():
            refused = "is full: raise its maxmemory, or let sequences end"
        case AuthenticationError() | NoPermissionError():
            refused = "refuses the user of SEQMESH_REDIS_URL, or its password"
        case _:
            refused = "refuses a command"
    return UnfitRedisError(f"Redis at {url_without_password(url)} {refused}: {error}")


async def join_mesh(redis: Redis, prefix: str, shards: int = 0) -> Keyspace:
    """Checks Redis and this process's view of the mesh, once at start; returns the mesh's keys.

    Refuses an old server, a Cluster's node by another URL than a Cluster's, a replica, an eviction policy that may drop
    sequences, and what `agree` refuses. Warns of what a restart or a failover would lose.
    """
    checked = await check_servers(redis)
    keys = await agree(redis, prefix, shards)
    redis.know(keys.bases())
    await check_servers(redis, checked)
    return keys


async def agree(redis: Redis, prefix: str, shards: int = 0, *, known: Sequence[ShardId] = ()) -> Keyspace:
    """The keys of the mesh, whose first process fixes schema and shards.

    shards  how many this process asks for; 0: as many as the mesh has
    known   the mesh's, as this process has taken them from it
    Raises UnfitRedisError, with the remedy, for another schema or other shards than the mesh's.
    """
    keys = Keyspace(prefix)
    _refuse_another_schema(keys, await _fixed(redis, keys, "schema", str(SCHEMA_VERSION), _schema_told))
    own = told(known or await shards_for(redis, shards)) if known or shards else ""
    of_a_new_mesh = own or told(await shards_for(redis))
    agreed = await _fixed(redis, keys, "shards", own, shards_told, of_a_new_mesh)
    _refuse_resharding(prefix, agreed)
    if (known and agreed != tuple(known)) or shards not in (0, len(agreed)):
        raise UnfitRedisError(
            f"the mesh '{prefix}' has {len(agreed)} shards, but this process was started with {shards or len(known)}: "
            f"leave SEQMESH_SHARDS out, or stop the mesh and run `seqmesh reshard {shards or len(known)}`, or use "
            "another SEQMESH_KEY_PREFIX"
        )
    return Keyspace(prefix, agreed)


async def shards_for(redis: Redis, count: int = 0) -> tuple[ShardId, ...]:
    """The shards of a new mesh. count: how many; 0: as many as are the fastest in this Redis"""
    if isinstance(redis, ClusterRedis):
        return await shards_of_cluster(redis, count)
    return first_shards(count or SHARDS_OF_A_NEW_MESH)


def told(shards: Sequence[ShardId]) -> str:
    """Shards as the mesh's record has them: how many there are; where they are not the first ones, the number of each
    with a comma behind it.
    """
    return str(len(shards)) if tuple(shards) == first_shards(len(shards)) else "".join(f"{shard}," for shard in shards)


def shards_told(data: bytes) -> tuple[ShardId, ...]:
    """What `told` has written; none while `seqmesh reshard` moves the keys. Raises ValueError, also for what no mesh
    has.
    """
    if b"," not in data:
        if not 0 <= int(data) <= SHARDS_MAX:
            raise ValueError(f"{int(data)} shards")
        return first_shards(int(data))
    numbers = [int(number) for number in data.removesuffix(b",").split(b",")]
    if min(numbers) < 0 or not len(set(numbers)) == len(numbers) <= SHARDS_MAX:
        raise ValueError(f"the shards {numbers}")
    return tuple(map(ShardId, numbers))


async def keys_of_mesh(redis: Redis, prefix: str) -> Keyspace | None:
    """The keys of an existing mesh, for its operator; None if there is none.

    Raises UnfitRedisError for a mesh of another schema, and for a record that cannot be read.
    """
    keys = Keyspace(prefix)
    record: dict[bytes, bytes] = await redis.hgetall(keys.mesh)
    if b"shards" not in record:
        return None
    try:
        schema = _schema_told(record.get(b"schema", b"%d" % SCHEMA_VERSION))
        shards = shards_told(record[b"shards"])
    except ValueError as error:
        raise UnfitRedisError(f"the record of the mesh '{prefix}' ({keys.mesh}) cannot be read: {error}") from error
    _refuse_another_schema(keys, schema)
    _refuse_resharding(prefix, shards)
    return Keyspace(prefix, shards)


def _schema_told(data: bytes) -> int:
    """Raises ValueError also for a number that no release has: whoever takes it for another schema's mesh ends."""
    if not 0 < int(data) <= SCHEMAS_MAX:
        raise ValueError(f"schema {data[:20]!r}")
    return int(data)


def _refuse_resharding(prefix: str, shards: Sequence[ShardId]) -> None:
    if not shards:
        raise UnfitRedisError(
            f"the keys of the mesh '{prefix}' are on their way to another number of shards: run `seqmesh reshard` to "
            "its end, once more if it was cut off"
        )


def _refuse_another_schema(keys: Keyspace, schema: int) -> None:
    if schema == SCHEMA_VERSION:
        return
    remedy = "start a newer release"
    if schema < SCHEMA_VERSION:
        remedy = f"let its sequences end, stop its services, which are older, and remove the key '{keys.mesh}'"
    raise UnfitRedisError(
        f"the mesh '{keys.prefix}' is of schema {schema}, but release {RELEASE} speaks {SCHEMA_VERSION}: {remedy}, "
        "or give `seqmesh up` another --data-dir, or use another SEQMESH_KEY_PREFIX"
    )


async def _fixed(
    redis: Redis, keys: Keyspace, field: str, own: str, decode: Callable[[bytes], T], of_a_new_mesh: str = ""
) -> T:
    """What the first process fixes for the mesh. If it cannot be read, it is fixed again.

    own  "": this process takes anything, and `of_a_new_mesh` if it is the first. Then it cannot know what is unreadable
    """
    data: bytes | None = await redis.hget(keys.mesh, field)
    if data is None:
        # Only then: a Redis without memory refuses the write, also if it would change nothing.
        await redis.hsetnx(keys.mesh, field, own or of_a_new_mesh)
        data = await redis.hget(keys.mesh, field)
    found = None if data is None else value_of(keys.mesh, data, decode, field=field)
    if found is not None:
        return found
    if not own:
        raise UnfitRedisError(
            f"the mesh '{keys.prefix}' does not say its number of {field} any more ({keys.mesh}): start one process "
            f"with SEQMESH_{field.upper()} set to it"
        )
    await redis.hset(keys.mesh, field, own)
    return decode(own.encode())
