"""The Redis of a private mesh: one server, a primary with replicas and Sentinels, or a Cluster. Faults can hit each."""

from __future__ import annotations

import asyncio
import signal
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, Self, TypeVar

from deploy.chaos.clustered import PRIMARIES, ClusteredRedis
from deploy.chaos.faults import KINDS, Act, Victim
from deploy.chaos.links import REDIS, Links
from deploy.chaos.node import HOST, Node
from deploy.chaos.replicated import ReplicatedRedis

T = TypeVar("T", ClusteredRedis, ReplicatedRedis)


class OwnRedis(ABC, Generic[T]):
    """Some servers, as the target of faults.

    A server ends with the thread that started it. So all calls are made in one thread that lives as long as the mesh.
    Of two faults that are due together, the second waits until Redis has recovered from the first.

    A context manager: it is up on entry, gone on exit.

    kept   for the report: what the servers are, and how they keep data
    kinds  names of the faults that can hit it
    """

    kept: str

    def __init__(self, servers: T, *impossible: Victim) -> None:
        self._servers = servers
        self._thread = ThreadPoolExecutor(1, "redis")
        self.kinds = [kind.name for kind in KINDS.values() if kind.victim not in impossible]

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
        return self.url

    def about(self) -> str:
        with self._servers.nodes[0].client() as client:
            info = client.info("server")
        program = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"
        return f"{program}, {self.kept}"

    async def strike(self, act: Act, seconds: float) -> None:
        """Carries a fault out, and returns when Redis has recovered."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._strike, act, seconds)

    @abstractmethod
    def _strike(self, act: Act, seconds: float) -> None: ...

    def _strike_primary(self, primary: Node, act: Act, seconds: float) -> None:
        """Hits a primary that has a replica. A frozen one and some of its clients still take it for the primary when it
        wakes up.
        """
        match act:
            case Act.KILL:
                self._servers.strike(primary, signal.SIGKILL)
                self._servers.replaced(primary)
            case Act.RESTART:
                primary.stop()
                self._servers.replaced(primary)
            case _:
                self._servers.strike(primary, signal.SIGSTOP)
                try:
                    time.sleep(seconds)
                    if act is Act.FREEZE:
                        self._servers.replaced(primary)
                finally:
                    primary.send(signal.SIGCONT)


class OwnServer(OwnRedis[ReplicatedRedis]):
    """One server behind a proxy."""

    kept = "one server, append-only file, appendfsync always"

    def __init__(self, directory: Path) -> None:
        super().__init__(ReplicatedRedis(directory, replicas=0), Victim.REPLICA, Victim.NODE)

    def url_for_services(self, links: Links) -> str:
        server = self._servers.primary()
        return server.url.replace(server.address, links.listen(REDIS, HOST, server.port))

    def _strike(self, act: Act, seconds: float) -> None:
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


class OwnFailover(OwnRedis[ReplicatedRedis]):
    """A primary with two replicas and three Sentinels.

    A fault hits the primary: a replica is promoted, and the old one comes back as a replica. min-replicas-to-write is
    1, and a fault hits the primary only when its replicas have every acknowledged write. So only one fault may lose
    writes, the one that is meant to (`promote-replica`).
    """

    kept = "a primary, two replicas and three Sentinels, append-only file, appendfsync always, min-replicas-to-write 1"

    def __init__(self, directory: Path, *, down_after_ms: int) -> None:
        servers = ReplicatedRedis(directory, replicas=2, min_replicas=1, down_after_ms=down_after_ms)
        super().__init__(servers, Victim.REDIS_LINKS, Victim.NODE)

    def _strike(self, act: Act, seconds: float) -> None:
        if act is Act.PROMOTE:
            self._servers.demand_replicas(0)
            self._servers.promote_stale(seconds)
        else:
            self._strike_primary(self._servers.primary(), act, seconds)
        self._servers.revive()
        self._servers.demand_replicas(1)


class OwnCluster(OwnRedis[ClusteredRedis]):
    """A Cluster of three primaries with a replica each. A fault hits the next primary, when its replica has every
    acknowledged write. No proxy can stand before it: the nodes tell of each other by their own addresses.
    """

    kept = "a Cluster of three primaries with a replica each, append-only file, appendfsync always"

    def __init__(self, directory: Path, *, node_timeout_ms: int) -> None:
        servers = ClusteredRedis(directory, replicas=1, node_timeout_ms=node_timeout_ms)
        super().__init__(servers, Victim.REDIS_LINKS, Victim.REPLICA)
        self._struck = 0

    @property
    def primaries(self) -> list[Node]:
        return self._servers.primaries()

    def _strike(self, act: Act, seconds: float) -> None:
        struck = self.primaries[self._struck % PRIMARIES]
        self._struck += 1
        if act is Act.LOSE:
            self._servers.lose(struck)
            time.sleep(seconds)
        else:
            self._strike_primary(struck, act, seconds)
        self._servers.revive()
