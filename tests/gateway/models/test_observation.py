"""What the metrics say of the executors."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from gateway.models.catalog import Catalog
from gateway.models.observation import EXECUTOR_STATES, CacheUse, Observation, state_of
from shared.contract.ids import ExecutorId
from shared.contract.messages import ExecutorRegistration, ModelRecord, RepositoryEntry, StepFlag
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.membership import Member, Membership
from tests.gateway.fake_executor import running_sum
from tests.scripted_mesh import ScriptedMesh


@pytest.mark.parametrize(
    ("leaving", "alive", "state"),
    [(False, True, "serving"), (True, True, "leaving"), (True, False, "leaving"), (False, False, "lost")],
)
def test_an_executor_is_lost_only_if_it_did_not_leave(*, leaving: bool, alive: bool, state: str) -> None:
    registration = ExecutorRegistration(ExecutorId("e"), "e", "host", 1, 1, leaving=leaving)

    assert state == state_of(Member(registration, alive=alive))
    assert state in EXECUTOR_STATES


@pytest.mark.leaves_sequences
async def test_a_model_without_an_executor_is_told_while_sequences_of_it_are_open_also_by_a_gateway_that_never_saw_one(
    redis: Redis, key_prefix: str
) -> None:
    mesh = ScriptedMesh(redis, Keyspace(key_prefix, 3), "waits")
    await mesh.open()
    for model, owner in (("waits", None), ("lives", ExecutorId("gone"))):
        mesh.model = model
        await mesh.submit(mesh.submission(1, {"INPUT": np.full((1, 1), 1, np.int32)}, StepFlag.START))
        if owner:
            await mesh.assign(1, owner)
            await mesh.commit(1, owner)
    membership = Membership(redis, mesh.keys)
    for model in ("waits", "lives", "nobody asks for", "unloaded"):
        await membership.publish(ModelRecord(running_sum(model), "{}", ("1",)))
    lines = (RepositoryEntry("unloaded", "1", "UNAVAILABLE", "unloaded"),)
    await membership.register(ExecutorRegistration(ExecutorId("e"), "e", "h", 1, 1, repository=lines), lease_ms=60_000)
    catalog = Catalog(membership)
    await catalog.refresh()

    assert {"waits", "lives"} == (await Observation(redis, mesh.keys, catalog).look()).unserved


async def test_the_caches_of_all_shards_are_added_up(redis: Redis, key_prefix: str) -> None:
    keys, commands = Keyspace(key_prefix, 2), cast("Any", redis)
    for used, shard in enumerate(keys.shards, 10):
        await commands.hset(keys.cache(shard).about, mapping={"bytes": used, "evicted": 3})
        await commands.zadd(keys.cache(shard).used, {"an answer": 1})

    observation = Observation(redis, keys, Catalog(Membership(redis, keys)), cache_bytes=100)

    assert CacheUse(size_bytes=200, bytes=21, entries=2, evicted=6) == (await observation.look()).cache
    await redis.delete(*[key for shard in keys.shards for key in keys.cache(shard)])
