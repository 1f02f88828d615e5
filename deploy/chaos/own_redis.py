"""The Redis of a private mesh: one server, or a primary with replicas and Sentinels. Faults can hit both.

A server ends with the thread that started it, so all calls are made in one thread that lives as long as the mesh. This
also means that of two faults that are due together, the second waits until Redis has recovered from the first.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, Protocol

import redis

from deploy.chaos.faults import KINDS, Act, Victim
from deploy.chaos.links import REDIS, Links
from deploy.chaos.mesh import frozen
from deploy.chaos.replicated import ReplicatedRedis
from deploy.local.embedded import EmbeddedRedis, through

Fsync = Literal["always", "everysec"]


class OwnRedis(Protocol):
    """The interface of a private mesh's Redis. kinds: names of the faults that can hit it."""

    @property
    def url(self) -> str:
        """The URL of the server itself, without a proxy."""
        ...

    @property
    def kinds(self) -> list[str]: ...

    def start(self) -> None:
        """Starts the server, and returns when it takes commands. Call it only in the server's thread."""
        ...

    def stop(self) -> None:
        """Stops the server. Call it only in the server's thread."""
        ...

    def url_for_services(self, links: Links) -> str:
        """The URL for the services: through a proxy, if one can stand before this Redis."""
        ...

    def about(self) -> str:
        """A line for the report."""
        ...

    async def strike(self, act: Act, seconds: float) -> None:
        """Carries a fault out, and returns when Redis has recovered."""
        ...


class OwnServer:
    """One server, behind a proxy."""

    def __init__(self, server: EmbeddedRedis, fsync: Fsync, thread: ThreadPoolExecutor) -> None:
        self._server = server
        self._fsync = fsync
        self._thread = thread
        self._turn = asyncio.Lock()
        never = {"kill-redis"} if fsync == "everysec" else set[str]()
        self.kinds = [
            kind.name for kind in KINDS.values() if kind.victim is not Victim.REPLICA and kind.name not in never
        ]

    @property
    def url(self) -> str:
        """See `OwnRedis`."""
        return self._server.url

    def start(self) -> None:
        """See `OwnRedis`."""
        self._server.start()
        with redis.Redis.from_url(self.url) as client:
            client.config_set("appendfsync", self._fsync)

    def stop(self) -> None:
        """See `OwnRedis`: in order."""
        self._server.stop()

    def url_for_services(self, links: Links) -> str:
        """See `OwnRedis`."""
        return through(links.listen(REDIS, "127.0.0.1", self._server.port), self.url)

    def about(self) -> str:
        """See `OwnRedis`."""
        with redis.Redis.from_url(self.url) as client:
            return f"{program_of(client)}, one server, append-only file, appendfsync {self._fsync}"

    async def strike(self, act: Act, seconds: float) -> None:
        """See `OwnRedis`."""
        async with self._turn:
            match act:
                case Act.KILL:
                    await self._restart(EmbeddedRedis.kill)
                case Act.RESTART:
                    await self._restart(EmbeddedRedis.stop)
                case _:
                    await frozen(self._server.pid, seconds)

    async def _restart(self, end: Callable[[EmbeddedRedis], None]) -> None:
        """Ends the server by `end`, and starts it again on the same data."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, lambda: (end(self._server), self.start()))


class OwnReplicated:
    """A primary with two replicas and three Sentinels. A fault hits the primary: a replica is promoted, and the old one
    comes back as a replica.

    min-replicas-to-write is 1, and a fault hits the primary only when its replicas have every acknowledged write. So
    only one fault may lose writes, the one that is meant to (`promote-replica`).
    """

    def __init__(self, servers: ReplicatedRedis, fsync: Fsync, thread: ThreadPoolExecutor) -> None:
        self._servers = servers
        self._fsync = fsync
        self._thread = thread
        self._turn = asyncio.Lock()
        self.kinds = [kind.name for kind in KINDS.values() if kind.victim is not Victim.REDIS_LINKS]

    @property
    def url(self) -> str:
        """See `OwnRedis`."""
        return self._servers.url

    def start(self) -> None:
        """See `OwnRedis`."""
        self._servers.start()

    def stop(self) -> None:
        """See `OwnRedis`."""
        self._servers.stop()

    def url_for_services(self, links: Links) -> str:
        """See `OwnRedis`."""
        return self.url

    def about(self) -> str:
        """See `OwnRedis`."""
        with self._servers.primary().client() as client:
            program = program_of(client)
        return (
            f"{program}, a primary, two replicas and three Sentinels, append-only file, appendfsync {self._fsync}, "
            "min-replicas-to-write 1"
        )

    async def strike(self, act: Act, seconds: float) -> None:
        """See `OwnRedis`."""
        async with self._turn:
            await asyncio.get_running_loop().run_in_executor(self._thread, partial(self._strike, act, seconds))

    def _strike(self, act: Act, seconds: float) -> None:
        match act:
            case Act.KILL:
                self._servers.replaced(self._servers.strike_primary(signal.SIGKILL))
            case Act.RESTART:
                stopped = self._servers.primary()
                stopped.stop()
                self._servers.replaced(stopped)
            case Act.FREEZE:
                self._freeze(until_replaced=True, seconds=seconds)
            case Act.BLINK:
                self._freeze(until_replaced=False, seconds=seconds)
            case _:
                self._servers.demand_replicas(0)
                self._servers.promote_stale(seconds)
        self._servers.revive()
        self._servers.demand_replicas(1)

    def _freeze(self, *, until_replaced: bool, seconds: float) -> None:
        """Freezes the primary. When it wakes up, it and some of its clients still take it for the primary."""
        stale = self._servers.strike_primary(signal.SIGSTOP)
        try:
            time.sleep(seconds)
            if until_replaced:
                self._servers.replaced(stale)
        finally:
            stale.send(signal.SIGCONT)


def program_of(client: Any) -> str:
    """Which server it is, and which version."""
    info = client.info("server")
    name = "Valkey" if "valkey_version" in info else "Redis"
    return f"{name} {info.get('valkey_version', info['redis_version'])}"
