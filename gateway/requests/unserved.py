"""Gives up stateless requests that nobody will take, as no executor is left that knows of their model version.

What comes too late for a version that was unloaded is refused by the executors that had it, while one of them lives
(`executor.lease.serving`); this is for when none does: all were lost, for good. What waits for a slot is the
scheduler's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gateway.models.catalog import Catalog
from gateway.requests.waiting import PendingRequest
from shared.contract.errors import MeshError
from shared.process import logs

LOOK_S = 1.0
PATIENCE_S = 60.0
"""Four times what executors that were killed need to be back: better late than refused."""


class Unserved:
    """Looks for such requests.

    waiting   those of this gateway
    withdraw  takes one out of its queue
    patience_s  how long a version may be served by nobody
    """

    def __init__(
        self,
        catalog: Catalog,
        waiting: Callable[[], Sequence[PendingRequest]],
        withdraw: Callable[[PendingRequest], None],
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._catalog = catalog
        self._waiting = waiting
        self._withdraw = withdraw
        self._patience_s = patience_s

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> int:
        """Answers those that nobody will; how many."""
        gone = self._catalog.unserved_for(self._patience_s)
        if not gone:
            return 0
        lost = [waiting for waiting in self._waiting() if is_stateless(waiting) and place_of(waiting) in gone]
        for waiting in lost:
            self._give_up(waiting)
        return len(lost)

    def _give_up(self, waiting: PendingRequest) -> None:
        """It hears what a request would hear that came now."""
        model, version = place_of(waiting)
        try:
            self._catalog.find(model, version)
        except MeshError as error:
            logs.warning("request given up", model=model, version=version, cause=error.message)
            self._withdraw(waiting)
            waiting.failed(error)


def is_stateless(waiting: PendingRequest) -> bool:
    """Whether it waits in a queue of stateless work."""
    return waiting.accepted is not None and waiting.admitted.sequence is None


def place_of(waiting: PendingRequest) -> tuple[str, str]:
    """Its model and version."""
    return waiting.admitted.message.model, waiting.admitted.message.version
