"""An executor's connections to Redis, by use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from shared import logs
from shared.keyspace import Keyspace
from shared.membership import Membership
from shared.redis_client import CONNECTION_LOST
from shared.scripts import Scripts

RETRY_DELAY_S = 0.2

T = TypeVar("T")


class Connections:
    """Blocking reads must not hold up commands, so they have a pool of their own.

    Neither repeats a call by itself: a read whose reply was lost is repeated by its caller, who knows what it meant.
    """

    def __init__(self, commands: Redis, blocking: Redis, keys: Keyspace) -> None:
        self.commands = commands
        self.blocking = blocking
        self.keys = keys
        self.scripts = Scripts(commands, keys)
        self.membership = Membership(commands, keys)

    async def close(self) -> None:
        """Closes both pools."""
        await self.commands.aclose()
        await self.blocking.aclose()


async def insist(what: str, call: Callable[[], Awaitable[T]]) -> T:
    """Repeats a call that may be repeated until Redis answers, and has memory for it. what: for the log, when it has
    to wait."""
    while True:
        try:
            return await call()
        except (*CONNECTION_LOST, OutOfMemoryError) as error:
            logs.warning(f"{what} delayed", cause=str(error))
            await asyncio.sleep(RETRY_DELAY_S)
