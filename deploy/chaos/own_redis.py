"""The Redis of a private mesh: one server, a primary with replicas and Sentinels, or a Cluster. Faults can hit each."""

from __future__ import annotations

import asyncio
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from deploy.chaos.clustered import PRIMARIES, ClusteredRedis
from deploy.chaos.faults import KINDS, Act, Victim
from deploy.chaos.links import REDIS, Links
from deploy.chaos.node import HOST, Node
from deploy.chaos.replicated import ReplicatedRedis


class OwnRedis:
    """One server behind a proxy; with sentinels, a primary with two replicas and three Sentinels.

    A server ends with the thread that started it. So all calls are made in one thread that lives as long as the mesh.
    Of two faults that are due together, the second waits until Redis has recovered from the first.

    With Sentinels a fault hits the primary: a replica is promoted, and the old one comes back as a replica.
    min-replicas-to-write is 1, and a fault hits the primary only when its replicas have every acknowledged write. So
    only one fault may lose writes, the one that is meant to (`promote-replica`).

    A context manager: it is up on entry, gone on exit. kinds: names of the faults that can hit it.
    """

    def __init__(self, directory: Path, *, sentinels: bool, down_after_ms: int) -> None:
        self._sentinels = sentinels
        self._servers = ReplicatedRedis(
            directory, replicas=2 if sentinels else 0, min_replicas=1 if sentinels else 0, down_after_ms=down_after_ms
        )
        self._thread = ThreadPoolExecutor(1, "redis")
        impossible = Victim.REDIS_LINKS if sentinels else Victim.REPLICA
        self.kinds = [kind.name for kind in KINDS.values() if kind.victim is not impossible]

    def __enter__(self) -> Self:
        self._thread.submit(self._servers.start).result()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.submit(self._servers.stop).result()
        self._thread.shutdown()

    @property
    def url(self) -> str:
        """Past the proxy, for who looks at Redis while the services are cut off."""
        return self._servers.url

    def url_for_services(self, links: Links) -> str:
        """The URL for the services: through a proxy, if one can stand before this Redis."""
        if self._sentinels:
            return self.url
        server = self._servers.primary()
        return server.url.replace(server.address, links.listen(REDIS, HOST, server.port))

    def about(self) -> str:
        program = program_of(self._servers.primary())
        servers = "a primary, two replicas and three Sentinels" if self._sentinels else "one server"
        said = f"{program}, {servers}, append-only file, appendfsync always"
        return f"{said}, min-replicas-to-write 1" if self._sentinels else said

    async def strike(self, act: Act, seconds: float) -> None:
        """Carries a fault out, and returns when Redis has recovered."""
        strike = self._strike_primary if self._sentinels else self._strike_server
        await asyncio.get_running_loop().run_in_executor(self._thread, strike, act, seconds)

    def _strike_server(self, act: Act, seconds: float) -> None:
        server = self._servers.primary()
        match act:
            case Act.KILL:
                server.kill()
            case Act.RESTART:
                server.stop()
            case _:
                server.send(signal.SIGSTOP)
                time.sleep(seconds)
                server.send(signal.SIGCONT)
        self._servers.revive()

    def _strike_primary(self, act: Act, seconds: float) -> None:
        match act:
            case Act.KILL:
                self._servers.replaced(self._servers.strike_primary(signal.SIGKILL))
            case Act.RESTART:
                stopped = self._servers.primary()
                stopped.stop()
                self._servers.replaced(stopped)
            case Act.FREEZE | Act.BLINK:
                self._freeze_primary(seconds, until_replaced=act is Act.FREEZE)
            case _:
                self._servers.demand_replicas(0)
                self._servers.promote_stale(seconds)
        self._servers.revive()
        self._servers.demand_replicas(1)

    def _freeze_primary(self, seconds: float, *, until_replaced: bool) -> None:
        """When it wakes up, it and some of its clients still take it for the primary."""
        stale = self._servers.strike_primary(signal.SIGSTOP)
        try:
            time.sleep(seconds)
            if until_replaced:
                self._servers.replaced(stale)
        finally:
            stale.send(signal.SIGCONT)


class OwnCluster:
    """A Cluster of three primaries with a replica each, used as `OwnRedis`. A fault hits the next primary, when its
    replica has every acknowledged write.
    """

    def __init__(self, directory: Path, *, node_timeout_ms: int) -> None:
        self._cluster = ClusteredRedis(directory, replicas=1, node_timeout_ms=node_timeout_ms)
        self._thread = ThreadPoolExecutor(1, "redis")
        self._struck = 0
        self.kinds = [kind.name for kind in KINDS.values() if kind.victim not in (Victim.REDIS_LINKS, Victim.REPLICA)]

    def __enter__(self) -> Self:
        self._thread.submit(self._cluster.start).result()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.submit(self._cluster.stop).result()
        self._thread.shutdown()

    @property
    def url(self) -> str:
        return self._cluster.url

    def url_for_services(self, _: Links) -> str:
        """No proxy can stand before it: the nodes tell of each other by their own addresses."""
        return self.url

    @property
    def primaries(self) -> list[Node]:
        return self._cluster.primaries()

    def about(self) -> str:
        program = program_of(self._cluster.nodes[0])
        return f"{program}, a Cluster of three primaries with a replica each, append-only file, appendfsync always"

    async def strike(self, act: Act, seconds: float) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._strike, act, seconds)

    def _strike(self, act: Act, seconds: float) -> None:
        struck = self.primaries[self._struck % PRIMARIES]
        self._struck += 1
        match act:
            case Act.KILL:
                self._cluster.strike(struck, signal.SIGKILL)
                self._cluster.replaced(struck)
            case Act.RESTART:
                struck.stop()
                self._cluster.replaced(struck)
            case _:
                self._cluster.strike(struck, signal.SIGSTOP)
                try:
                    time.sleep(seconds)
                    if act is Act.FREEZE:
                        self._cluster.replaced(struck)
                finally:
                    struck.send(signal.SIGCONT)
        self._cluster.revive()


def program_of(server: Node) -> str:
    with server.client() as client:
        info = client.info("server")
    return f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"
