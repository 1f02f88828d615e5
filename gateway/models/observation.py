"""Observes the mesh for statistics and metrics: reads the executors' reports, and counts the requests that wait.

A request waits from its acceptance until the model begins to execute it. It waits in one of three places: with its
sequence for a slot (backlog, takeover), in the queue of a stateless model, or at an executor, which reports its waiting
requests about once a second.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.models.catalog import Catalog, Place
from gateway.models.occupancy import Occupancy, read_occupancies
from gateway.models.redis_figures import RedisFigures, read_figures
from shared.statistics.reports import ExecutorReport, ModelReport
from shared.statistics.tally import MemoryUse
from shared.store.commands import Redis
from shared.store.connections.redis_client import redis_needed
from shared.store.keyspace import Keyspace
from shared.store.membership import Member
from shared.store.reading import counter, read_counts, tell_now, value_of
from shared.store.reporting import Reports
from shared.store.tenants import StoredTenants
from shared.store.waiting_line import WaitingLine, read_lines, read_live, read_queued

EXECUTOR_STATES = ("serving", "leaving", "lost", "drained")
"""It serves; it leaves in order; its lease has ended without that; an operator has emptied it."""


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The response caches of all shards together.

    size_bytes  the most that they may hold
    bytes       what they hold now
    evicted     entries evicted since the caches began
    """

    size_bytes: int
    bytes: int
    entries: int
    evicted: int


@dataclass(frozen=True, slots=True)
class Observed:
    """The result of one observation.

    pending     requests that wait, per READY version
    cache       None where there is no response cache
    lines       per sequence model: its sequences that wait for a slot
    occupancies  per sequence model: its live sequences and its slots
    unreadable  values in Redis that could not be read so far, by kind of key
    executors   how many there are in each of `EXECUTOR_STATES`
    led         sequence models that a scheduler leads
    tenants     sequences of each tenant that has limits of its own
    unserved    models without an executor that were not unloaded, and were served a moment ago or have open sequences
    redis       what each server tells of itself, if it does, by the address of the node; "" of an only one
    """

    reports: Sequence[ExecutorReport]
    pending: Mapping[Place, int]
    cache: CacheUse | None = None
    lines: Mapping[str, WaitingLine] = field(default_factory=dict[str, WaitingLine])
    occupancies: Mapping[str, Occupancy] = field(default_factory=dict[str, Occupancy])
    unreadable: Mapping[str, int] = field(default_factory=dict[str, int])
    executors: Mapping[str, int] = field(default_factory=dict[str, int])
    led: frozenset[str] = frozenset()
    redis: Mapping[str, RedisFigures] = field(default_factory=dict[str, RedisFigures])
    tenants: Mapping[str, int] = field(default_factory=dict[str, int])
    unserved: frozenset[str] = frozenset()


class Observation:
    """Reads the observed values from Redis. cache_bytes: bound of each shard's response cache; 0: no cache."""

    def __init__(self, redis: Redis, keys: Keyspace, catalog: Catalog, *, cache_bytes: int = 0) -> None:
        self._redis = redis
        self._keys = keys
        self._catalog = catalog
        self._reports = Reports(redis, keys)
        self._tenants = StoredTenants(redis, keys)
        self._cache_bytes = cache_bytes

    async def look(self) -> Observed:
        """The mesh now. Raises UnavailableError without Redis."""
        with redis_needed("metrics", "read"):
            reports = await self.reports()
            ready = self._catalog.view.ready
            sequence_models = [*filter(self._is_sequence_model, ready)]
            others = (model for model in ready if not self._is_sequence_model(model))
            stateless = [(model, version) for model in others for version in ready[model]]
            lines = await read_lines(self._redis, self._keys, sequence_models)
            executors = [member.registration for member in self._catalog.live_members()]
            pending = Counter(await read_queued(self._redis, self._keys, stateless))
            for model, line in lines.items():
                pending.update({(model, version): steps for version, steps in line.steps.items()})
            for report in each_model(reports):
                pending[report.model, report.version] += report.pending
            await tell_now(self._redis, self._keys)
            return Observed(
                reports,
                pending,
                cache=await self._cache() if self._cache_bytes else None,
                lines=lines,
                occupancies=await read_occupancies(self._redis, self._keys, sequence_models, executors),
                unreadable=await read_counts(self._redis, self._keys),
                executors=await self._executors(),
                led=await self._led(sequence_models),
                redis=await self.redis_figures(),
                tenants=await self._tenants.sequences(),
                unserved=self._catalog.unserved | await self._with_open_sequences(),
            )

    async def redis_figures(self, within_s: float | None = None) -> Mapping[str, RedisFigures]:
        """What Redis tells of itself (`read_figures`). Raises one of CONNECTION_LOST."""
        return await read_figures(self._redis, within_s)

    async def reports(self) -> list[ExecutorReport]:
        """The report of every living executor. Raises redis.ConnectionError when the connection is lost."""
        return await self._reports.read(member.registration.executor for member in self._catalog.live_members())

    async def _cache(self) -> CacheUse:
        shards = self._keys.shards
        pipe = self._redis.pipeline(transaction=False)
        for shard in shards:
            keys = self._keys.cache(shard)
            pipe.hmget(keys.about, "bytes", "evicted")
            pipe.zcard(keys.used)
        found = await pipe.execute()
        numbers = [
            [value_of(self._keys.cache(shard).about, data or b"0", counter) or 0 for data in about]
            for shard, about in zip(shards, found[::2], strict=True)
        ]
        used, evicted = (sum(each[field] for each in numbers) for field in (0, 1))
        return CacheUse(self._cache_bytes * len(shards), used, sum(found[1::2]), evicted)

    async def _executors(self) -> Counter[str]:
        """Drained ones are out of the mesh, and known by name alone."""
        states = Counter(map(state_of, self._catalog.view.members))
        states["drained"] = await self._redis.hlen(self._keys.drained)
        return states

    async def _led(self, models: Sequence[str]) -> frozenset[str]:
        pipe = self._redis.pipeline(transaction=False)
        for model in models:
            pipe.exists(self._keys.leader(model))
        return frozenset(model for model, led in zip(models, await pipe.execute(), strict=True) if led)

    async def _with_open_sequences(self) -> frozenset[str]:
        """Models without an executor whose sequences are open. Also those whose executors this gateway never saw."""
        models = [*filter(self._is_sequence_model, self._catalog.unlisted)]
        live = await read_live(self._redis, self._keys, models)
        lines = await read_lines(self._redis, self._keys, models)
        return frozenset(model for model in models if live[model] or lines[model].first > 0)

    def _is_sequence_model(self, name: str) -> bool:
        return self._catalog.view.records[name].config.sequence_batching is not None


def state_of(member: Member) -> str:
    """One of `EXECUTOR_STATES`."""
    if member.registration.leaving:
        return "leaving"
    return "serving" if member.alive else "lost"


def each_model(reports: Sequence[ExecutorReport]) -> list[ModelReport]:
    """The parts of all executors' reports that are about a model."""
    return [model for report in reports for model in report.models]


def memory_of(reports: Sequence[ExecutorReport]) -> dict[Place, list[MemoryUse]]:
    """The memory of each model version on all executors, by kind and device."""
    sizes: dict[Place, Counter[tuple[str, int]]] = defaultdict(Counter)
    for model in each_model(reports):
        for use in model.memory:
            sizes[model.model, model.version][use.type, use.id] += use.byte_size
    return {
        place: [MemoryUse(kind, device, size) for (kind, device), size in sorted(found.items())]
        for place, found in sizes.items()
    }
