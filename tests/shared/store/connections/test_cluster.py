"""Commands to a mesh on a real Cluster, whose keys lie on several nodes."""

from __future__ import annotations

import asyncio
import re
import signal
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.contract.errors import NotDoneError
from shared.contract.ids import ShardId, sequence_id
from shared.contract.limits import VALUE_BYTES_MAX
from shared.store import sequences
from shared.store.agreement import join_mesh
from shared.store.connections import cluster_redis
from shared.store.connections.fitness import UnfitRedisError, value_bytes_max
from shared.store.connections.homes import MESH_TAG
from shared.store.connections.redis_client import connect, redis_now_ms
from shared.store.connections.redis_py import CONNECTION_LOST, REPLY_TIMEOUT_S
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from tests.embedded_cluster import EmbeddedCluster, ask


@pytest.fixture
async def redis(redis_cluster: EmbeddedCluster) -> AsyncIterator[Any]:
    async with connect(redis_cluster.url) as client:
        yield client


@pytest.fixture
async def keys(redis: Any) -> Keyspace:
    """Of a mesh that no other test has."""
    return await join_mesh(redis, f"t{uuid.uuid4().hex[:12]}")


# -- its nodes ---------------------------------------------------------------------------------------------------------


async def test_each_node_that_holds_keys_is_one_server(
    redis: Any, keys: Keyspace, redis_cluster: EmbeddedCluster
) -> None:
    homes = {redis_cluster.holder(tag).port: tag for tag in ("mesh", *map(str, keys.shards))}
    assert len(redis_cluster.nodes) == len(homes) < len(redis.homes())

    servers = await redis.servers()

    assert {f"127.0.0.1:{port}" for port in homes} == set(servers)
    told = {address: (await server.info("server"))["tcp_port"] for address, server in servers.items()}
    assert {f"127.0.0.1:{port}": port for port in homes} == told


async def test_a_node_that_is_unfit_is_named_and_each_is_warned_of_once(
    redis: Any, keys: Keyspace, redis_cluster: EmbeddedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [f"127.0.0.1:{node.port}" for node in redis_cluster.nodes]
    for node in redis_cluster.nodes:
        ask(node, "CONFIG", "SET", "appendonly", "no")
    await join_mesh(redis, keys.prefix)

    told = [vars(record)["fields"]["node"] for record in caplog.records if record.message == "redis not durable"]
    assert sorted(nodes) == sorted(told)
    ask(unfit := redis_cluster.holder("0"), "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(UnfitRedisError, match=f"127.0.0.1:{unfit.port}: Redis has maxmemory-policy allkeys-lru"):
        await join_mesh(redis, keys.prefix)
    ask(unfit, "CONFIG", "SET", "maxmemory-policy", "noeviction")
    for node in redis_cluster.nodes:
        ask(node, "CONFIG", "SET", "appendonly", "yes")


async def test_who_joins_while_a_node_is_away_is_warned_unless_it_is_the_one_of_the_meshs_own_keys(
    private_cluster: EmbeddedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(private_cluster.url, retries=0) as redis:
        keys = await join_mesh(redis, "m")
    of_mesh = private_cluster.holder(MESH_TAG)
    node = next(node for node in private_cluster.nodes if node is not of_mesh)
    node.kill()

    async with connect(private_cluster.url, retries=0) as redis:
        assert keys.shards == (await join_mesh(redis, "m")).shards
        assert VALUE_BYTES_MAX == await value_bytes_max(redis)
    (warning,) = [vars(record)["fields"] for record in caplog.records if record.message == "redis node away"]
    assert f"127.0.0.1:{node.port}" == warning["node"]
    assert "it is silent" != warning["cause"]

    await asyncio.to_thread(private_cluster.revive)
    of_mesh.kill()
    async with connect(private_cluster.url, retries=0) as redis:
        with pytest.raises(CONNECTION_LOST):
            await join_mesh(redis, "m")


async def test_who_joins_while_a_node_is_silent_does_not_wait_until_it_would_be_given_up(
    private_cluster: EmbeddedCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service's client tries again and again: it would find out after a minute and a half."""
    monkeypatch.setattr(cluster_redis, "PATIENCE_S", 1.0)
    async with connect(private_cluster.url) as redis:
        keys = await join_mesh(redis, "m")
    node = next(node for node in private_cluster.nodes if node is not private_cluster.holder(MESH_TAG))
    node.send(signal.SIGSTOP)
    try:
        async with connect(private_cluster.url) as redis:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                assert keys.shards == (await join_mesh(redis, "m")).shards
            assert VALUE_BYTES_MAX == await value_bytes_max(redis)
    finally:
        node.send(signal.SIGCONT)
    (warning,) = [vars(record)["fields"] for record in caplog.records if record.message == "redis node away"]
    assert "it is silent" == warning["cause"]


async def test_a_scan_goes_over_each_node_once_and_over_one_alone_for_one_tag(
    redis: Any, keys: Keyspace, redis_cluster: EmbeddedCluster
) -> None:
    def scans() -> int:
        told = [re.search(rb"cmdstat_scan:calls=(\d+)", ask(n, "INFO", "commandstats")) for n in redis_cluster.nodes]
        return sum(int(found[1]) for found in told if found is not None)

    names = [keys.base(shard) + "epoch" for shard in keys.shards]
    for name in names:
        await redis.set(name, 1)
    before = scans()
    found = [key.decode() async for key in redis.scan_iter(match=f"{keys.prefix}:*:epoch", count=10_000)]
    of_all = scans()
    of_one = [key.decode() async for key in redis.scan_iter(match=f"{keys.base(ShardId(0))}*", count=10_000)]

    assert (sorted(names), names[:1]) == (sorted(found), of_one)
    assert (len(redis_cluster.nodes), 1) == (of_all - before, scans() - of_all)


# -- keys of a wrong type ----------------------------------------------------------------------------------------------


async def test_a_pipeline_removes_keys_of_a_wrong_type_wherever_they_are(redis: Any, keys: Keyspace) -> None:
    lines = [keys.line(shard, "sum") for shard in keys.shards]
    for line in lines:
        await redis.set(line, "no hash")
    await redis.hset(good := keys.line(ShardId(0), "other"), "w", 1)
    pipe = redis.pipeline(transaction=False)
    for line in (*lines, good):
        pipe.hgetall(line)

    assert [*({} for _ in lines), {b"w": b"1"}] == await pipe.execute()


async def test_a_transaction_removes_a_key_of_a_wrong_type(redis: Any, keys: Keyspace) -> None:
    await redis.set(keys.wanted, "no hash")
    async with redis.pipeline(transaction=True) as together:
        together.hset(keys.wanted, "a", "b")

        assert [1] == await together.execute()


# -- its clocks --------------------------------------------------------------------------------------------------------


async def test_a_pause_is_timed_by_the_clock_of_the_sequences_node(
    redis: Any, keys: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    async def noting(server: Any) -> int:
        asked.append(server)
        return await redis_now_ms(server)

    monkeypatch.setattr(sequences, "redis_now_ms", noting)
    names = [sequence_id("sum", "", number) for number in range(1, 9)]
    for name in names:
        with pytest.raises(NotDoneError, match="no such open sequence"):
            await sequences.Sequences(redis, keys, Membership(redis, keys)).pause(name, 1000)

    assert [redis.home(keys.base(keys.shard_of(name))) for name in names] == asked
