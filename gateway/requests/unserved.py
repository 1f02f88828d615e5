"""Fails stateless requests of a model version that no living executor has.

When a version is unloaded, its executors refuse the requests that come too late (`executor.lease.serving`). That needs
a living executor; this module is for the case that all of them were lost for good. Sequences that wait for a slot are
the scheduler's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gateway.models.catalog import Catalog, Place
from gateway.requests.waiting import PendingRequest
from shared.contract.errors import MeshError
from shared.process import logs

LOOK_S = 1.0
PATIENCE_S = 60.0
"""How long a version may be without an executor. Four times what a killed one needs to be back (`ABSENCE_GRACE_S`): a
late answer is better than a refusal."""


class Unserved:
    """The task that looks for such requests.

    waiting   gives the requests of this gateway that wait for a reply
    withdraw  takes a request out of its queue in Redis
    """

    def __init__(
        self,
        catalog: Catalog,
        waiting: Callable[[], Sequence[PendingRequest]],
        withdraw: Callable[[PendingRequest], None],
    ) -> None:
        self._catalog = catalog
        self._waiting = waiting
        self._withdraw = withdraw

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Fails the requests that no executor will take."""
        gone = self._catalog.unserved_for(PATIENCE_S)
        if not gone:
            return
        lost = [
            pending
            for pending in self._waiting()
            if pending.accepted is not None and pending.admitted.sequence is None and place_of(pending) in gone
        ]
        for pending in lost:
            self._give_up(pending)

    def _give_up(self, pending: PendingRequest) -> None:
        """Fails the request with the error that a new request to this version would get now."""
        model, version = place_of(pending)
        try:
            self._catalog.find(model, version)
        except MeshError as error:
            logs.warning("request given up", model=model, version=version, cause=error.message)
            self._withdraw(pending)
            # Its traceback has the request, which has the error: in a cycle, the inputs would wait for the collector.
            pending.failed(error.released())


def place_of(pending: PendingRequest) -> Place:
    return pending.admitted.message.model, pending.admitted.message.version
