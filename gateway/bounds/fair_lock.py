"""A lock for which clients take turns: one with hundreds of requests does not keep another one waiting for them all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from gateway.bounds.client_queue import ClientQueue

T = TypeVar("T")


class FairLock:
    """Held by one at a time. Of those that wait, the clients take turns, and each client's go in their order."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting = ClientQueue[asyncio.Future[None]]()

    @asynccontextmanager
    async def held(self, client: str) -> AsyncGenerator[None]:
        if self._is_held:
            come = asyncio.get_running_loop().create_future()
            self._waiting.append(client, come)
            try:
                await come
            except asyncio.CancelledError:
                if not come.cancelled():
                    self._hand_on()
                raise
        self._is_held = True
        try:
            yield
        finally:
            self._hand_on()

    async def in_thread(self, client: str, work: Callable[..., T], *given: Any) -> T:
        """What `work` returns, in a thread. One goes at a time: each further thread would keep the event loop waiting
        for its turn of the interpreter, and none would be done earlier."""
        async with self.held(client):
            return await through_in_thread(work, *given)

    def _hand_on(self) -> None:
        self._is_held = False
        while self._waiting and not self._is_held:
            come = self._waiting.popleft()
            if not come.done():
                self._is_held = True
                come.set_result(None)


async def through_in_thread(work: Callable[..., T], *given: Any) -> T:
    """What `work` returns, in a thread. Who is cancelled meanwhile goes on when it has ended: nothing ends a thread, so
    clients that leave would have many at work, beside each other and uncounted."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *given))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.gather(working, return_exceptions=True)
        raise
