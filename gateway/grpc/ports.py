"""The interfaces of the gateway that the gRPC side uses. Its tests implement them in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.models.metadata import SERVER_NAME
from gateway.requests.admission import InferCall
from gateway.requests.orphans import ConnectionSequences
from gateway.requests.waiting import Answer
from shared.contract.messages import ModelRecord, RepositoryEntry
from shared.process.log_settings import LogSettings
from shared.statistics.tally import ModelStatistics


class InferencePort(Protocol):
    """`gateway.requests.inference.Inference`."""

    def connection(self) -> ConnectionSequences:
        """The sequences of a new stream. Call its `end` when the stream ends."""
        ...

    def submit(self, call: InferCall, connection: ConnectionSequences | None = None) -> asyncio.Future[Answer]:
        """Accepts in the order of the calls; never raises, every failure is the future's MeshError."""
        ...


class CatalogPort(Protocol):
    """`gateway.models.catalog.Catalog`."""

    @property
    def is_ready(self) -> bool:
        """Whether the mesh can serve."""
        ...

    def record(self, model: str, version: str = "") -> tuple[ModelRecord, tuple[str, ...]]:
        """A loaded model and its READY versions. Raises MeshError."""
        ...

    def is_model_ready(self, model: str, version: str = "") -> bool:
        """Whether a living executor serves the model. Raises RequestError for a version that is no number."""
        ...


class RepositoryPort(Protocol):
    """`gateway.models.repository.RepositoryControl`."""

    def index(self, *, ready_only: bool = False) -> list[RepositoryEntry]:
        """Every model version that an executor knows of."""
        ...

    async def load(self, model: str, *, config_json: str = "", files: Mapping[str, bytes] | None = None) -> None:
        """Loads a model on every executor. Raises MeshError."""
        ...

    async def unload(self, model: str) -> None:
        """Unloads a model from every executor. Raises MeshError."""
        ...


class StatisticsPort(Protocol):
    """`gateway.models.statistics.Statistics`."""

    async def read(self, model: str = "", version: str = "") -> Sequence[ModelStatistics]:
        """Counters of READY versions. Raises MeshError."""
        ...


class SettingsPort(Protocol):
    """`gateway.models.runtime_settings.RuntimeSettings`."""

    async def logs(self, changes: Mapping[str, bool | int | str], by: str) -> LogSettings:
        """The log settings after the changes. Raises RequestError."""
        ...

    async def traces(self, model: str, changes: Mapping[str, list[str] | None], by: str) -> dict[str, list[str]]:
        """The trace settings of a model, or of the mesh, after the changes. Raises RequestError."""
        ...


@dataclass(frozen=True, slots=True)
class Ports:
    """All interfaces, as the composition root passes them."""

    inference: InferencePort
    catalog: CatalogPort
    repository: RepositoryPort
    statistics: StatisticsPort
    settings: SettingsPort
    server_name: str = SERVER_NAME
