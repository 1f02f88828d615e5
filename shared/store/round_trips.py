"""Round trips to Redis, one at a time. Calls that gather during one round trip go with the next.

If a round trip failed, wholly or in part, its calls go again after a pause. The pause grows with each failure in a row.
Its length is random, because many processes lose a server at the same moment. The user of this class decides which
calls may go again, in which order with newer calls, and what becomes of a refusal.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from shared.process import logs
from shared.store.connections.link import Link
from shared.store.connections.redis_client import pause_s
from shared.store.connections.redis_py import CONNECTION_LOST
from shared.store.script_sender import Call
from shared.store.scripts import Scripts

T = TypeVar("T")


def put_back(queue: deque[T], taken: Sequence[T]) -> None:
    """Puts what was taken from a queue with a bound in front again. Of what has no room the oldest is dropped; the
    queue itself would drop its newest.
    """
    assert queue.maxlen is not None, "the queue has a bound"
    room = queue.maxlen - len(queue)
    queue.extendleft(reversed(taken[max(0, len(taken) - room) :]))


class RoundTrips:
    """The round trips of one user.

    link  the user's own connection, closed at the end; None: calls go over the pool of the scripts
    what  names the calls in the log
    """

    def __init__(self, scripts: Scripts, link: Link | None, what: str) -> None:
        self._scripts = scripts
        self._link = link
        self._what = what
        self._due = asyncio.Event()

    def due(self) -> None:
        """There is something to send."""
        self._due.set()

    async def run(self, depart: Callable[[], Awaitable[bool]]) -> None:
        """Makes a round trip whenever one is due, for ever.

        depart  makes it; False, or one of CONNECTION_LOST, when some of what it sent is to be sent again
        """
        try:
            while True:
                await self._due.wait()
                self._due.clear()
                failures = 0
                while not await self._departed(depart):
                    failures += 1
                    await asyncio.sleep(pause_s(failures))
        finally:
            if self._link is not None:
                await self._link.close()

    async def _departed(self, depart: Callable[[], Awaitable[bool]]) -> bool:
        try:
            return await depart()
        except CONNECTION_LOST as lost:
            logs.warning("round trip to redis lost", what=self._what, cause=str(lost))
            return False

    async def send(self, calls: Sequence[Call[T]], link: Link | None = None) -> list[T | Exception]:
        """One round trip: the calls in one write. Results and errors are those of `Scripts.run_all`.

        link  a connected link in place of the user's own
        """
        if link is None and (link := self._link) is not None:
            await link.connect()
        return await self._scripts.run_all(calls, link)

    async def tell(self, calls: Sequence[Call[Any]]) -> None:
        """One round trip with calls for whose results nobody waits: what Redis refuses is logged.

        Raises one of CONNECTION_LOST, also if it is one call's outcome alone.
        """
        for outcome in await self.send(calls):
            if isinstance(outcome, ResponseError):
                logs.error("redis refused a script", error=str(outcome))
            elif isinstance(outcome, Exception):
                raise outcome
