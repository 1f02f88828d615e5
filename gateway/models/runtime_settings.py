"""The logging and trace extensions of both protocols. Their settings are those of the whole mesh (triton-spec 5.8).

A change is written to Redis before it is answered. This gateway applies it at once, the other services within half a
second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from functools import partial

from gateway.models.catalog import Catalog
from gateway.models.shared_reads import SharedReads
from shared.contract.errors import RequestError
from shared.process import log_settings
from shared.process.log_settings import LogSettings
from shared.store.redis_client import redis_needed
from shared.stored_settings import ProcessSettings, StoredSettings
from shared.traces import settings as trace_settings
from shared.traces.control import TraceControl


class RuntimeSettings:
    """Reads and changes the settings on behalf of clients. gateway: this gateway's name, for the log."""

    def __init__(
        self, mesh: StoredSettings, process: ProcessSettings, control: TraceControl, catalog: Catalog, gateway: str
    ) -> None:
        self._mesh = mesh
        self._process = process
        self._changing = asyncio.Lock()
        self._refreshed = SharedReads[None, None](lambda _: process.refresh())
        self._control = control
        self._catalog = catalog
        self._gateway = gateway

    async def logs(self, changes: log_settings.Changes, by: str) -> LogSettings:
        """Makes the changes, which may be none, and returns the log settings after them.

        by      the client's protocol and address, for the log of every process
        raises  RequestError for a wrong value, UnavailableError without Redis
        """
        log_settings.check(changes)
        by = f"{by} through {self._gateway}"
        await self._apply(partial(self._mesh.change_logs, changes, by) if changes else None)
        return self._process.logs

    async def traces(self, model: str, changes: Mapping[str, list[str] | None], by: str) -> dict[str, list[str]]:
        """Makes the changes, and returns a model's trace settings after them; with model "" the mesh's.

        by, raises  as for `logs`
        """
        if model and model not in self._catalog.view.records:
            raise RequestError(f"Request for unknown model : {model}")
        parsed = trace_settings.parse(changes, exporting=self._control.exporting)
        by = f"{by} through {self._gateway}"
        await self._apply(partial(self._mesh.change_traces, model, parsed, by) if parsed else None)
        return self._control.settings(model).texts()

    async def _apply(self, change: Callable[[], Awaitable[None]] | None) -> None:
        """Makes a change, if there is one, and applies the settings as they are then.

        Changes take turns, because each goes to Redis and to every log. Who only asks does not wait for them.
        """
        with redis_needed("settings", "reached or refuses"):
            async with self._changing if change else nullcontext():
                if change:
                    await change()
                await self._refreshed.get(None)
