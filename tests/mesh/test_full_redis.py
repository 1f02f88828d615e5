"""A Redis without memory: what cannot be written waits or is refused, and nobody ends for it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from redis import RedisCluster

from executor.connections import insist
from gateway.bounds.byte_budget import ByteBudget
from gateway.models.catalog import Catalog
from gateway.models.repository import EXPLICIT, RepositoryControl
from gateway.models.runtime_settings import RuntimeSettings
from gateway.requests.exchange.replies import Replies
from shared.contract.errors import NotDoneError, UnavailableError
from shared.contract.ids import ExecutorId, GatewayId, sequence_id
from shared.contract.messages import ExecutorRegistration, StepFlag
from shared.contract.record import EXPIRED, STATE
from shared.process.logs import Level
from shared.store.commands import Redis
from shared.store.connections.redis_client import connect
from shared.store.connections.server_run import ServerRun
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.sequences import Sequences
from shared.stored_settings import ProcessSettings, StoredSettings
from shared.traces.context import Sampler
from shared.traces.control import TraceControl
from tests.embedded_redis import EmbeddedRedis
from tests.mesh.model_repository import add_sum_model
from tests.mesh.raw_http import Response, answer, infer_document, posted
from tests.mesh.running_mesh import RunningMesh, eventually, running_mesh, seqmesh
from tests.scripted_mesh import ScriptedMesh

MODEL, BRIEF = "running_sum", "brief_sum"
EXECUTOR = ExecutorId("a-1")
REGISTRATION = ExecutorRegistration(EXECUTOR, "a", "host", 1, 1, control_mode=EXPLICIT)


@pytest.fixture
async def redis(private_server: EmbeddedRedis) -> AsyncIterator[Redis]:
    redis = connect(private_server.url)
    yield redis
    await redis.aclose()


async def full(redis: Redis, *, is_full: bool = True) -> None:
    await cast("Any", redis).config_set("maxmemory", int(is_full))


async def sent(mesh: RunningMesh, model: str, **flags: bool) -> Response:
    """A step of 5 in the model's first sequence."""
    return await posted(mesh.http(), f"/v2/models/{model}/infer", infer_document(5, sequence_id=1, **flags))


async def test_an_executor_comes_is_seen_and_leaves(redis: Redis) -> None:
    membership = Membership(redis, Keyspace())
    await full(redis)

    await membership.register(REGISTRATION, lease_ms=60_000)
    await membership.update(REGISTRATION)
    assert [True] == [member.usable for member in await membership.members()]
    assert await membership.renew(EXECUTOR, lease_ms=600_000)
    assert await cast("Any", redis).pttl(Keyspace().executor_lease(EXECUTOR)) > 60_000
    assert not await membership.renew(ExecutorId("gone"), lease_ms=600_000)
    await membership.leave(REGISTRATION)
    assert [False] == [member.usable for member in await membership.members()]


async def test_what_an_executor_must_write_waits_for_memory(redis: Redis) -> None:
    await full(redis)
    tries = 0
    refused = asyncio.Event()

    async def write() -> None:
        nonlocal tries
        tries += 1
        if tries > 1:
            refused.set()
        await redis.hset(Keyspace().kept, "m", "")

    writing = asyncio.create_task(insist("keeping a load", write))
    async with asyncio.timeout(60):
        await refused.wait()
    await full(redis, is_full=False)
    async with asyncio.timeout(60):
        await writing


async def test_a_gateway_is_seen_and_can_be_answered(redis: Redis) -> None:
    keys, gateway = Keyspace(), GatewayId("g-1")
    server: Any = redis
    await full(redis)

    await Replies(redis, keys, gateway, where="here").open(ServerRun())

    assert b"here" == await server.get(keys.gateway(gateway))
    assert 0 < await server.pttl(keys.replies(keys.shards[0], gateway))


async def test_every_service_comes_back_and_what_ends_makes_room(tmp_path: Path) -> None:
    add_sum_model(tmp_path / "models", MODEL)
    add_sum_model(tmp_path / "models", BRIEF, idle_us=2_000_000)
    with running_mesh(tmp_path / "data", [tmp_path / "models"]) as mesh:
        for model in (MODEL, BRIEF):
            assert 5 == answer(await sent(mesh, model, sequence_start=True))
        nodes = {"target_nodes": "all"} if isinstance(mesh.redis, RedisCluster) else {}
        mesh.redis.config_set("maxmemory", 1, **nodes)
        for service in ("gateway-1", "scheduler-1", "executor-1"):
            await mesh.restart(service, signal.SIGKILL)

        assert HTTPStatus.SERVICE_UNAVAILABLE == (await sent(mesh, MODEL)).status
        assert "1: ends now" in await seqmesh(mesh, "seq", "end", MODEL, "1")
        brief = sequence_id(BRIEF, "", 1)
        await eventually(lambda: mesh.record(brief)[STATE] == EXPIRED.decode(), "an idle one expires")
        mesh.redis.config_set("maxmemory", 0, **nodes)
        assert 5 == answer(await sent(mesh, MODEL, sequence_start=True, sequence_end=True))

        assert 3 == len(mesh.deaths()), mesh.deaths()
        for service in ("gateway-1", "scheduler-1", "executor-1"):
            assert "redis is full" in mesh.log(service)


async def test_a_change_is_refused_so_that_it_can_be_tried_later(redis: Redis) -> None:
    keys = Keyspace()
    membership = Membership(redis, keys)
    await membership.register(REGISTRATION, lease_ms=60_000)
    catalog = Catalog(membership)
    mesh, control = StoredSettings(redis, keys), TraceControl(Sampler(), exporting=True)
    settings = RuntimeSettings(mesh, ProcessSettings(mesh, control, Level.INFO), control, catalog, "gateway")
    await full(redis)

    with pytest.raises(UnavailableError, match=r"Redis refused the change of 'm': .*maxmemory"):
        await RepositoryControl(redis, keys, catalog, ByteBudget(1 << 30)).load("m")
    with pytest.raises(UnavailableError, match=r"holds the settings.*maxmemory"):
        await settings.logs({"log_info": False}, "the test", "a client")
    with pytest.raises(UnavailableError, match=r"holds the settings.*maxmemory"):
        await settings.traces("", {"trace_rate": ["7"]}, "the test", "a client")


async def test_what_was_accepted_is_finished_also_of_a_suspected_sequence(redis: Redis) -> None:
    mesh = ScriptedMesh(redis, Keyspace(), "sum")
    await mesh.open()
    await mesh.submit(mesh.submission(7, {"INPUT": np.zeros((1, 1), np.int64)}, StepFlag.START))
    await full(redis)

    epoch = await mesh.assign(7, EXECUTOR)
    assert await mesh.scripts.run(mesh.scripts.attempt(mesh.sequence(7), epoch))


@pytest.mark.leaves_sequences
async def test_a_sequence_is_exported_and_a_dead_executor_is_forgotten(redis: Redis) -> None:
    mesh = ScriptedMesh(redis, Keyspace(), "sum")
    await mesh.open()
    membership = Membership(redis, mesh.keys)
    await membership.register(REGISTRATION, lease_ms=60_000)
    await mesh.submit(mesh.submission(7, {"INPUT": np.zeros((1, 1), np.int64)}, StepFlag.START))
    await mesh.assign(7, EXECUTOR)
    await mesh.commit(7, EXECUTOR)
    sequences = Sequences(redis, mesh.keys, membership)
    await full(redis)

    assert 1 == (await sequences.export(mesh.sequence(7))).last_step
    with pytest.raises(NotDoneError, match="journal_steps"):
        await sequences.journal(mesh.sequence(7))
    assert await membership.remove(EXECUTOR)
