"""Gives up stateless requests that nobody will take: their model was unloaded everywhere before an executor took them.

A gateway may have accepted them because it looked at the mesh a moment ago, or because it was frozen meanwhile. What
waits for a slot of an unloaded model is the scheduler's to refuse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gateway.catalog import Catalog
from gateway.waiting import Waiting
from shared.errors import UnavailableError

LOOK_S = 1.0
UNLOADED_S = 3.0
"""So long after every executor has said that it is gone, no answer can be on its way any more."""


class Unserved:
    """Looks for such requests. waiting: those of this gateway; withdraw: takes one out of its queue."""

    def __init__(
        self, catalog: Catalog, waiting: Callable[[], Sequence[Waiting]], withdraw: Callable[[Waiting], None]
    ) -> None:
        self._catalog = catalog
        self._waiting = waiting
        self._withdraw = withdraw

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> int:
        """Answers those that nobody will; how many."""
        gone = self._catalog.unloaded_for(UNLOADED_S)
        if not gone:
            return 0
        lost = [waiting for waiting in self._waiting() if is_stateless(waiting) and place_of(waiting) in gone]
        for waiting in lost:
            model, version = place_of(waiting)
            self._withdraw(waiting)
            waiting.failed(
                UnavailableError(f"Request for unknown model: '{model}' version {version} is not at ready state")
            )
        return len(lost)


def is_stateless(waiting: Waiting) -> bool:
    """Whether it waits in a queue of stateless work."""
    return waiting.accepted is not None and waiting.admitted.sequence is None


def place_of(waiting: Waiting) -> tuple[str, str]:
    """Its model and version."""
    return waiting.admitted.message.model, waiting.admitted.message.version
