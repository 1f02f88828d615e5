"""Poll mode: the models follow what happens in the repository's folders.

Every so often each model's folder is looked at; a new one is loaded, a changed one is loaded anew, one that is gone is
unloaded. A load that fails is tried again only when its folder changes once more, so a model that is being copied is
loaded when it is complete. Every executor looks at its own folders: where they are shared, all follow within a period.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from executor.models.fingerprints import folder_fingerprint
from executor.models.loader import Loader
from executor.models.repository import ModelRepository
from shared.contract.errors import MeshError
from shared.process import logs


class Polling:
    """Watches the folders. period_s: seconds between two looks; changed: set when the mesh should be told."""

    def __init__(self, repository: ModelRepository, loader: Loader, period_s: float, changed: asyncio.Event) -> None:
        self._repository = repository
        self._loader = loader
        self._period_s = period_s
        self._changed = changed
        self._seen: Mapping[str, str] = {}

    async def run(self) -> None:
        """Looks, for ever."""
        while True:
            await asyncio.sleep(self._period_s)
            try:
                if await self.look():
                    self._changed.set()
            except OSError as error:
                # A repository that cannot be read at the moment says nothing about its models.
                logs.warning("models not looked at", cause=str(error))

    async def look(self) -> bool:
        """Loads and unloads what has changed since the last look; whether there was anything."""
        now = await asyncio.to_thread(self._fingerprints)
        before, self._seen = self._seen, now
        for name in sorted(before.keys() - now.keys()):
            self._repository.unload(name)
        changed = [name for name, mark in sorted(now.items()) if before.get(name) != mark]
        for name in changed:
            logs.info("loading model", model=name)
            try:
                await self._loader.load(name, generation=now[name])
            except MeshError as error:
                logs.error("model not loaded", model=name, cause=error.message)
        return bool(changed) or before.keys() != now.keys()

    def _fingerprints(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in self._repository.names():
            folder = self._repository.folder(name)
            try:
                if folder is not None:
                    found[name] = folder_fingerprint(folder)
            except OSError as error:
                # It changes at this very moment: what it becomes is seen at the next look.
                logs.warning("model not looked at", model=name, cause=str(error))
                if name in self._seen:
                    found[name] = self._seen[name]
        return found
