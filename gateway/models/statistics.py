"""Statistics of model versions, for both protocols and the metrics. They count for the whole mesh, not for a gateway.

Source: triton-spec 5.7.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.models.catalog import Catalog
from gateway.models.observation import Observation, memory_of
from gateway.models.shared_reads import SharedReads
from gateway.models.versions import check_version_text
from shared.contract.errors import RequestError
from shared.statistics.meter import OF_MESH
from shared.statistics.tally import Counts, ModelLoad, ModelStatistics, statistics_of
from shared.store.connections.redis_client import redis_needed
from shared.store.totals import Tallies


class Statistics:
    """Reads the counts of READY model versions."""

    def __init__(self, tallies: Tallies, catalog: Catalog, observation: Observation) -> None:
        self._tallies = tallies
        self._catalog = catalog
        self._observation = observation
        self._reads = SharedReads(self._read)

    async def read(self, model: str = "", version: str = "") -> list[ModelStatistics]:
        """Statistics of one READY version, of all READY versions of a model, or of all models; by name and version.

        A client that has received an answer finds its request counted.

        raises  RequestError for a model or version that is not READY, UnavailableError without Redis
        """
        version = check_version_text(version)
        # A version of no model says nothing, as in Triton.
        loads = self._loads(model, version if model else "")
        return await self._reads.get(tuple(loads)) if loads else []

    async def _read(self, loads: Sequence[ModelLoad]) -> list[ModelStatistics]:
        with redis_needed("statistics", "read"):
            counts = await self._tallies.read(loads)
            memory = memory_of(await self._observation.reports())
        return [
            statistics_of(load.model, load.version, counts[load], memory.get((load.model, load.version), ()))
            for load in loads
        ]

    async def of_mesh(self) -> Counts:
        """What belongs to no model. Raises UnavailableError without Redis."""
        with redis_needed("statistics", "read"):
            return (await self._tallies.read([OF_MESH]))[OF_MESH]

    def _loads(self, model: str, version: str) -> list[ModelLoad]:
        view = self._catalog.view
        if model and model not in view.ready:
            raise RequestError(f"requested model '{model}' is not available")
        if model and version and version not in view.ready[model]:
            raise RequestError(f"requested model version is not available for model '{model}'")
        return [
            ModelLoad(name, number, view.records[name].generation)
            for name in ([model] if model else sorted(view.ready))
            for number in view.ready[name]
            if not version or number == version
        ]
