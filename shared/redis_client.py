"""Connections to Redis, and the check that this Redis can hold a mesh.

Every service has a few connections with one use each: blocking reads must not hold up the commands of others.
Lost connections are retried with jittered back-off; what a lost call had already done is for the scripts to know
(each is safe to repeat, see `shared.scripts`).
"""

from __future__ import annotations

import re
import socket
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import FullJitterBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared import logs
from shared.errors import MeshError
from shared.keyspace import SCHEMA_VERSION, Keyspace

RETRIES = 8
"""Times a command is repeated on a broken connection: with the back-off below, about ten seconds of Redis restart."""
BACKOFF_CAP_S = 2.0
BACKOFF_BASE_S = 0.02
CONNECT_TIMEOUT_S = 5.0
KEEPALIVE = {
    option: value
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 15_000))
    if (option := getattr(socket, name, None)) is not None
}
"""A silent host counts as lost after about 20 s: probes every 3 s after 10 s of silence, unacknowledged data for 15 s.
Options that this system does not know are left out."""
NOT_IN_A_NAME = re.compile(r"[^!-~]")
"""What Redis takes in no connection's name."""
MINIMUM_VERSION = (7, 0)
"""Commands used: XAUTOCLAIM's and PEXPIRE's options, stream trimming by id (Redis 7.0, Valkey 7.2)."""

CONNECTION_LOST = (RedisConnectionError, RedisTimeoutError, OSError)
"""What a command raises when Redis cannot be reached."""


class UnfitRedisError(MeshError):
    """This Redis cannot hold this mesh; the message says what to change."""


def connect(url: str, *, retries: int = RETRIES, name: str = "") -> Redis:
    """A client with a pool of its own; bytes in, bytes out.

    retries  0 for calls that must not be repeated by themselves
    name     of this process: what CLIENT LIST shows of its connections
    """
    # A host that is gone is found out by the kernel. redis-py's own socket timeout would wrap each write in
    # asyncio.wait_for, which in Python 3.11 can swallow a cancellation: a task that is to end would go on for ever.
    keepalive: dict[str, Any] = {"socket_keepalive": True, "socket_keepalive_options": KEEPALIVE}
    pool: Any = ConnectionPool.from_url(  # its many keyword arguments are those of the connection, untyped
        url,
        decode_responses=False,
        protocol=2,
        client_name=NOT_IN_A_NAME.sub("-", name) or None,
        socket_timeout=None,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        **({} if url.startswith("unix:") else keepalive),
        retry=Retry(FullJitterBackoff(cap=BACKOFF_CAP_S, base=BACKOFF_BASE_S), retries),
        retry_on_error=list(CONNECTION_LOST),
    )
    return Redis.from_pool(pool)


async def join_mesh(redis: Redis, keys: Keyspace) -> None:
    """Checks Redis and this process's view of the mesh, once at start.

    Refuses an old server, an eviction policy that may drop sequences, and a number of shards other than the mesh's
    (the first process to come fixes it); warns when nothing is persisted.
    """
    info = await redis.info("server")
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < MINIMUM_VERSION:
        raise UnfitRedisError(f"Redis {info['redis_version']} is too old: seqmesh needs 7.0 (or Valkey 7.2) or newer")
    await _check_policies(redis)
    await redis.hsetnx(keys.mesh, "shards", str(keys.shards))  # pyright: ignore[reportGeneralTypeIssues]
    await redis.hsetnx(keys.mesh, "schema", str(SCHEMA_VERSION))  # pyright: ignore[reportGeneralTypeIssues]
    shards = await redis.hget(keys.mesh, "shards")  # pyright: ignore[reportGeneralTypeIssues]
    if shards is None or int(shards) != keys.shards:
        raise UnfitRedisError(
            f"the mesh '{keys.prefix}' has {int(shards or 0)} shards, but this process was started with {keys.shards}: "
            "set SEQMESH_SHARDS to the mesh's number, or use another SEQMESH_KEY_PREFIX"
        )


async def _check_policies(redis: Redis) -> None:
    try:
        config = await redis.config_get("maxmemory-policy", "maxmemory", "appendonly", "save")
    except ResponseError:
        # Managed services forbid CONFIG: then the operator has to know.
        logs.warning("redis config unreadable", remedy="make sure that maxmemory-policy is noeviction")
        return
    policy = config.get("maxmemory-policy", "noeviction")
    if policy != "noeviction":
        raise UnfitRedisError(
            f"Redis has maxmemory-policy {policy}, which may drop live sequences: set it to noeviction"
        )
    if config.get("appendonly") != "yes":
        logs.warning("redis not durable", remedy="set appendonly yes, or a restart of Redis loses every sequence")
