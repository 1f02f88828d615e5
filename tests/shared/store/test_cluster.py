"""Commands to a mesh on a real Cluster, whose keys lie on several nodes."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.contract.ids import ShardId
from shared.store.keyspace import Keyspace
from shared.store.redis_client import connect, join_mesh
from tests.embedded_cluster import EmbeddedCluster


@pytest.fixture
async def redis(redis_cluster: EmbeddedCluster) -> AsyncIterator[Any]:
    async with connect(redis_cluster.url) as client:
        yield client


@pytest.fixture
async def keys(redis: Any) -> Keyspace:
    """Of a mesh that no other test has."""
    return await join_mesh(redis, f"t{uuid.uuid4().hex[:12]}")


# -- keys of a wrong type ----------------------------------------------------------------------------------------------


async def test_a_pipeline_removes_keys_of_a_wrong_type_wherever_they_are(redis: Any, keys: Keyspace) -> None:
    lines = [keys.line(shard, "sum") for shard in keys.shard_ids()]
    for line in lines:
        await redis.set(line, "no hash")
    await redis.hset(good := keys.line(ShardId(0), "other"), "w", 1)
    pipe = redis.pipeline(transaction=False)
    for line in (*lines, good):
        pipe.hgetall(line)

    assert [*({} for _ in lines), {b"w": b"1"}] == await pipe.execute()


async def test_a_transaction_that_watches_removes_a_key_of_a_wrong_type(redis: Any, keys: Keyspace) -> None:
    await redis.set(keys.wanted, "no hash")
    async with redis.pipeline(transaction=True) as together:
        await together.watch(keys.settings)
        together.multi()
        together.hset(keys.wanted, "a", "b")

        assert [1] == await together.execute()
