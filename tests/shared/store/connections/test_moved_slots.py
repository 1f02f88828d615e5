"""A slot of a Cluster is moved to another node: no script meets half of its keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shared.contract.ids import ExecutorId
from shared.contract.messages import StepFlag
from shared.store.connections.redis_client import connect
from shared.store.connections.redis_py import UnfitServerError
from shared.store.keyspace import Keyspace
from shared.store.script_values import SubmitCode
from tests.embedded_cluster import EmbeddedCluster, migrate
from tests.scripted_mesh import ScriptedMesh

EXECUTOR = ExecutorId("executor")
ONE = {"INPUT": np.ones((1, 1), np.int32)}
SHARD = "0"


async def test_a_step_is_not_accepted_by_halves_while_its_owners_inbox_is_at_another_node(tmp_path: Path) -> None:
    with EmbeddedCluster(tmp_path) as cluster:
        async with connect(cluster.url, retries=0) as redis:
            mesh = ScriptedMesh(redis, Keyspace(), "sum")
            await mesh.open()
            await mesh.submit(mesh.submission(7, ONE, StepFlag.START))
            await mesh.assign(7, EXECUTOR)
            record = mesh.keys.sequence(mesh.sequence(7)).record
            before = await redis.hgetall(record)
            source = cluster.holder(SHARD)
            target = next(node for node in cluster.primaries() if node is not source)
            cluster.begin_move(SHARD, target)
            migrate(source, target, mesh.keys.inbox(mesh.keys.shard_of(mesh.sequence(7)), EXECUTOR))
            with pytest.raises(UnfitServerError, match="on its way"):
                await mesh.submit(mesh.submission(7, ONE))

            assert before == await redis.hgetall(record)

        cluster.move(SHARD, target)
        async with connect(cluster.url) as redis:
            outcome = await ScriptedMesh(redis, Keyspace(), "sum").submit(mesh.submission(7, ONE))

        assert (SubmitCode.DELIVERED, 2) == (outcome.code, outcome.step)
