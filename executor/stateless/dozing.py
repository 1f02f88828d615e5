"""Waits for the wake-up tokens of many quiet queues at once, on one connection.

A queue whose requests come often has a connection on which its executor waits for its token (`work_source`): each
request that finds nobody busy ends such a wait. A queue that had none for a while *dozes*: its token is waited for
here, with those of all other dozing queues.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from shared.process import logs
from shared.store.commands import Redis
from shared.store.keyspace import WorkKeys
from shared.store.link import Link
from shared.store.reading import text_of
from shared.store.redis_client import CONNECTION_LOST

LOOK_S = 1
"""Dozing queues are looked at this often, because an executor may have died with a wake-up token."""
RETRY_DELAY_S = 0.2


@dataclass(frozen=True, slots=True)
class Dozer:
    """A queue that dozes. woken: gets whether the token was taken"""

    queue: str
    woken: asyncio.Future[bool]


class Dozing:
    """The dozing queues of one executor."""

    def __init__(self, redis: Redis) -> None:
        self._link = Link(redis)
        self._dozers: dict[str, Dozer] = {}
        self._any = asyncio.Event()
        self._popping: asyncio.Timeout | None = None

    async def doze(self, queue: WorkKeys) -> bool:
        """Returns when there may be a request in the queue: True if its token was taken, False if it lies there
        without one.
        """
        dozer = Dozer(queue.queue, asyncio.get_running_loop().create_future())
        self._dozers[queue.wake] = dozer
        self._any.set()
        # The pop that is under way does not name it.
        if self._popping is not None:
            self._popping.reschedule(0)
            self._popping = None
        try:
            return await dozer.woken
        finally:
            # After a reload the new load may doze in its place already.
            if self._dozers.get(queue.wake) is dozer:
                del self._dozers[queue.wake]

    async def run(self) -> None:
        """Wakes the dozing queues, for ever."""
        try:
            while True:
                await self._any.wait()
                try:
                    await self._link.connect()
                    await self._look()
                    await self._pop()
                except (*CONNECTION_LOST, ResponseError) as error:
                    logs.warning("wake-ups delayed", cause=str(error))
                    await asyncio.sleep(RETRY_DELAY_S)
        finally:
            await self._link.close()

    def _asleep(self) -> dict[str, Dozer]:
        asleep = {wake: dozer for wake, dozer in self._dozers.items() if not dozer.woken.done()}
        if not asleep:
            self._any.clear()
        return asleep

    async def _look(self) -> None:
        """Wakes the queues that are not empty."""
        dozers = list(self._asleep().values())
        # One command for all: hardly ever is one of them not empty.
        if dozers and await self._ask(("EXISTS", *(dozer.queue for dozer in dozers))):
            for dozer in dozers:
                if await self._ask(("EXISTS", dozer.queue)) and not dozer.woken.done():
                    dozer.woken.set_result(False)

    async def _pop(self) -> None:
        """Waits for a token, and wakes its queue."""
        dozers = self._asleep()
        if not dozers:
            return
        # Never runs out by itself; `doze` makes it run out at once.
        self._popping = popping = asyncio.timeout(None)
        try:
            async with popping:
                popped = await self._ask(("BLPOP", *dozers, LOOK_S), blocking_s=LOOK_S)
        except TimeoutError:
            # Expired means `doze`; any other timeout is a connection that does not answer. A token that was taken just
            # then is lost, and `_look` finds its queue.
            if not popping.expired():
                raise
            return
        finally:
            self._popping = None
        if popped is not None and not (woken := dozers[text_of(popped[0])].woken).done():
            woken.set_result(True)

    async def _ask(self, command: tuple[object, ...], *, blocking_s: float = 0.0) -> Any:
        (reply,) = await self._link.exchange([command], blocking_s=blocking_s)
        if isinstance(reply, Exception):
            raise reply
        return reply
