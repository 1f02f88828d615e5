"""Sends script calls to Redis that may be made twice: all that gather during one round trip go with the next."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from shared.process import logs
from shared.store.connections.link import SharedLinks
from shared.store.round_trips import RoundTrips
from shared.store.script_sender import Call
from shared.store.scripts import Scripts

T = TypeVar("T")


class Carrier:
    """Sends all calls that have gathered together, with one round trip under way at a time. Calls that were lost, or
    failed, are sent again.
    """

    def __init__(self, scripts: Scripts, links: SharedLinks, what: str) -> None:
        self._trips = RoundTrips(scripts, None, what)
        self._links = links
        self._what = what
        self._waiting: list[tuple[Call[Any], asyncio.Future[Any]]] = []

    def send(self, call: Call[T]) -> asyncio.Future[T]:
        """Puts a call in the next round trip. A call may be carried out even if its future is cancelled."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, future))
        self._trips.due()
        return future

    async def run(self) -> None:
        await self._trips.run(self._depart)

    async def _depart(self) -> bool:
        """One round trip. False: some calls failed; they go again, before what came meanwhile."""
        self._waiting = [(call, future) for call, future in self._waiting if not future.done()]
        if not self._waiting:
            return True
        async with self._links.connected() as link:
            # Taken now: more may have gathered while all links were in use.
            outcomes = await self._trips.send([call for call, _ in self._waiting], link)
        answered, newer = self._waiting[: len(outcomes)], self._waiting[len(outcomes) :]
        failed: list[tuple[Call[Any], asyncio.Future[Any]]] = []
        causes: set[str] = set()
        for (call, future), outcome in zip(answered, outcomes, strict=True):
            if isinstance(outcome, Exception):
                failed.append((call, future))
                causes.add(str(outcome))
            elif not future.done():
                future.set_result(outcome)
        self._waiting = failed + newer
        if failed:
            logs.error("calls failed", what=self._what, calls=len(failed), cause="; ".join(sorted(causes)))
        return not failed
