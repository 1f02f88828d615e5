"""What is looked at again and again: in poll mode models follow the repository's folders.

Each model's folder is read at intervals. A new model is loaded, a changed one is loaded again, a missing one is
unloaded. A load that failed is tried again only when the folder changes once more; so a model that is being copied is
loaded when it is complete. Every executor reads its own folders; if they are shared, all executors follow within one
interval.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from executor.models.loader import SLOW_S, Loader
from executor.models.repository import ModelRepository
from executor.remote.storage import UnreachableError
from shared.contract.errors import MeshError
from shared.process import logs


class Polling:
    """Watches the folders.

    period_s  seconds between two looks
    changed   set when there is something to announce to the mesh
    """

    def __init__(self, repository: ModelRepository, loader: Loader, period_s: float, changed: asyncio.Event) -> None:
        self._repository = repository
        self._loader = loader
        self._period_s = period_s
        self._changed = changed
        self._seen: dict[str, str] = {}

    async def run(self) -> None:
        await _repeat(self.look, self._period_s, self._changed)

    async def look(self, limit_s: float | None = SLOW_S) -> bool:
        """Loads and unloads what has changed since the last look; False if nothing has. Each model is announced by
        itself: the load of the next one may take long. limit_s: as of `Loader.load`
        """
        refreshed = await asyncio.to_thread(self._repository.refresh)
        now = await asyncio.to_thread(self._fingerprints)
        before, self._seen = self._seen, dict(now)
        for name in sorted(before.keys() - now.keys()):
            self._loader.unload(name)
            self._changed.set()
        changed = [name for name, state in sorted(now.items()) if before.get(name) != state]
        for name in changed:
            if self._loader.goes_on(name):
                # It has changed since that load began: the next look tries it again.
                self._seen[name] = ""
                continue
            logs.info("loading model", model=name)
            try:
                await self._loader.load(name, generation=now[name], limit_s=limit_s)
            except UnreachableError as error:
                # This says nothing about the model, so the next look tries it again.
                self._seen[name] = ""
                logs.warning("model not fetched", model=name, cause=error.message)
            except MeshError as error:
                logs.error("model not loaded", model=name, cause=error.message)
            self._changed.set()
        return refreshed or bool(changed) or before.keys() != now.keys()

    def _fingerprints(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, source in self._repository.listed().items():
            try:
                found[name] = source.fingerprint(name)
            except OSError as error:
                # It is being changed at this moment; the next look sees the result.
                logs.warning("model not looked at", model=name, cause=str(error))
                if name in self._seen:
                    found[name] = self._seen[name]
        return found


async def follow_listings(repository: ModelRepository, period_s: float, changed: asyncio.Event) -> None:
    """Keeps what the index says of repositories elsewhere up to date, where models are loaded on request. Runs for
    ever. The arguments are those of `Polling`.
    """
    await _repeat(partial(asyncio.to_thread, repository.refresh), period_s, changed)


async def _repeat(look: Callable[[], Awaitable[bool]], period_s: float, changed: asyncio.Event) -> None:
    """Looks again and again. look: returns whether anything has changed"""
    while True:
        await asyncio.sleep(period_s)
        try:
            if await look():
                changed.set()
        except OSError as error:
            # A repository that cannot be read at the moment says nothing about its models.
            logs.warning("models not looked at", cause=str(error))
