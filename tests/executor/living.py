"""Executors inside the test's process, against the real server: each with its own engines, as its context lasts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from executor.connections import RedisConnections
from executor.lease.registration import Applied, Registration
from executor.models.loader import Loader
from executor.models.repository import ModelRepository
from executor.models.version_maker import LoadOptions
from executor.settings import ExecutorSettings
from executor.workers.devices import Devices
from shared.contract.ids import ExecutorId
from shared.process.lifecycle import Stop, Tasks
from shared.store.commands import Redis
from shared.store.connections.fitness import value_bytes_max
from shared.store.connections.redis_client import connect
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.traces.tracing import Tracing
from tests.scripted_mesh import ScriptedMesh

SHARDS = 2
LEASE_MS = 600_000
"""Longer than any test: whoever wants the end of a lease deletes its key."""


@dataclass(frozen=True)
class Running:
    """An executor that a test started."""

    registration: Registration
    task: asyncio.Task[None]
    repository: ModelRepository
    changed: asyncio.Event

    @property
    def executor(self) -> ExecutorId:
        return self.registration.executor


@asynccontextmanager
async def scripted(redis: Redis, key_prefix: str, model: str) -> AsyncGenerator[ScriptedMesh]:
    """A mesh whose other services are the test. Afterwards no executor is registered."""
    mesh = ScriptedMesh(redis, Keyspace(key_prefix, SHARDS), model)
    await mesh.open()
    yield mesh
    membership = Membership(redis, mesh.keys)
    for member in await membership.members():
        await membership.remove(member.registration.executor)


@asynccontextmanager
async def loading(
    redis_url: str, key_prefix: str, repository: ModelRepository, name: str = "a", stop: Stop | None = None
) -> AsyncGenerator[Loader]:
    """What loads the models of an executor of that name."""
    connections = RedisConnections(lambda run: connect(redis_url, retries=0, run=run), Keyspace(key_prefix, SHARDS))
    # The event loop is the group that owns what goes on.
    tasks = Tasks(cast("Any", asyncio))
    yield Loader(repository, connections, name, stop or Stop(), tasks, asyncio.Event())
    await tasks.end_all()
    await connections.close()


@asynccontextmanager
async def living(
    redis_url: str,
    key_prefix: str,
    models: Path,
    model: str,
    name: str,
    *more: str,
    redis_timeout_ms: int = 10_000,
    lease_ms: int = LEASE_MS,
    applied: Callable[[], Applied] | None = None,
) -> AsyncGenerator[Running]:
    """Runs an executor of one model, and of more. Afterwards it is gone as if it had been killed: its lease and inbox
    stay. applied: as `Registration.run` takes it
    """
    settings = ExecutorSettings(
        redis_url=redis_url, key_prefix=key_prefix, shards=SHARDS, models=(models,), name=name, lease_ms=lease_ms
    )
    keys = Keyspace(key_prefix, SHARDS)
    asking = connect(redis_url)
    bytes_max = await value_bytes_max(asking)
    await asking.aclose()
    client = partial(connect, redis_url, retries=0, timeout_ms=redis_timeout_ms)
    connections = RedisConnections(lambda run: client(run=run), keys, bytes_max)
    repository = ModelRepository((models,), Devices(), LoadOptions(value_bytes_max=bytes_max))
    for one in (model, *more):
        repository.load(one)
    changed = asyncio.Event()
    registration = Registration(settings, connections, repository, Tracing(), Applied(), changed)
    running = asyncio.create_task(registration.run(applied))
    try:
        started = asyncio.create_task(registration.registered.wait())
        await asyncio.wait({running, started}, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            await running
        yield Running(registration, running, repository, changed)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await repository.close()
        await connections.close()
