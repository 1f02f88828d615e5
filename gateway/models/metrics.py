"""The page `/metrics`: Triton's metrics of the mesh's models and machines, and this gateway's own.

Metrics with the prefix `nv_` are about the whole mesh: every gateway reports the same, so scrape one gateway, or
aggregate with `max`. Metrics with the prefix `seqmesh_gateway_` are about this process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from gateway.models.catalog import Catalog
from gateway.models.metric_families import (
    Family,
    cache_families,
    custom_families,
    hardware_families,
    inference_families,
    shown,
    unreadable_families,
)
from gateway.models.observation import Observation
from gateway.models.statistics import Statistics
from shared.contract.errors import MeshError
from shared.process import logs
from shared.statistics.metrics_config import MetricsConfig
from shared.statistics.reports import Sample

MESH_UP = ("seqmesh_gateway_mesh_up", "gauge", "1 when this gateway can read the mesh in Redis")
"""Name, kind and help."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """A number of this gateway that is read at every scrape."""

    name: str
    kind: str
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
    ) -> None:
        self._catalog = catalog
        self._statistics = statistics
        self._observation = observation
        self._gauges = gauges
        self._config = config
        self._process: Any = CollectorRegistry()
        ProcessCollector(registry=self._process)

    async def render(self) -> bytes:
        """The page in Prometheus' text format. Without Redis it has this gateway's metrics only, and
        `seqmesh_gateway_mesh_up` is 0."""
        try:
            families = await self._mesh()
            up = 1.0
        except MeshError as error:
            logs.warning("metrics without the mesh's", error=error.message)
            families, up = [], 0.0
        families.append(Family(*MESH_UP, [Sample("", {}, up)]))
        families += [Family(own.name, own.kind, own.help, [Sample("", {}, own.read())]) for own in self._gauges]
        lines = [line for family in families for line in family.lines()]
        return "\n".join(lines).encode() + b"\n" + generate_latest(self._process)

    async def _mesh(self) -> list[Family]:
        statistics = await self._statistics.read()
        observed = await self._observation.look()
        models = shown(statistics, self._catalog.view.records, observed)
        return [
            *inference_families(models, self._config),
            *cache_families(models, observed),
            *hardware_families(observed),
            *custom_families(observed),
            *unreadable_families(observed),
        ]
