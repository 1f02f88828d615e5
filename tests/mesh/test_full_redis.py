"""A Redis without memory: what cannot be written waits or is refused, and nobody ends for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import numpy as np
import pytest

from executor.connections import insist
from gateway.models.catalog import Catalog
from gateway.models.repository import EXPLICIT, RepositoryControl
from gateway.models.runtime_settings import RuntimeSettings
from shared.contract.errors import NotDoneError, UnavailableError
from shared.contract.ids import ExecutorId
from shared.contract.messages import ExecutorRegistration, StepFlag
from shared.process.logs import Level
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.redis_client import connect
from shared.store.sequences import Sequences
from shared.stored_settings import ProcessSettings, StoredSettings
from shared.traces.context import Sampler
from shared.traces.control import TraceControl
from tests.embedded_redis import EmbeddedRedis
from tests.scripted_mesh import ScriptedMesh

EXECUTOR = ExecutorId("a-1")
REGISTRATION = ExecutorRegistration(EXECUTOR, "a", "host", 1, 1, control_mode=EXPLICIT)


@pytest.fixture
async def redis(private_server: EmbeddedRedis) -> AsyncIterator[Redis]:
    redis = connect(private_server.url)
    yield redis
    await redis.aclose()


async def full(redis: Redis, *, is_full: bool = True) -> None:
    await cast("Any", redis).config_set("maxmemory", int(is_full))


async def test_a_lease_is_renewed_and_a_registration_waits(redis: Redis) -> None:
    membership = Membership(redis, Keyspace())
    await membership.register(REGISTRATION, lease_ms=60_000)
    await full(redis)

    assert await membership.renew(EXECUTOR, lease_ms=600_000)
    tries = 0
    refused = asyncio.Event()

    async def write() -> None:
        nonlocal tries
        tries += 1
        if tries > 1:
            refused.set()
        await membership.update(REGISTRATION)

    writing = asyncio.create_task(insist("registration", write))
    async with asyncio.timeout(60):
        await refused.wait()
    await full(redis, is_full=False)
    async with asyncio.timeout(60):
        await writing

    assert await cast("Any", redis).pttl(Keyspace().executor_lease(EXECUTOR)) > 60_000
    assert not await membership.renew(ExecutorId("gone"), lease_ms=600_000)


async def test_a_change_is_refused_so_that_it_can_be_tried_later(redis: Redis) -> None:
    keys = Keyspace()
    membership = Membership(redis, keys)
    await membership.register(REGISTRATION, lease_ms=60_000)
    catalog = Catalog(membership)
    mesh, control = StoredSettings(redis, keys), TraceControl(Sampler(), exporting=True)
    settings = RuntimeSettings(mesh, ProcessSettings(mesh, control, Level.INFO), control, catalog, "gateway")
    await full(redis)

    with pytest.raises(UnavailableError, match=r"Redis refused the change of 'm': .*maxmemory"):
        await RepositoryControl(redis, keys, catalog).load("m")
    with pytest.raises(UnavailableError, match=r"holds the settings.*maxmemory"):
        await settings.logs({"log_info": False}, "the test")
    with pytest.raises(UnavailableError, match=r"holds the settings.*maxmemory"):
        await settings.traces("", {"trace_rate": ["7"]}, "the test")


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
