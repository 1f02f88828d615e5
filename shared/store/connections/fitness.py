"""Whether a Redis can hold a mesh: its kind, its version, and its settings that decide what it may lose."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

from shared.contract.errors import MeshError
from shared.contract.limits import VALUE_BYTES_MAX
from shared.process import logs
from shared.store.commands import Redis
from shared.store.connections.cluster_redis import ClusterRedis, within_patience
from shared.store.connections.homes import MESH_TAG
from shared.store.connections.redis_py import CONNECTION_LOST

MINIMUM_VERSION = (7, 0)
"""The first with functions, as which the scripts are loaded (FUNCTION LOAD, FCALL). Valkey began with 7.2."""
ENVELOPE_BYTES = 64 << 10
"""Bytes of the server's limit that are kept for everything around a value."""
POLICIES = (
    *("maxmemory-policy", "appendonly", "appendfsync", "save", "min-replicas-to-write"),
    *("cluster-enabled", "cluster-require-full-coverage", "maxmemory-clients", "client-output-buffer-limit"),
    "stop-writes-on-bgsave-error",
)
"""Names of the server's settings that decide what it may lose, or not take (`risks`)."""
NO_EVICTION = "noeviction"
"""The one maxmemory-policy by which the server drops no key where it has no memory left."""
SENTINEL_MODE = "sentinel"
"""What INFO of a Sentinel says."""


class UnfitRedisError(MeshError):
    """This Redis cannot hold this mesh; the message says what to change."""


async def check_servers(redis: Redis, checked: Collection[str] = ()) -> Collection[str]:
    """Checks each server that is not checked yet. Returns the addresses of all, "" of an only one.

    A node of a Cluster that is away is left out, with a warning. Without the one of the mesh's own keys it raises one
    of CONNECTION_LOST.
    """
    servers = await redis.servers()
    for address in servers.keys() - set(checked):
        where: dict[str, Any] = {"node": address} if address else {}
        checks = _check(servers[address], where, of_cluster=isinstance(redis, ClusterRedis))
        try:
            await (checks if servers[address] is redis.at(MESH_TAG) else within_patience(checks))
        except UnfitRedisError as unfit:
            raise UnfitRedisError(f"{address}: {unfit.message}" if address else unfit.message) from unfit
        except CONNECTION_LOST as error:
            if servers[address] is redis.at(MESH_TAG):
                raise
            cause = str(error) or "it is silent"
            logs.warning("redis node away", cause=cause, remedy="its shards are served when it is back", **where)
    return servers.keys()


async def _check(redis: Redis, where: Mapping[str, Any], *, of_cluster: bool) -> None:
    replicas = await _check_server(redis, where, of_cluster=of_cluster)
    await _check_policies(redis, where, replicas=replicas)


async def _check_server(redis: Redis, where: Mapping[str, Any], *, of_cluster: bool) -> int:
    """Returns the number of replicas. where: names the server in the log"""
    try:
        info: dict[str, Any] = await redis.info()
    except NoPermissionError:
        # Without INFO, connections to another run of the server are not noticed either
        # (`shared.store.connections.server_run`).
        logs.warning(
            "redis does not tell who it is",
            remedy="allow the user INFO (ACL: +info), or stop every service before Redis is restarted or fails over: a "
            "server that comes back with older data would not be noticed",
            **where,
        )
        return 0
    check_server_info(info, of_cluster=of_cluster)
    if 0 < int(info.get("maxmemory", 0)) <= int(info.get("used_memory", 0)):
        logs.warning(
            "redis is full",
            remedy="raise its maxmemory, or let sequences end: until then it refuses new requests and steps",
            **where,
        )
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
    for server in (await redis.servers()).values():
        with suppress(ResponseError, *CONNECTION_LOST):
            asked = server.config_get("proto-max-bulk-len", "client-query-buffer-limit")
            config: dict[str, str] = await within_patience(asked)
            told += (int(limit) - ENVELOPE_BYTES for limit in config.values() if limit.isdecimal())
    return min(told)


def risks(config: Mapping[str, str], *, replicas: int) -> Iterator[tuple[str, str]]:
    """What a server with this configuration would lose, or not take, with the remedy. replicas: how many are
    connected
    """
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
    if config.get("maxmemory-clients", "0") not in ("0", "0%"):
        yield (
            "redis cuts off who sends much",
            "set maxmemory-clients 0: what is larger than it allows is sent again and again, and holds up all behind",
        )
    _, _, of_clients = config.get("client-output-buffer-limit", "").partition("normal ")
    if of_clients.split()[:2] not in ([], ["0", "0"]):
        yield (
            "redis cuts off who reads much",
            "set client-output-buffer-limit normal 0 0 0: who is to read more at once is cut off each time it asks",
        )
    if replicas and config.get("min-replicas-to-write", "0") == "0":
        yield (
            "redis fails over with losses",
            "set min-replicas-to-write: a replica may be made primary that lacks the last writes",
        )
