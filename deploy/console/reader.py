"""Reads the mesh for the console: one reading after another, each with a bounded number of commands.

Executors and models are few. Sequences may be many: they are counted by the sizes of sets, and read one by one only
while there are at most `FOLLOWED_MAX` of them in slots. Beyond that pages show numbers, and find a sequence by its id.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from deploy.console.snapshot import Snapshot, served_loads
from deploy.operate.operating import ExecutorHolding, OperatedMesh, holdings
from shared.contract.errors import Code, MeshError, RequestError
from shared.contract.ids import SequenceId, correlation_id_from, sequence_id
from shared.contract.messages import ModelRecord
from shared.store.agreement import keys_of_mesh
from shared.store.commands import Redis
from shared.store.company import services
from shared.store.connections.redis_client import redis_now_ms
from shared.store.membership import Membership
from shared.store.reading import text_of
from shared.store.reporting import Reports
from shared.store.scripts import Scripts
from shared.store.sequence_status import OPEN_STATES, SequenceStatus
from shared.store.totals import Tallies
from shared.store.waiting_line import read_lines, read_live, read_queued

FOLLOWED_MAX = 256
"""Sequences that each reading reads one by one."""
FOUND_MAX = 200
"""Sequences in one answer to a search."""
LOOKED_AT_MAX = 20_000
"""Ids that a search by their beginning looks at."""
CANDIDATES_AT_ONCE = 512
"""A typed id may mean a sequence of any version of any model. So many of them are read in one round trip."""


class NoMeshError(MeshError):
    """There is no mesh in this Redis yet."""


class MeshReader:
    """The mesh with this prefix, whatever its number of shards."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis = redis
        self._prefix = prefix
        self._mesh: OperatedMesh | None = None
        self._followed: set[SequenceId] = set()

    async def read(self, watched: Collection[SequenceId] = ()) -> Snapshot:
        """The mesh now. Raises NoMeshError, UnfitRedisError and one of `CONNECTION_LOST`."""
        began = time.monotonic()
        mesh = await self.operated()
        executors = await holdings(mesh)
        records = await mesh.membership.models()
        with_sequences = [
            name for name, record in sorted(records.items()) if record.config.sequence_batching is not None
        ]
        loads = served_loads(executors, records)
        stateless = [(one.model, one.version) for one in loads if one.model not in with_sequences]
        statuses, watched_now, is_complete = await self._sequences(mesh, executors, watched)
        members = await mesh.membership.members()
        reports = await Reports(mesh.redis, mesh.keys).read(one.registration.executor for one in executors)
        return Snapshot(
            at_ms=await redis_now_ms(mesh.redis),
            executors=executors,
            usable=frozenset(one.registration.executor for one in members if one.usable),
            reports={report.executor: report for report in reports},
            drained=frozenset(await mesh.membership.drained()),
            services=await services(mesh.redis, mesh.keys),
            records=records,
            counts=await Tallies(Scripts(mesh.redis, mesh.keys), mesh.keys).read(loads) if loads else {},
            lines=await read_lines(mesh.redis, mesh.keys, with_sequences) if with_sequences else {},
            live=await read_live(mesh.redis, mesh.keys, with_sequences),
            queued=await read_queued(mesh.redis, mesh.keys, stateless),
            sequences=statuses,
            is_complete=is_complete,
            watched=watched_now,
            took_ms=(time.monotonic() - began) * 1000,
        )

    async def operated(self) -> OperatedMesh:
        """The mesh for the operators' commands, with the number of shards that it has now: `seqmesh reshard` may have
        changed it. Raises as `read`.
        """
        keys = await keys_of_mesh(self._redis, self._prefix)
        if keys is None:
            raise NoMeshError(f"there is no mesh '{self._prefix}' in this Redis yet")
        if self._mesh is None or keys.shards != self._mesh.keys.shards:
            self._mesh = OperatedMesh(self._redis, keys, Membership(self._redis, keys))
        return self._mesh

    async def model(self, name: str) -> ModelRecord | None:
        """What its executors have published of a model; None if the mesh does not know it."""
        mesh = await self.operated()
        return await mesh.membership.model(name)

    async def called(self, text: str) -> list[SequenceStatus]:
        """The sequences of any model that clients call by this id, also those that are over and not forgotten."""
        mesh = await self.operated()
        ids = dict.fromkeys(correlation_id_from(text, string=string) for string in (False, True))
        records = await mesh.membership.models()
        candidates = [
            sequence_id(name, version, one)
            for name, record in sorted(records.items())
            if record.config.sequence_batching is not None
            for version in ("", *record.versions)
            for one in ids
        ]
        found: list[SequenceStatus] = []
        for begin in range(0, len(candidates), CANDIDATES_AT_ONCE):
            statuses = await mesh.sequences.statuses(candidates[begin : begin + CANDIDATES_AT_ONCE])
            found += [one for one in statuses if one is not None]
        return found

    async def some(self, model: str, prefix: str) -> tuple[list[SequenceStatus], bool]:
        """Open sequences of a model whose id begins with this, and whether these are all of them."""
        mesh = await self.operated()
        if await mesh.membership.model(model) is None:
            raise RequestError(f"no model '{model}' in this mesh", Code.NOT_FOUND)
        names, are_all = await mesh.sequences.some(model, prefix, found_max=FOUND_MAX, looked_at_max=LOOKED_AT_MAX)
        return [one for one in await mesh.sequences.statuses(names) if one is not None], are_all

    async def _sequences(
        self, mesh: OperatedMesh, executors: Sequence[ExecutorHolding], watched: Collection[SequenceId]
    ) -> tuple[list[SequenceStatus], dict[SequenceId, SequenceStatus | None], bool]:
        """Followed sequences, watched ones, and whether all that hold a slot are followed; else none is."""
        is_complete = sum(one.total for one in executors) <= FOLLOWED_MAX
        held = await _held(mesh, executors) if is_complete else set[SequenceId]()
        # One that has left its slot is followed until it is over: it moves, or is paged. Of too many a few would look
        # like all of them.
        names = [*held, *sorted(self._followed - held)][:FOLLOWED_MAX] if is_complete else []
        self._followed = held
        asked = list(dict.fromkeys([*names, *watched]))
        found = dict(zip(asked, await mesh.sequences.statuses(asked), strict=True)) if asked else {}
        statuses = [one for name in names if (one := found[name]) is not None]
        self._followed |= {one.sequence for one in statuses if one.state in OPEN_STATES}
        return statuses, {name: found[name] for name in watched}, is_complete


async def _held(mesh: OperatedMesh, executors: Sequence[ExecutorHolding]) -> set[SequenceId]:
    """The sequences in these executors' slots."""
    pipe = mesh.redis.pipeline(transaction=False)
    for one in executors:
        for model in one.sequences:
            for shard in mesh.keys.shards:
                pipe.smembers(mesh.keys.owned(shard, one.registration.executor, model))
    return {SequenceId(text_of(name)) for names in await pipe.execute() for name in names}
