"""A mesh whose processes run on this machine: finds which executor owns which text, and kills one.

Reads the launcher's mesh.json for process ids and, for the rest, what the mesh itself keeps in Redis.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import click

from deploy.local.data_directory import MeshState
from shared.contract.ids import sequence_id
from shared.contract.record import OWNER
from shared.store.agreement import keys_of_mesh
from shared.store.commands import Redis
from shared.store.connections.redis_client import connect
from shared.store.connections.redis_py import REDIS_LOST
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.reading import text_of

EXECUTORS_TIMEOUT_S = 60.0
"""A gateway is ready with the first executor; the others need some seconds more to load their models."""
POLL_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class KilledExecutor:
    """An executor that was killed, when (monotonic clock), and the texts (indexes) that it held."""

    name: str
    pid: int
    killed_s: float
    held: tuple[int, ...]


@asynccontextmanager
async def joined(state: MeshState, model: str) -> AsyncGenerator[LocalMesh]:
    """A mesh of this machine, within the block. Raises click.ClickException if it does not know the model, or its Redis
    is lost."""
    try:
        async with connect(state.redis_url, retries=0) as redis:
            keys = await keys_of_mesh(redis, state.key_prefix)
            assert keys is not None, "the mesh has started"
            membership = Membership(redis, keys)
            if await membership.model(model) is None:
                raise click.ClickException(await why_not_served(membership, model))
            yield LocalMesh(state, model, redis, keys)
    except REDIS_LOST as lost:
        raise click.ClickException(
            f"Redis of the mesh cannot be reached ({lost}): `seqmesh doctor` tells more"
        ) from lost


async def why_not_served(membership: Membership, model: str) -> str:
    """Why no executor serves a model: its load failed, perhaps in the demo's own mesh, or none is called so."""
    entries = [entry for member in await membership.members() for entry in member.registration.repository]
    reasons = [entry.reason for entry in entries if entry.model == model and entry.reason]
    if reasons:
        return f"model '{model}' is not loaded: {reasons[0]}"
    return f"the mesh that runs here has no model '{model}': --private starts one that has"


class LocalMesh:
    def __init__(self, state: MeshState, model: str, redis: Redis, keys: Keyspace) -> None:
        self._model = model
        self._pids = {child.name: child.pid for child in state.children if child.service == "executor"}
        self._redis = redis
        self._keys = keys
        self._membership = Membership(redis, keys)

    @property
    def executors(self) -> int:
        return len(self._pids)

    async def drained(self) -> list[str]:
        """The launcher's executors that an operator has emptied, by name."""
        return [name for name in await self._membership.drained() if name in self._pids]

    async def executors_ready(self) -> bool:
        """Waits until every executor has the model, and says for whom; False when that takes too long."""
        said = False
        try:
            async with asyncio.timeout(EXECUTORS_TIMEOUT_S):
                while missing := self._pids.keys() - await self._serving():
                    if not said:
                        said = True
                        click.echo(f"waiting for {', '.join(sorted(missing))} (at most {EXECUTORS_TIMEOUT_S:.0f} s)")
                    await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError:
            return False
        return True

    async def _serving(self) -> set[str]:
        """The live executors that serve the model, by name."""
        return {
            member.registration.name
            for member in await self._membership.members()
            if member.usable and any(served.model == self._model for served in member.registration.models)
        }

    async def owners(self, correlation_ids: Sequence[str]) -> list[str]:
        """The name of the executor that holds each sequence; "" for one that has no owner at the moment."""
        names = {str(m.registration.executor): m.registration.name for m in await self._membership.members()}
        pipe = self._redis.pipeline(transaction=False)
        for given in correlation_ids:
            pipe.hget(self._keys.sequence(sequence_id(self._model, "", given)).record, OWNER)
        return [names.get(text_of(owner or b""), "") for owner in await pipe.execute()]

    async def kill_one(self, correlation_ids: Sequence[str]) -> KilledExecutor:
        """Kills (SIGKILL) the executor that holds most of the sequences. Raises click.ClickException without any."""
        owners = await self.owners(correlation_ids)
        # One that was started again has another process, and its old id may be another program's by now.
        living = {(m.registration.name, m.registration.pid) for m in await self._membership.members() if m.usable}
        victims = [name for name, pid in self._pids.items() if (name, pid) in living]
        if not victims:
            raise click.ClickException("every executor was started again meanwhile: repeat the demo")
        name = busiest(owners, victims)
        killed_s = time.monotonic()
        os.kill(self._pids[name], signal.SIGKILL)
        held = tuple(index for index, owner in enumerate(owners) if owner == name)
        return KilledExecutor(name, self._pids[name], killed_s, held)


def busiest(owners: Iterable[str], executors: Iterable[str]) -> str:
    """The executor that holds most; the first by name among equals."""
    held = Counter(owners)
    return min(executors, key=lambda name: (-held[name], name))
