"""A client of a real Cluster of three nodes: each command goes to the node that has its key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError

from shared.contract.ids import Epoch, ExecutorId, ShardId, sequence_id
from shared.store.agreement import join_mesh, joined
from shared.store.connections.cluster_redis import shards_of_cluster
from shared.store.connections.fitness import UnfitRedisError, value_bytes_max
from shared.store.connections.homes import servers
from shared.store.connections.link import Link, SharedLinks, new_link
from shared.store.connections.redis_client import connect
from shared.store.connections.server_run import AnotherRunError, ServerRun
from shared.store.keyspace import Keyspace
from shared.store.scripts import Scripts
from tests.embedded_cluster import EmbeddedCluster, ask

SHARDS = 4
PREFIX = "mesh"


# -- a real one --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def keys() -> Keyspace:
    return Keyspace(PREFIX, SHARDS)


@pytest.fixture
async def redis(cluster: EmbeddedCluster, keys: Keyspace) -> AsyncIterator[Any]:
    """A client that knows its homes, on empty nodes."""
    for node in cluster.nodes:
        ask(node, "FLUSHALL")
    redis = connect(cluster.url, retries=0, keys=keys)
    yield redis
    await redis.aclose()


async def test_each_command_goes_to_the_node_of_its_key(redis: Any, keys: Keyspace, cluster: EmbeddedCluster) -> None:
    names = [keys.epoch(shard) for shard in keys.shards]
    for number, name in enumerate(names):
        await redis.set(name, number)

    assert [b"0", b"1", b"2", b"3", None] == await redis.mget([*names, keys.leader("nobody")])
    assert 4 == await redis.exists(*names, keys.leader("nobody"))
    assert set(names) == {key.decode() async for key in redis.scan_iter(match=f"{PREFIX}:*")}
    for shard, name in zip(keys.shards, names, strict=True):
        assert 1 == ask(cluster.holder(str(shard)), "EXISTS", name)
    assert 2 == await redis.unlink(names[0], names[3])
    assert 0 == await redis.unlink(names[0])


async def test_a_pipeline_and_a_link_give_replies_in_the_order_of_their_commands(redis: Any, keys: Keyspace) -> None:
    pipe = redis.pipeline(transaction=False)
    for shard in (3, 0, 2, 3):
        pipe.execute_command("INCR", keys.epoch(ShardId(shard)))
    pipe.hset(keys.mesh, "a", "b")

    assert [1, 1, 1, 2, 1] == await pipe.execute()

    link, links = new_link(redis), SharedLinks(redis)
    await link.connect()
    asked = [("GET", keys.epoch(ShardId(shard))) for shard in (3, 1, 0)]
    assert [b"2", None, b"1"] == await link.exchange(asked) == await links.ask(asked)
    await link.close()
    await links.close()


async def test_an_error_is_that_of_its_command(redis: Any, keys: Keyspace) -> None:
    await redis.set(keys.epoch(ShardId(0)), "no number")
    pipe = redis.pipeline(transaction=False)
    pipe.execute_command("INCR", keys.epoch(ShardId(0)))
    pipe.execute_command("INCR", keys.epoch(ShardId(1)))

    refused, done = await pipe.execute(raise_on_error=False)

    assert ("not an integer" in str(refused), 1) == (True, done)


async def test_a_transaction_is_of_one_home(redis: Any, keys: Keyspace) -> None:
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hset(keys.mesh, "a", "1")
        pipe.hset(keys.settings, "b", "2")
        assert [1, 1] == await pipe.execute()

    async with redis.pipeline(transaction=True) as pipe:
        pipe.hset(keys.mesh, "a", "1")
        pipe.set(keys.epoch(ShardId(0)), 1)
        with pytest.raises(AssertionError, match="a transaction of mesh, 0"):
            await pipe.execute()


async def test_a_key_of_another_type_is_removed_wherever_it_is(redis: Any, keys: Keyspace) -> None:
    await redis.set(keys.spares(ShardId(2), ExecutorId("e"), "m"), "no hash")

    assert {} == await redis.hgetall(keys.spares(ShardId(2), ExecutorId("e"), "m"))


@pytest.fixture
def scripts(redis: Any, keys: Keyspace, cluster: EmbeddedCluster) -> Scripts:
    """No node has them."""
    for node in cluster.nodes:
        ask(node, "FUNCTION", "FLUSH")
    return Scripts(redis, keys)


async def test_scripts_are_loaded_on_every_node_and_removed_from_every_node(
    scripts: Scripts, cluster: EmbeddedCluster
) -> None:
    assert [False] * SHARDS == [
        await scripts.run(scripts.lose(sequence_id("m", "", number), ExecutorId("e"), Epoch(1)))
        for number in range(SHARDS)
    ]

    assert all(ask(node, "FUNCTION", "LIST", "LIBRARYNAME", scripts.library.name) for node in cluster.nodes)
    assert 0 == await scripts.forget_others()
    for node in cluster.nodes:
        old = f"#!lua name={scripts.library.of_mesh}old\nredis.register_function('old', function() end)"
        ask(node, "FUNCTION", "LOAD", old)
    assert len(cluster.nodes) <= await scripts.forget_others()


async def test_a_node_that_takes_no_library_refuses_its_own_calls_alone(
    scripts: Scripts, keys: Keyspace, cluster: EmbeddedCluster
) -> None:
    sequences = [sequence_id("m", "", number) for number in range(SHARDS)]
    full = cluster.holder(str(keys.shard_of(sequences[0])))
    ask(full, "CONFIG", "SET", "maxmemory", "1")

    outcomes = await scripts.run_all([scripts.lose(sequence, ExecutorId("e"), Epoch(1)) for sequence in sequences])

    ask(full, "CONFIG", "SET", "maxmemory", "0")
    refused = [isinstance(outcome, OutOfMemoryError) for outcome in outcomes]
    assert [cluster.holder(str(keys.shard_of(one))) is full for one in sequences] == refused
    assert {False} == {outcome for outcome in outcomes if not isinstance(outcome, OutOfMemoryError)}


async def test_a_mesh_has_a_shard_on_every_node(redis: Any, cluster: EmbeddedCluster) -> None:
    joined_keys = await join_mesh(redis, PREFIX)

    assert joined_keys.shards == await shards_of_cluster(redis)
    assert len(cluster.nodes) == len(joined_keys.shards)
    assert {cluster.holder(str(shard)).port for shard in joined_keys.shards} == {node.port for node in cluster.nodes}
    assert joined_keys.shards == (await join_mesh(redis, PREFIX, len(cluster.nodes))).shards
    assert [[shard] for shard in joined_keys.shards] == [shards for _, shards in servers(redis, joined_keys)]
    assert 0 < await value_bytes_max(redis)


async def test_every_node_is_checked(cluster: EmbeddedCluster) -> None:
    node = next(node for node in cluster.nodes if node is not cluster.holder("mesh"))
    ask(node, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(UnfitRedisError, match="allkeys-lru"):
            async with joined(cluster.url, "checked", 0, name="x"):
                raise AssertionError("it has joined")
    finally:
        ask(node, "CONFIG", "SET", "maxmemory-policy", "noeviction")


async def test_a_node_by_the_url_of_a_single_server_is_refused_with_the_remedy(cluster: EmbeddedCluster) -> None:
    with pytest.raises(UnfitRedisError, match=r"redis\+cluster://"):
        async with joined(cluster.nodes[0].url, PREFIX, 0, name="x"):
            raise AssertionError("it has joined")


async def test_nothing_is_sent_to_a_slots_new_node_before_it_is_agreed_to(
    cluster: EmbeddedCluster, keys: Keyspace, tmp_path: Path
) -> None:
    """A slot that moves is a server that is replaced: the home's connections find the new node, and wait there."""
    run = ServerRun()
    redis: Any = connect(cluster.url, retries=0, keys=keys, run=run)
    name, other = keys.epoch(ShardId(0)), keys.epoch(ShardId(3))
    assert [True, True] == [await redis.set(name, 7), await redis.set(other, 1)]
    link = Link(redis.home(name))
    await link.connect()
    old = cluster.holder("0")
    new = next(node for node in cluster.nodes if node is not old)
    cluster.move("0", new)

    (refused,) = await link.exchange([("INCR", name)])

    assert "is on another node" in str(refused)
    with pytest.raises(AnotherRunError):
        await link.connect()
    assert run.changed.is_set()
    assert b"1" == await redis.get(other), "the other homes go on"
    free: Any = connect(cluster.url, retries=0, keys=keys)
    assert b"7" == await free.get(name)
    run.agree(run.met)
    await link.connect()
    assert [8] == await link.exchange([("INCR", name)])
    cluster.move("0", old)
    await link.close()
    await redis.aclose()
    await free.aclose()
