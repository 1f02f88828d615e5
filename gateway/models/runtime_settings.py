"""The logging and trace extensions of both protocols. Their settings are those of the whole mesh (triton-spec 5.8).

A change is written to Redis before it is answered. This gateway applies it at once, the other services within half a
second.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from functools import partial

from gateway.bounds.fair_lock import FairLock
from gateway.models.catalog import Catalog
from gateway.models.shared_reads import SharedReads
from shared.contract.errors import RequestError
from shared.process import log_settings
from shared.process.log_settings import LogSettings
from shared.store.connections.redis_client import redis_needed
from shared.stored_settings import ProcessSettings, StoredSettings
from shared.traces import settings as trace_settings
from shared.traces.control import TraceControl

PAUSE_S = 0.1
"""Shortest time between two changes: each is written to Redis, and into the log with who made it."""


class RuntimeSettings:
    """Reads and changes the settings on behalf of clients. gateway: this gateway's name, for the log."""

    def __init__(
        self, mesh: StoredSettings, process: ProcessSettings, control: TraceControl, catalog: Catalog, gateway: str
    ) -> None:
        self._mesh = mesh
        self._process = process
        self._changing = FairLock()
        self._changed_at = -math.inf
        self._refreshed = SharedReads[None, None](lambda _: process.refresh())
        self._control = control
        self._catalog = catalog
        self._gateway = gateway

    async def logs(self, changes: log_settings.Changes, by: str, client: str) -> LogSettings:
        """Makes the changes, which may be none, and returns the log settings after them.

        by      the client's protocol and address, for the log of every process
        client  with whose changes they take turns
        raises  RequestError for a wrong value, UnavailableError without Redis
        """
        log_settings.check(changes)
        by = f"{by} through {self._gateway}"
        await self._apply(partial(self._mesh.change_logs, changes, by) if changes else None, client)
        return self._process.logs

    def check_model(self, model: str) -> None:
        """Raises RequestError for a model that is not there; "" stands for the mesh."""
        if model and model not in self._catalog.view.records:
            raise RequestError(f"Request for unknown model : {model}")

    async def traces(
        self, model: str, changes: Mapping[str, list[str] | None], by: str, client: str
    ) -> dict[str, list[str]]:
        """Makes the changes, and returns a model's trace settings after them; with model "" the mesh's.

        by, client, raises  as for `logs`
        """
        self.check_model(model)
        parsed = trace_settings.parse(changes, exporting=self._control.exporting)
        by = f"{by} through {self._gateway}"
        await self._apply(partial(self._mesh.change_traces, model, parsed, by) if parsed else None, client)
        return self._control.settings(model).texts()

    async def _apply(self, change: Callable[[], Awaitable[None]] | None, client: str) -> None:
        """Makes a change, if there is one, and applies the settings as they are then.

        Changes are made one at a time, and the clients take turns. Who only asks does not wait for them.
        """
        now = asyncio.get_running_loop().time
        with redis_needed("settings", "reached or refuses"):
            async with self._changing.held(client) if change else nullcontext():
                if change:
                    await asyncio.sleep(self._changed_at + PAUSE_S - now())
                    self._changed_at = now()
                    await change()
                await self._refreshed.get(None)
