"""A server that cannot hold a mesh is refused, and what one would lose is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.store.agreement import join_mesh
from shared.store.connections import fitness
from shared.store.connections.fitness import UnfitRedisError
from shared.store.connections.redis_client import connect
from shared.store.keyspace import DEFAULT_PREFIX, SCHEMA_VERSION, Keyspace
from tests.embedded_redis import EmbeddedRedis


@pytest.fixture
async def redis(private_server: EmbeddedRedis) -> AsyncIterator[Any]:
    redis = connect(private_server.url, retries=0)
    yield redis
    await redis.aclose()


async def test_a_server_that_cannot_hold_a_mesh_is_refused_with_the_remedy(redis: Any, server: Any) -> None:
    await join_mesh(redis, DEFAULT_PREFIX)

    for option, value, told in [
        ("maxmemory-policy", "allkeys-lru", "set it to noeviction"),
        ("maxmemory-policy", "volatile-ttl", "set it to noeviction"),
    ]:
        server.config_set(option, value)
        with pytest.raises(UnfitRedisError, match=told):
            await join_mesh(redis, DEFAULT_PREFIX)
        server.config_set(option, "noeviction")
    keys = Keyspace()
    for schema, told in (
        (
            SCHEMA_VERSION + 1,
            f"is of schema {SCHEMA_VERSION + 1}, but release .* speaks {SCHEMA_VERSION}: start a newer release, ",
        ),
        (SCHEMA_VERSION - 1, f"stop its services, which are older, and remove the key '{keys.mesh}', "),
    ):
        await redis.hset(keys.mesh, "schema", schema)
        with pytest.raises(UnfitRedisError, match=f"{told}or give `seqmesh up` another --data-dir, or use another"):
            await join_mesh(redis, keys.prefix)
    await redis.hset(keys.mesh, mapping={"schema": "garbage", "shards": b"\xff"})
    await join_mesh(redis, keys.prefix, 3)
    assert {b"schema": b"%d" % SCHEMA_VERSION, b"shards": b"3"} == await redis.hgetall(keys.mesh)

    server.replicaof("127.0.0.1", 1)
    with pytest.raises(UnfitRedisError, match=r"read-only replica of 127.0.0.1:1: give the primary's address"):
        await join_mesh(redis, DEFAULT_PREFIX)


@pytest.mark.parametrize(
    ("info", "told"),
    [
        ({"redis_version": "6.2.14"}, "Redis 6.2.14 is too old"),
        ({"redis_version": "7.2.4", "cluster_enabled": 1}, "runs as a Cluster"),
        ({"redis_version": "7.2.4", "redis_mode": "sentinel"}, r"a Sentinel and no server: .*redis\+sentinel://"),
    ],
)
def test_a_server_of_the_wrong_kind_is_refused(info: dict[str, Any], told: str) -> None:
    with pytest.raises(UnfitRedisError, match=told):
        fitness.check_server_info(info)


@pytest.mark.parametrize(
    ("config", "replicas", "told"),
    [
        ({"appendonly": "yes", "appendfsync": "everysec"}, 0, []),
        ({"appendonly": "yes", "appendfsync": "always"}, 0, []),
        ({"appendonly": "yes", "appendfsync": "no"}, 0, ["redis hardly durable"]),
        ({"appendonly": "no", "save": "3600 1"}, 0, ["redis not durable"]),
        ({"appendonly": "no", "save": ""}, 0, ["redis not durable"]),
        ({"appendonly": "yes"}, 1, ["redis fails over with losses"]),
        ({"appendonly": "yes", "min-replicas-to-write": "1"}, 1, []),
        ({"appendonly": "yes", "maxmemory-clients": "0"}, 0, []),
        ({"appendonly": "yes", "maxmemory-clients": "1073741824"}, 0, ["redis cuts off who sends much"]),
        ({"appendonly": "yes", "maxmemory-clients": "5%"}, 0, ["redis cuts off who sends much"]),
        ({"appendonly": "yes", "client-output-buffer-limit": "normal 0 0 0 slave 256 64 60 pubsub 32 8 60"}, 0, []),
        (
            {"appendonly": "yes", "client-output-buffer-limit": "normal 1048576 0 0 slave 0 0 0 pubsub 0 0 0"},
            0,
            ["redis cuts off who reads much"],
        ),
        ({"appendonly": "yes", "cluster-enabled": "no", "cluster-require-full-coverage": "yes"}, 0, []),
        ({"appendonly": "yes", "cluster-enabled": "yes", "cluster-require-full-coverage": "no"}, 0, []),
        (
            {"appendonly": "yes", "cluster-enabled": "yes", "cluster-require-full-coverage": "yes"},
            0,
            ["redis stops with any of its nodes"],
        ),
    ],
)
def test_what_a_server_would_lose_or_not_take_is_told(config: dict[str, str], replicas: int, told: list[str]) -> None:
    assert told == [event for event, _ in fitness.risks(config, replicas=replicas)]
