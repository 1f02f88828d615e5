"""Connections to Redis, and the check that this Redis can hold a mesh.

If the URL names Sentinels, each new connection asks them for the primary, and checks that the server calls itself one.
So does each new connection to a home of a Cluster, which asks the Cluster's nodes (`shared.store.cluster`). When a
server ceases to be the primary, a connection leaves it with the first command that it refuses; or the server cuts its
clients off, as Sentinels tell it to.

Every service has a few connections with one use each: blocking reads must not hold up the commands of others. All other
commands share a pool, and wait until one of its connections is free.
Lost connections are retried with jittered back-off. The scripts recognise what a lost call had already done (each is
safe to repeat, see `shared.store.scripts`).
"""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar, cast

from redis import DriverInfo
from redis.asyncio import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import FullJitterBackoff, NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError, ResponseError

from shared.contract.errors import MeshError, UnavailableError
from shared.contract.ids import ShardId, first_shards
from shared.contract.limits import VALUE_BYTES_MAX
from shared.process import logs
from shared.process.addresses import authority
from shared.store.cluster import Node, Nodes
from shared.store.cluster_redis import ClusterRedis, shards_of_cluster
from shared.store.commands import Redis
from shared.store.discovery import Discovery
from shared.store.keyspace import SCHEMA_VERSION, SHARDS_MAX, SHARDS_OF_A_NEW_MESH, Keyspace
from shared.store.mending import MendingRedis
from shared.store.reading import clock_ms, value_of
from shared.store.redis_py import (
    CONNECTION_LOST,
    CONNECTIONS,
    DISCOVERED_CONNECTIONS,
    LOST_OR_REFUSED,
    REFUSED,
    REPLY_TIMEOUT_S,
    DiscoveredConnection,
)
from shared.store.redis_url import RedisEndpoint, parse_redis_url, url_of_node, url_without_password
from shared.store.release import RELEASE
from shared.store.sentinels import sentinels
from shared.store.server_run import ServerRun

T = TypeVar("T")

RETRIES = 8
"""Times a command is repeated on a broken connection: with the back-off below, 2 to 6 seconds of Redis restart."""
BACKOFF_CAP_S = 2.0
BACKOFF_BASE_S = 0.02
LONGEST_PAUSE_FROM = 10
"""Failures in a row from which on pauses grow no more: by then `BACKOFF_CAP_S` bounds them."""
CONNECT_TIMEOUT_S = 5.0
DRIVER = DriverInfo()
"""What CLIENT LIST shows as the library. Made once, because redis-py would read its package's metadata for each
connection, which takes a millisecond.
"""
CONNECTIONS_MAX = 64
"""Of a pool. A process that serves hundreds of models has hundreds of commands under way when it starts."""
KEEPALIVE = {
    option: value
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 15_000))
    if (option := getattr(socket, name, None)) is not None
}
"""A silent host counts as lost after about 20 s: probes every 3 s after 10 s of silence; unacknowledged data for 15 s.
Options that this system does not know are left out.
"""
NOT_IN_A_NAME = re.compile(r"[^!-~]")
"""Characters that Redis does not allow in a connection's name."""
MINIMUM_VERSION = (7, 0)
"""The first with functions, as which the scripts are loaded (FUNCTION LOAD, FCALL). Valkey began with 7.2."""

ENVELOPE_BYTES = 64 << 10
"""Bytes of the server's limit that are kept for everything around a value."""

RESHARDING = "0"
"""The mesh's shards in its record while `seqmesh reshard` moves the keys: no process of any release takes them for its
own."""

POLICIES = (
    *("maxmemory-policy", "appendonly", "appendfsync", "save", "min-replicas-to-write"),
    *("cluster-enabled", "cluster-require-full-coverage"),
)
"""Names of the server's settings that decide what it may lose (`risks`)."""
NO_EVICTION = "noeviction"
"""The one maxmemory-policy by which the server drops no key where it has no memory left."""
SENTINEL_MODE = "sentinel"
"""What INFO of a Sentinel says."""

RUN = re.compile(rb"^(?:run_id|master_replid):(\w+)", re.MULTILINE)


class UnfitRedisError(MeshError):
    """This Redis cannot hold this mesh; the message says what to change."""


def connect(
    url: str,
    *,
    retries: int = RETRIES,
    name: str = "",
    timeout_ms: int = round(REPLY_TIMEOUT_S * 1000),
    run: ServerRun | None = None,
    keys: Keyspace | None = None,
) -> Redis:
    """A client with a pool of its own; bytes in, bytes out.

    retries     0 for calls that must not be repeated automatically
    name        of this process, which CLIENT LIST shows for its connections
    timeout_ms  how long the server may take to answer, and how long a command may wait for a connection
    run         the server's run that the connections are bound to; None: they are bound to none
    keys        of the mesh: tell a Cluster's homes from the beginning; None: each is found with its first key
    """
    address = parse_redis_url(url)
    options: dict[str, Any] = {
        **_socket_options(address.server),
        "client_name": NOT_IN_A_NAME.sub("-", name) or None,
        "retry": Retry(FullJitterBackoff(cap=BACKOFF_CAP_S, base=BACKOFF_BASE_S), retries),
        "retry_on_error": list(CONNECTION_LOST),
    }

    def client(discovery: Discovery | None, home: str = "") -> MendingRedis:
        kind = CONNECTIONS[address.server.way]
        own: dict[str, Any] = {**options, "redis_connect_func": partial(_greet, timeout_ms / 1000, run, home)}
        if discovery is not None:
            kind, own["discovery"] = DISCOVERED_CONNECTIONS[address.server.way], discovery
        pool: Any = BlockingConnectionPool(CONNECTIONS_MAX, timeout_ms / 1000, connection_class=kind, **own)
        return cast(MendingRedis, MendingRedis.from_pool(pool))

    if address.nodes:
        nodes = Nodes(address.nodes, partial(_node_connection, address.server))
        cluster = ClusterRedis(lambda tag: client(nodes.holder(tag), tag))
        cluster.know(keys.bases() if keys is not None else ())
        return cast(Redis, cluster)
    asked = [partial(_asked_connection, endpoint) for endpoint in address.sentinels]
    return cast(Redis, client(sentinels(address.service, asked) if asked else None))


async def server_urls(url: str) -> Mapping[str, str]:
    """A URL of each server by its address; of an only one, by whatever way, its own by "". Raises redis-py's
    ConnectionError if no node of a Cluster tells.
    """
    address = parse_redis_url(url)
    if not address.nodes:
        return {"": url}
    nodes = Nodes(address.nodes, partial(_node_connection, address.server))
    return {authority(*node): url_of_node(url, *node) for node in sorted(await nodes.with_slots())}


def _socket_options(endpoint: RedisEndpoint) -> dict[str, Any]:
    """Options of every connection.

    A host that is gone is found out by the kernel, and one that is silent by `BoundedConnection`. redis-py's own socket
    timeout would wrap each write in asyncio.wait_for, which in Python 3.11 can swallow a cancellation: a task that is
    to end would go on for ever.
    """
    keepalive = {"socket_keepalive": True, "socket_keepalive_options": KEEPALIVE}
    return {
        "decode_responses": False,
        "protocol": 2,
        "socket_timeout": None,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "driver_info": DRIVER,
        **({} if endpoint.way == "unix" else keepalive),
        **endpoint.options,
    }


def _asked_connection(endpoint: RedisEndpoint, **where: Any) -> Any:
    """A connection to one who knows where a primary is."""
    connection = CONNECTIONS[endpoint.way](**_socket_options(endpoint), **where, retry=Retry(NoBackoff(), 0))
    connection.reply_timeout_s = CONNECT_TIMEOUT_S
    return connection


def _node_connection(endpoint: RedisEndpoint, node: Node) -> Any:
    host, port = node
    return _asked_connection(endpoint, host=host, port=port)


async def _greet(reply_timeout_s: float, run: ServerRun | None, home: str, connection: Any) -> None:
    """Prepares a new connection before it is used."""
    connection.reply_timeout_s = reply_timeout_s
    try:
        await connection.on_connect()
    except AuthenticationError as refusal:
        if not isinstance(connection, DiscoveredConnection):
            raise
        # One of several servers may lack a user that the others have.
        raise AuthenticationError(f"{connection.host}:{connection.port}: {refusal}") from refusal
    if isinstance(connection, DiscoveredConnection):
        await connection.verify()
    if run is not None:
        run.meet(await _run(connection), cast("Any", connection), home)


async def _run(connection: Any) -> str:
    """The server's run, for `ServerRun`. The run changes with a restart, and with a time as a replica: then the server
    holds another server's data, although its process is the same.
    """
    await connection.send_command("INFO", "server", "replication")
    try:
        info: bytes = await connection.read_response()
    except NoPermissionError:
        return ""
    return b" ".join(RUN.findall(info)).decode()


@asynccontextmanager
async def joined(url: str, prefix: str, shards: int, *, name: str) -> AsyncGenerator[tuple[Redis, Keyspace]]:
    """A client for the start of a service, and the keys of the mesh that it has joined. It waits about ten seconds for
    a Redis that is not there yet. Raises UnfitRedisError, as `join_mesh`, and also if Redis is not there, or refuses to
    serve.
    """
    async with connect(url, name=name) as redis:
        try:
            yield redis, await join_mesh(redis, prefix, shards)
        except REFUSED as error:
            raise refusal(url, error) from error
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


@contextmanager
def redis_needed(what: str, done: str) -> Generator[None]:
    """Errors of Redis within the block become UnavailableError: Redis, which holds `what`, cannot be `done`."""
    try:
        yield
    except LOST_OR_REFUSED as lost:
        raise UnavailableError(f"Redis, which holds the {what}, cannot be {done}: {lost}") from lost


async def join_mesh(redis: Redis, prefix: str, shards: int = 0) -> Keyspace:
    """Checks Redis and this process's view of the mesh, once at start; returns the mesh's keys.

    Refuses an old server, a Cluster's node by another URL than a Cluster's, a replica, an eviction policy that may drop
    sequences, and what `agree` refuses. Warns of what a restart or a failover would lose.
    """
    checked = await _check_servers(redis)
    keys = await agree(redis, prefix, shards)
    for base in keys.bases():
        redis.home(base)  # which makes it known
    await _check_servers(redis, checked)
    return keys


async def agree(redis: Redis, prefix: str, shards: int = 0, *, known: Sequence[ShardId] = ()) -> Keyspace:
    """The keys of the mesh, whose first process fixes schema and shards.

    shards  how many this process asks for; 0: as many as the mesh has
    known   the mesh's, as this process has taken them from it
    Raises UnfitRedisError, with the remedy, for another schema or other shards than the mesh's.
    """
    keys = Keyspace(prefix)
    _refuse_another_schema(keys, await _fixed(redis, keys, "schema", str(SCHEMA_VERSION), int))
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


async def keys_of_mesh(redis: Redis, prefix: str) -> Keyspace | None:
    """The keys of an existing mesh, for its operator; None if there is none.

    Raises UnfitRedisError for a mesh of another schema, and for a record that cannot be read.
    """
    keys = Keyspace(prefix)
    record: dict[bytes, bytes] = await redis.hgetall(keys.mesh)
    if b"shards" not in record:
        return None
    try:
        schema, shards = int(record.get(b"schema", SCHEMA_VERSION)), shards_told(record[b"shards"])
    except ValueError as error:
        raise UnfitRedisError(f"the record of the mesh '{prefix}' ({keys.mesh}) cannot be read: {error}") from error
    _refuse_another_schema(keys, schema)
    _refuse_resharding(prefix, shards)
    return Keyspace(prefix, shards)


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
    await redis.hsetnx(keys.mesh, field, own or of_a_new_mesh)
    data: bytes | None = await redis.hget(keys.mesh, field)
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


def pause_s(failures: int) -> float:
    """How long to wait before the next try, s, after so many failures in a row: at random, because many processes lose
    a server at the same moment.
    """
    # Redis may stay away for an hour, and 2 to the power of 1024 is no float any more.
    return FullJitterBackoff(cap=BACKOFF_CAP_S, base=BACKOFF_BASE_S).compute(min(failures, LONGEST_PAUSE_FROM))


async def redis_now_ms(redis: Redis) -> int:
    """The clock of the server, in ms. It stamps stream entries, and is the clock by which machines compare times."""
    return clock_ms(await redis.time())


async def _check_servers(redis: Redis, checked: Collection[str] = ()) -> Collection[str]:
    """Checks each server that is not checked yet. Returns the addresses of all, "" of an only one."""
    servers = await redis.servers()
    for address in servers.keys() - set(checked):
        where: dict[str, Any] = {"node": address} if address else {}
        try:
            replicas = await _check_server(servers[address], where, of_cluster=isinstance(redis, ClusterRedis))
            await _check_policies(servers[address], where, replicas=replicas)
        except UnfitRedisError as unfit:
            raise UnfitRedisError(f"{address}: {unfit.message}" if address else unfit.message) from unfit
    return servers.keys()


async def _check_server(redis: Redis, where: Mapping[str, Any], *, of_cluster: bool) -> int:
    """Returns the number of replicas. where: names the server in the log"""
    try:
        info: dict[str, Any] = await redis.info()
    except NoPermissionError:
        # Without INFO, connections to another run of the server are not noticed either (`shared.store.server_run`).
        logs.warning(
            "redis does not tell who it is",
            remedy="allow the user INFO (ACL: +info), or stop every service before Redis is restarted or fails over: a "
            "server that comes back with older data would not be noticed",
            **where,
        )
        return 0
    check_server_info(info, of_cluster=of_cluster)
    return int(info.get("connected_slaves", 0))


def check_server_info(info: Mapping[str, Any], *, of_cluster: bool = False) -> None:
    """Raises UnfitRedisError for a server of the wrong kind. of_cluster: whether the URL is a Cluster's"""
    if info.get("redis_mode") == SENTINEL_MODE:
        raise UnfitRedisError(
            "this is a Sentinel and no server: give its URL as redis+sentinel://host:port/service, or as "
            "rediss+sentinel:// for a server with TLS"
        )
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < MINIMUM_VERSION:
        raise UnfitRedisError(f"Redis {info['redis_version']} is too old: seqmesh needs 7.0 (or Valkey 7.2) or newer")
    if int(info.get("cluster_enabled", 0)) and not of_cluster:
        raise UnfitRedisError(
            "Redis runs as a Cluster: give some of its nodes as redis+cluster://host:port,host:port, or as "
            "rediss+cluster:// for nodes with TLS"
        )
    if info.get("role", "master") != "master" and int(info.get("slave_read_only", 1)):
        raise UnfitRedisError(
            f"this Redis is a read-only replica of {info.get('master_host')}:{info.get('master_port')}: give the "
            "primary's address"
        )


async def _check_policies(redis: Redis, where: Mapping[str, Any], *, replicas: int) -> None:
    try:
        config: dict[str, str] = await redis.config_get(*POLICIES)
    except ResponseError:
        # Managed services forbid CONFIG; then only the operator can know the policy.
        logs.warning("redis config unreadable", remedy=f"make sure that maxmemory-policy is {NO_EVICTION}", **where)
        return
    policy = config.get("maxmemory-policy", NO_EVICTION)
    if policy != NO_EVICTION:
        raise UnfitRedisError(
            f"Redis has maxmemory-policy {policy}, which may drop live sequences: set it to {NO_EVICTION}"
        )
    for event, remedy in risks(config, replicas=replicas):
        logs.warning(event, remedy=remedy, **where)


async def value_bytes_max(redis: Redis) -> int:
    """The largest value that every server takes, bytes; VALUE_BYTES_MAX if they do not tell, and at most."""
    told = [VALUE_BYTES_MAX]
    try:
        for server in (await redis.servers()).values():
            config: dict[str, str] = await server.config_get("proto-max-bulk-len", "client-query-buffer-limit")
            told += (int(limit) - ENVELOPE_BYTES for limit in config.values() if limit.isdecimal())
    except ResponseError:
        return VALUE_BYTES_MAX
    return min(told)


def risks(config: Mapping[str, str], *, replicas: int) -> Iterator[tuple[str, str]]:
    """What a server with this configuration would lose, with the remedy. replicas: how many are connected"""
    if config.get("appendonly") != "yes":
        kept = "all that came after the last snapshot" if config.get("save") else "every sequence"
        yield "redis not durable", f"set appendonly yes, or a restart of Redis loses {kept}"
    elif config.get("appendfsync") == "no":
        yield "redis hardly durable", "set appendfsync everysec or always: a power cut loses what the disk has not got"
    if config.get("cluster-enabled") == "yes" and config.get("cluster-require-full-coverage") == "yes":
        yield (
            "redis stops with any of its nodes",
            "set cluster-require-full-coverage no, or all nodes refuse commands while one is away",
        )
    if replicas and config.get("min-replicas-to-write", "0") == "0":
        yield (
            "redis fails over with losses",
            "set min-replicas-to-write: a replica may be made primary that lacks the last writes",
        )
