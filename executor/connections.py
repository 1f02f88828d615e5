"""An executor's connections to Redis, by use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from shared.contract.limits import VALUE_BYTES_MAX
from shared.process import logs
from shared.statistics.meter import RoundTripMeter
from shared.store.commands import Redis
from shared.store.connections.link import SharedLinks
from shared.store.connections.redis_py import LOST_OR_REFUSED
from shared.store.connections.server_run import ServerRun
from shared.store.keyspace import Keyspace
from shared.store.membership import Membership
from shared.store.scripts import Scripts

RETRY_DELAY_S = 0.2

T = TypeVar("T")
OpenClient = Callable[[ServerRun], Redis]
"""Makes a client whose connections are bound to a run of the server."""
Compare = Callable[[Redis, str], Awaitable[None]]
"""Compares what this executor knows with what a server holds: an unbound client, the server's home
(`shared.store.connections.server_run`).
"""


class RedisConnections:
    """The executor's connections. Blocking reads must not hold up commands, so they have a pool of their own. So has
    the renewal of the lease: a pool may hold several connections that have lost their other end.

    No pool repeats a call by itself: the caller knows which calls may be repeated.
    """

    def __init__(self, open_client: OpenClient, keys: Keyspace, value_bytes_max: int = VALUE_BYTES_MAX) -> None:
        """value_bytes_max: largest value that the server takes"""
        self.value_bytes_max = value_bytes_max
        self._open = open_client
        self.run = ServerRun()
        self.commands = open_client(self.run)
        self.blocking = open_client(self.run)
        self._renewing = open_client(self.run)
        self.links = SharedLinks(self.commands)
        self.keys = keys
        self.trips = RoundTripMeter("executor")
        self.scripts = Scripts(self.commands, keys, trips=self.trips)
        self.membership = Membership(self.commands, keys)
        self.lease = Membership(self._renewing, keys)

    @asynccontextmanager
    async def unbound(self) -> AsyncGenerator[tuple[Redis, ServerRun]]:
        """A client that is bound to no earlier run of the server, and the run that it meets. It serves to compare data,
        before the other clients may be bound to that run.
        """
        run = ServerRun()
        client = self._open(run)
        try:
            yield client, run
        finally:
            await client.aclose()

    async def follow(self, compare: Compare | None = None) -> None:
        """Binds the clients to each new run of a server, for ever. Homes of a Cluster do not wait for each other.

        compare  is called before; what it raises, beside what `insist` goes on at, is raised in an exception group.
                 None is for a time in which this executor owns nothing
        """
        while True:
            await self.run.changed.wait()
            async with asyncio.TaskGroup() as group:
                for home in self.run.others:
                    group.create_task(self._go_over(home, compare), name="comparison")

    async def _go_over(self, home: str, compare: Compare | None) -> None:
        """Tries once. If it fails, `changed` stays set."""
        try:
            async with self.unbound() as (client, run):
                await client.at(home).ping()
                if compare is not None:
                    await compare(client, home)
                self.run.agree(run.bound)
        except LOST_OR_REFUSED as error:
            logs.warning("comparison with Redis delayed", cause=str(error))
            await asyncio.sleep(RETRY_DELAY_S)

    async def close(self) -> None:
        await self.links.close()
        await self.commands.aclose()
        await self.blocking.aclose()
        await self._renewing.aclose()


async def insist(what: str, call: Callable[[], Awaitable[T]]) -> T:
    """Makes a call until Redis carries it out: it may be away or full, or refuse the user. Only for calls that may be
    repeated.

    what  for the log
    """
    while True:
        try:
            return await call()
        except LOST_OR_REFUSED as error:
            logs.warning(f"{what} delayed", cause=str(error))
            await asyncio.sleep(RETRY_DELAY_S)
