"""The logging and trace extensions, as both protocols offer them: settings of the whole mesh. (triton-spec 5.8)

A change is in Redis before it is answered; this gateway applies it at once, the other services within half a second.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

from redis.exceptions import ResponseError

from gateway.models.catalog import Catalog
from shared.contract.errors import RequestError, UnavailableError
from shared.process import log_settings
from shared.process.log_settings import LogSettings
from shared.store.redis_client import CONNECTION_LOST
from shared.stored_settings import ProcessSettings, StoredSettings
from shared.traces import settings as trace_settings
from shared.traces.control import TraceControl


class RuntimeSettings:
    """Reads and changes settings for one gateway. gateway: its name."""

    def __init__(
        self, mesh: StoredSettings, process: ProcessSettings, control: TraceControl, catalog: Catalog, gateway: str
    ) -> None:
        self._mesh = mesh
        self._process = process
        self._control = control
        self._catalog = catalog
        self._gateway = gateway

    async def logs(self, changes: log_settings.Changes, by: str) -> LogSettings:
        """The log settings after the changes, which may be none. by: the caller's protocol and address, for the log of
        every process. Raises RequestError, and UnavailableError."""
        log_settings.check(changes)
        with redis_needed():
            if changes:
                await self._mesh.change_logs(changes, f"{by} through {self._gateway}")
            await self._process.refresh()
        return self._process.logs

    async def traces(self, model: str, changes: Mapping[str, list[str] | None], by: str) -> dict[str, list[str]]:
        """A model's trace settings after the changes, or with model "" those of the mesh. by, raises: as `logs`."""
        if model and model not in self._catalog.view.records:
            raise RequestError(f"Request for unknown model : {model}")
        parsed = trace_settings.parse(changes, exporting=self._control.exporting)
        with redis_needed():
            if parsed:
                await self._mesh.change_traces(model, parsed, f"{by} through {self._gateway}")
            await self._process.refresh()
        return self._control.settings(model).texts()


@contextmanager
def redis_needed() -> Generator[None]:
    """What Redis does not do is to be tried again later."""
    try:
        yield
    except (*CONNECTION_LOST, ResponseError) as lost:
        raise UnavailableError(f"Redis, which holds the settings, cannot be reached or refuses: {lost}") from lost
