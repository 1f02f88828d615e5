"""An executor's connections to Redis, by use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from shared.contract.limits import VALUE_BYTES_MAX
from shared.process import logs
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.redis_client import CONNECTION_LOST
from shared.store.scripts import Scripts
from shared.store.server_run import ServerRun

RETRY_DELAY_S = 0.2

T = TypeVar("T")
OpenClient = Callable[[ServerRun], Redis]
"""Makes a client whose connections are bound to a run of the server."""


class RedisConnections:
    """Blocking reads must not hold up commands, so they have a pool of their own.

    Neither repeats a call by itself: a read whose reply was lost is repeated by its caller, who knows what it meant.
    """

    def __init__(self, open_client: OpenClient, keys: Keyspace, value_bytes_max: int = VALUE_BYTES_MAX) -> None:
        """value_bytes_max: what the server takes as one value."""
        self.value_bytes_max = value_bytes_max
        self._open = open_client
        self.run = ServerRun()
        self.commands = open_client(self.run)
        self.blocking = open_client(self.run)
        self.keys = keys
        self.scripts = Scripts(self.commands, keys)
        self.membership = Membership(self.commands, keys)

    @asynccontextmanager
    async def unbound(self) -> AsyncGenerator[tuple[Redis, ServerRun]]:
        """A client of whatever server is there now, and its run; for the comparison after which the other clients may
        be bound to it."""
        run = ServerRun()
        client = self._open(run)
        try:
            await cast("Any", client).ping()
            yield client, run
        finally:
            await client.aclose()

    async def follow(self) -> None:
        """Goes over to whatever server is there, for ever; for the time in which nothing is held of any."""
        while True:
            await self.run.changed.wait()
            await insist("agreement with Redis", self._agree)

    async def _agree(self) -> None:
        async with self.unbound() as (_, run):
            self.run.agree(run.bound)

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
