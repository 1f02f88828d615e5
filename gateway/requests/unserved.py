"""Fails stateless requests of a model version that no living executor has.

When a version is unloaded, its executors refuse the requests that come too late (`executor.lease.serving`). That needs
a living executor; this module is for the case that all of them were lost for good. Sequences that wait for a slot are
the scheduler's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence

from gateway.models.catalog import Catalog, Place
from gateway.requests.waiting import PendingRequest
from shared.contract.errors import MeshError
from shared.process import logs

LOOK_S = 1.0
PATIENCE_S = 60.0
"""How long a version may be without an executor. Four times what a killed one needs to be back (`ABSENCE_GRACE_S`): a
late answer is better than a refusal."""


Withdraw = Callable[[PendingRequest], None]
"""Takes a request out of its queue in Redis."""


async def look_for_unserved(
    catalog: Catalog, waiting: Callable[[], Sequence[PendingRequest]], withdraw: Withdraw
) -> None:
    """Fails such requests, for ever. waiting: gives the requests of this gateway that wait for a reply"""
    while True:
        await asyncio.sleep(LOOK_S)
        if gone := catalog.unserved_for(PATIENCE_S):
            _fail_those_of(gone, catalog, waiting(), withdraw)


def _fail_those_of(
    gone: Container[Place], catalog: Catalog, waiting: Sequence[PendingRequest], withdraw: Withdraw
) -> None:
    # A function of its own: the one above would keep the last request that it has looked at.
    for pending in waiting:
        if pending.accepted is not None and pending.admitted.sequence is None:
            fail_if_gone(pending, gone, catalog, withdraw)


def fail_if_gone(pending: PendingRequest, gone: Container[Place], catalog: Catalog, withdraw: Withdraw) -> None:
    """Fails a request to one of these versions with the error that a new request would get now."""
    model, version = pending.admitted.message.model, pending.admitted.message.version
    if (model, version) not in gone:
        return
    try:
        catalog.find(model, version)
    except MeshError as error:
        logs.warning("request given up", model=model, version=version, cause=error.message)
        withdraw(pending)
        # Its traceback has the request, which has the error: in a cycle, the inputs would wait for the collector.
        pending.failed(error.released())
