"""An executor whose Redis was restarted: it goes on when Redis holds what it had acknowledged, else it begins anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.lease.registration import OlderDataError
from executor.sequences.holdings import Holding, is_behind
from shared.contract.ids import Epoch, ExecutorId, StepNumber, sequence_id
from shared.contract.messages import StepFlag
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from tests.embedded_redis import EmbeddedRedis
from tests.executor.living import SHARDS, living
from tests.executor.patience import PATIENCE_S
from tests.mesh.model_repository import add_sum_model
from tests.redis_proxy import RedisProxy
from tests.scripted_mesh import ScriptedMesh

PREFIX = "restarted"


@pytest.fixture
async def redis(private_server: EmbeddedRedis) -> AsyncIterator[Any]:
    redis = connect(private_server.url)
    yield redis
    await redis.aclose()


@pytest.fixture
async def mesh(redis: Any) -> ScriptedMesh:
    mesh = ScriptedMesh(redis, Keyspace(PREFIX, SHARDS), "sum")
    await mesh.open()
    return mesh


@pytest.mark.parametrize("lost", [{}, {"cm": 1, "ck": 1}])
async def test_an_executor_goes_on_unless_redis_has_lost_what_it_had_acknowledged(
    mesh: ScriptedMesh, private_server: EmbeddedRedis, tmp_path: Path, lost: dict[str, Any]
) -> None:
    add_sum_model(tmp_path / "models", "sum")
    record = mesh.keys.sequence(mesh.sequence(7)).record
    async with living(private_server.url, PREFIX, tmp_path / "models", "sum", "a") as a:
        await added(mesh, 1, a.executor)
        assert 3 == await added(mesh, 2)
        # What a server that comes back with older data would have lost.
        if lost:
            await mesh.redis.hset(record, mapping=lost)
        private_server.stop()
        private_server.start()

        async with asyncio.timeout(PATIENCE_S):
            if not lost:
                assert 6 == await added(mesh, 3)
                assert not a.task.done()
                return
            with pytest.raises(ExceptionGroup) as ended:
                await a.task
            assert ended.group_contains(OlderDataError)
            (member,) = await Membership(mesh.redis, mesh.keys).members()
            assert (False, True) == (member.alive, member.registration.leaving)


async def test_an_executor_goes_on_when_its_user_has_its_rights_again(
    mesh: ScriptedMesh, private_server: EmbeddedRedis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator may take rights from the user of the mesh while it runs: that is a loss of Redis for a time."""
    add_sum_model(tmp_path / "models", "sum")

    async def until_told(*events: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not set(events) <= {record.getMessage() for record in caplog.records} and not a.task.done():
                await asyncio.sleep(0.01)

    async with living(private_server.url, PREFIX, tmp_path / "models", "sum", "a", lease_ms=6000) as a:
        await added(mesh, 1, a.executor)
        await mesh.redis.acl_setuser("default", enabled=True, categories=["-@all"], commands=["+acl"])
        await until_told("lease renewal delayed", "inbox reading delayed")
        await mesh.redis.acl_setuser("default", enabled=True, categories=["+@all"])

        assert not a.task.done()
        assert 3 == await added(mesh, 2)


async def added(mesh: ScriptedMesh, number: int, executor: ExecutorId | None = None) -> int:
    """The answer to the next step of sequence 7; its first is assigned to the executor."""
    flags = StepFlag.START if executor else StepFlag.NONE
    step = mesh.submission(7, {"INPUT": np.array([[number]], np.int32)}, flags)
    await mesh.submit(step)
    if executor:
        await mesh.assign(7, executor)
    reply = await mesh.reply(step)
    assert "" == reply.error
    return int.from_bytes(reply.outputs[0].raw, "little")


ME = ExecutorId("me-1")
HELD = Holding(sequence_id("m", "", 7), Epoch(5), StepNumber(3), StepNumber(4))


@pytest.mark.parametrize(
    ("record", "behind"),
    [
        ({"ow": ME, "ep": 5, "nx": 4, "cm": 3}, False),
        ({"ow": ME, "ep": 5, "nx": 9, "cm": 8}, False),
        ({"ow": ME, "ep": 5, "nx": 4, "cm": 2}, True),
        ({"ow": ME, "ep": 5, "nx": 3, "cm": 3}, True),
        ({"ow": "another-1", "ep": 5, "nx": 4, "cm": 3}, True),
        ({"ow": ME, "ep": 4, "nx": 4, "cm": 3}, True),
        ({"ow": "another-1", "ep": 6, "nx": 2, "cm": 1}, False),
        ({"ep": 5, "nx": 4, "cm": 4}, False),
        ({}, True),
    ],
)
async def test_a_record_lacks_what_was_acknowledged_or_not(
    redis: Any, mesh: ScriptedMesh, record: dict[str, Any], behind: bool
) -> None:
    if record:
        await redis.hset(mesh.keys.sequence(HELD.sequence).record, mapping=record)

    assert behind is await is_behind(redis, mesh.keys, ME, [HELD])
    assert not await is_behind(redis, mesh.keys, ME, [])


@pytest.mark.parametrize(
    ("kept", "record", "behind"),
    [
        (2, {"ep": 5, "nx": 4, "cm": 3}, False),
        (1, {"ep": 5, "nx": 4, "cm": 3}, True),
        (0, {"ep": 5, "nx": 6, "cm": 3}, True),
        (1, {"ep": 5, "nx": 4, "cm": 4}, False),
        (1, {"ep": 6, "nx": 4, "cm": 3}, False),
    ],
)
async def test_a_step_that_redis_has_lost_is_missed_although_another_one_has_its_number(
    redis: Any, mesh: ScriptedMesh, kept: int, record: dict[str, Any], behind: bool
) -> None:
    """Two sequences of one shard have an open step each. Of their entries those that were written first are kept."""
    entries = ("9-0", "10-0")
    held = [HELD._replace(sequence=sequence_id("m", "", n), entry=entry) for n, entry in enumerate(entries, 1)]
    (inbox,) = {mesh.keys.inbox(mesh.keys.shard_of(holding.sequence), ME) for holding in held}
    for entry in (*entries[:kept], "11-0"):
        await redis.execute_command("XADD", inbox, entry, "a", "a step")
    for holding in held:
        await redis.hset(mesh.keys.sequence(holding.sequence).record, mapping={"ow": ME, **record})

    assert behind is await is_behind(redis, mesh.keys, ME, held)


async def test_a_step_that_was_taken_in_and_lost_is_not_run_in_the_place_of_another(
    mesh: ScriptedMesh, private_server: EmbeddedRedis, tmp_path: Path
) -> None:
    """The executor holds step 3, for which step 2 is missing, when Redis comes back without both. A gateway is faster
    than the executor: two other steps have these numbers by then."""
    add_sum_model(tmp_path / "models", "sum")
    sequence = mesh.sequence(7)
    record = mesh.keys.sequence(sequence).record
    with RedisProxy(private_server.url) as proxy:
        async with living(proxy.url, PREFIX, tmp_path / "models", "sum", "a") as a, asyncio.timeout(PATIENCE_S):
            await added(mesh, 1, a.executor)
            inbox = mesh.keys.inbox(mesh.keys.shard_of(sequence), a.executor)
            lost = mesh.submission(7, {"INPUT": np.array([[100]], np.int32)})
            epoch = (await mesh.record(7))["ep"]
            await mesh.redis.hset(record, "nx", 3)
            about = {"a": f"3 0 {lost.gateway} {lost.token} {sequence}", "o": f"{epoch} 0 0 1 1", "m": lost.message}
            entry = await mesh.redis.xadd(inbox, about)
            while [3] != [holding.accepted for holding in a.registration.serving.holdings]:
                await asyncio.sleep(0.01)

            proxy.refuse("")
            await mesh.redis.xdel(inbox, entry)
            await mesh.redis.hset(record, "nx", 1)
            others = [mesh.submission(7, {"INPUT": np.array([[value]], np.int32)}) for value in (10, 20)]
            assert [2, 3] == [(await mesh.submit(step)).step for step in others]
            private_server.stop()
            private_server.start()
            proxy.admit()

            with pytest.raises(ExceptionGroup) as ended:
                await a.task
            assert ended.group_contains(OlderDataError)
