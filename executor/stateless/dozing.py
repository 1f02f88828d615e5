"""Waits for the wake-up tokens of many quiet queues at once, on one connection to each server.

A queue whose requests come often has a connection on which its executor waits for its token (`work_source`): each
request that finds nobody busy ends such a wait. A queue that had none for a while *dozes*: its token is waited for
here, with those of all other dozing queues.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from executor.connections import RETRY_DELAY_S
from shared.process import logs
from shared.store.commands import Redis
from shared.store.connections.link import Link
from shared.store.connections.redis_py import LOST_OR_REFUSED
from shared.store.keyspace import WorkKeys
from shared.store.reading import text_of

LOOK_S = 1
"""Dozing queues are looked at this often, because an executor may have died with a wake-up token."""


@dataclass(frozen=True, slots=True)
class Dozer:
    """A queue that dozes. woken: gets whether the token was taken"""

    queue: str
    woken: asyncio.Future[bool]


class Dozing:
    """The dozing queues of one executor, by the server that holds them."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._parts = {server: DozingPart(server) for server in redis.homes()}

    async def doze(self, queue: WorkKeys) -> bool:
        """Returns when there may be a request in the queue: True if its token was taken, False if it lies there
        without one.
        """
        return await self._parts[self._redis.home(queue.wake)].doze(queue)

    async def run(self) -> None:
        """Wakes the dozing queues, for ever."""
        async with asyncio.TaskGroup() as group:
            for part in self._parts.values():
                group.create_task(part.run(), name="dozing queues")


class DozingPart:
    """Those that one server holds."""

    def __init__(self, redis: Redis) -> None:
        self._link = Link(redis)
        self._dozers: dict[str, Dozer] = {}
        self._any = asyncio.Event()

    async def doze(self, queue: WorkKeys) -> bool:
        dozer = Dozer(queue.queue, asyncio.get_running_loop().create_future())
        self._dozers[queue.wake] = dozer
        self._any.set()
        # The pop that is under way does not name it.
        self._link.cut_short()
        return await dozer.woken

    async def run(self) -> None:
        try:
            while True:
                await self._any.wait()
                try:
                    await self._link.connect()
                    await self._look()
                    await self._pop()
                except LOST_OR_REFUSED as error:
                    logs.warning("wake-ups delayed", cause=str(error))
                    await asyncio.sleep(RETRY_DELAY_S)
        finally:
            await self._link.close()

    def _asleep(self) -> dict[str, Dozer]:
        """Those that doze; the others are forgotten here."""
        self._dozers = {wake: dozer for wake, dozer in self._dozers.items() if not dozer.woken.done()}
        if not self._dozers:
            self._any.clear()
        return self._dozers

    async def _look(self) -> None:
        """Wakes the queues that are not empty."""
        dozers = list(self._asleep().values())
        # One command for all: hardly ever is one of them not empty.
        if not dozers or await self._link.ask([("EXISTS", *(dozer.queue for dozer in dozers))]) == [0]:
            return
        filled = await self._link.ask([("EXISTS", dozer.queue) for dozer in dozers])
        for dozer, is_filled in zip(dozers, filled, strict=True):
            if is_filled and not dozer.woken.done():
                dozer.woken.set_result(False)

    async def _pop(self) -> None:
        """Waits for a token, and wakes its queue."""
        dozers = self._asleep()
        if not dozers:
            return
        # Of a token that was taken when the pop was cut short, `_look` finds the queue.
        popped = await self._link.wait(("BLPOP", *dozers, LOOK_S), blocking_s=LOOK_S)
        if popped is not None and not (woken := dozers[text_of(popped[0])].woken).done():
            woken.set_result(True)
