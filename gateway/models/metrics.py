"""The page `/metrics`: Triton's metrics of the mesh's models and machines, and this gateway's own.

Metrics with the prefix `nv_` are about the whole mesh: every gateway reports the same, so scrape one gateway, or
aggregate with `max`. Metrics with the prefix `seqmesh_gateway_` are about this process alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics_exposition

from gateway.models.catalog import Catalog
from gateway.models.exposition import Family, number_family
from gateway.models.mesh_families import (
    executor_families,
    exemplars_of,
    redis_families,
    request_families,
    sequence_families,
    tenant_families,
)
from gateway.models.metric_families import (
    cache_families,
    custom_families,
    hardware_families,
    inference_families,
    shown,
    unreadable_families,
)
from gateway.models.observation import Observation, Observed
from gateway.models.shared_reads import SharedReads
from gateway.models.statistics import Statistics
from shared.contract.errors import MeshError
from shared.contract.messages import ModelRecord
from shared.process import logs
from shared.statistics.meter import Exemplar
from shared.statistics.metrics_config import MetricsConfig
from shared.statistics.reports import Sample
from shared.statistics.tally import Counts, ModelStatistics
from shared.store.connections.redis_client import redis_needed
from shared.store.connections.redis_py import CONNECTION_LOST
from shared.store.metering import Metering

_untyped: Any = openmetrics_exposition
MESH_UP = ("seqmesh_gateway_mesh_up", "1 when this gateway can read the mesh in Redis")
MESH_LIMIT_S = 3.0
REDIS_LIMIT_S = 1.0
"""How long a page waits for what Redis holds of the mesh, and then for what Redis tells of itself: together less than
the five seconds of a Prometheus that scrapes as often. A page that comes too late says nothing, not even that Redis is
away.
"""
NODE_LIMIT_S = 0.8
"""How long one server may take then: a node of a Cluster that is silent must not hide the others."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """A number of this gateway that is read at every scrape."""

    name: str
    help: str
    read: Callable[[], float]


class Metrics:
    def __init__(
        self,
        catalog: Catalog,
        statistics: Statistics,
        observation: Observation,
        gauges: Sequence[Gauge],
        config: MetricsConfig,
        metering: Metering,
    ) -> None:
        """metering: hands on what this gateway measures"""
        self._metering = metering
        self._catalog = catalog
        self._statistics = statistics
        self._observation = observation
        self._gauges = gauges
        self._config = config
        self._process: Any = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self._pages = SharedReads(self._made)
        self._left_out: set[str] = set()
        """Names of models' metrics that the mesh has, and that the log has told of."""

    async def render(self, *, openmetrics: bool = False) -> bytes:
        """The page; those who ask at the same time get the same one."""
        return await self._pages.get(openmetrics)

    async def _made(self, openmetrics: bool) -> bytes:  # noqa: FBT001  it is the key of the page
        """The page in Prometheus' text format, or in OpenMetrics, which has exemplars. Without the mesh,
        `seqmesh_gateway_mesh_up` is 0, and it has this gateway's metrics and what Redis tells of itself, if it does: a
        server that refuses writes says why.
        """
        try:
            async with asyncio.timeout(MESH_LIMIT_S):
                families = await self._mesh()
            up = 1.0
        except (MeshError, TimeoutError) as error:
            cause = error.message if isinstance(error, MeshError) else f"Redis has not answered for {MESH_LIMIT_S:g} s"
            logs.warning("metrics without the mesh's", error=cause)
            families, up = await self._redis_alone(), 0.0
        families.append(number_family(*MESH_UP, [Sample("", {}, up)]))
        families += [number_family(own.name, own.help, [Sample("", {}, own.read())]) for own in self._gauges]
        # On another thread, as in `_mesh`: of a thousand models the page has a hundred thousand lines, which take most
        # of a second, and requests are answered meanwhile.
        return await asyncio.to_thread(self._page, families, openmetrics=openmetrics)

    def _page(self, families: Iterable[Family], *, openmetrics: bool) -> bytes:
        each = (family.openmetrics_lines() if openmetrics else family.lines() for family in families)
        # The registry's part comes last: in OpenMetrics it writes the page's end.
        last: bytes = _untyped.generate_latest(self._process) if openmetrics else generate_latest(self._process)
        return "\n".join(chain.from_iterable(each)).encode() + b"\n" + last

    async def _mesh(self) -> list[Family]:
        # First, so that the page has all that this gateway has answered.
        with redis_needed("metrics", "written"):
            await self._metering.flush()
        statistics = await self._statistics.read()
        of_mesh = await self._statistics.of_mesh()
        observed = await self._observation.look()
        records, exemplars = self._catalog.view.records, list(self._own_exemplars())
        return await asyncio.to_thread(self._families, statistics, of_mesh, observed, records, exemplars)

    def _families(
        self,
        statistics: Sequence[ModelStatistics],
        of_mesh: Counts,
        observed: Observed,
        records: Mapping[str, ModelRecord],
        exemplars: Iterable[tuple[str, str, Exemplar]],
    ) -> list[Family]:
        models = shown(statistics, records, observed)
        own = [
            *inference_families(models, self._config),
            *request_families(models, exemplars_of(observed, exemplars)),
            *sequence_families(models, observed.led),
            *cache_families(models, observed),
            *hardware_families(observed),
            *tenant_families(observed.tenants, of_mesh),
            *executor_families(observed),
            *redis_families(observed.redis, of_mesh),
            *unreadable_families(observed),
        ]
        return [*own, *self._admitted(custom_families(observed), self._names(own))]

    def _admitted(self, customs: Sequence[Family], taken: Collection[str]) -> list[Family]:
        """The families of models without those that have a taken name: a page on which a family comes twice cannot be
        read, and a model is not to count for the mesh. Each of those is told once.
        """
        for name in sorted({each.name for each in customs}.intersection(taken) - self._left_out):
            self._left_out.add(name)
            logs.warning("metric of a model left out", metric=name, remedy="rename it: the mesh has one so named")
        return [each for each in customs if each.name not in taken]

    def _names(self, families: Iterable[Family]) -> set[str]:
        """The names that a page with these families has, with those of this gateway."""
        process = [sample.name for metric in self._process.collect() for sample in metric.samples]
        return {MESH_UP[0], *process, *(own.name for own in self._gauges), *(family.name for family in families)}

    async def _redis_alone(self) -> list[Family]:
        """What Redis tells of itself; nothing if it does not answer."""
        try:
            async with asyncio.timeout(REDIS_LIMIT_S):
                return redis_families(await self._observation.redis_figures(NODE_LIMIT_S), {})
        except CONNECTION_LOST:
            return []

    def _own_exemplars(self) -> Iterable[tuple[str, str, Exemplar]]:
        for load, meter in self._metering.meters():
            for exemplar in meter.exemplars:
                yield load.model, load.version, exemplar
