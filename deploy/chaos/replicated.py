"""A primary, its replicas and Sentinels: real processes on loopback, to be killed, frozen and left behind. Without
replicas it is one server alone.

For chaos and for tests. Servers and Sentinels have passwords of their own. Calls block, as those of their nodes.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.chaos.node import CHANGE_TIMEOUT_S, HOST, READY_TIMEOUT_S, Node, Started, until

SERVICE = "mesh"
REFUSING = 9
"""More replicas than there are."""
PAUSE_MS = 2000
SENTINELS = 3
QUORUM = 2
PERIODS_MS = {"info-period": 500, "publish-period": 200, "ask-period": 200}
"""What Sentinels do every 10 s, 2 s and 1 s otherwise: it would take ten seconds until an old primary that is back has
become a replica, or until the next failover."""
FAILOVER_TIMEOUT_MS = 2000
"""No failover begins sooner than twice this after the one before it."""


class ReplicatedRedis(Started):
    """All of them: the primary, its replicas and the Sentinels.

    replicas      0: one server alone, without Sentinels
    min_replicas  min-replicas-to-write of every server
    down_after_ms  without an answer for so long a primary is replaced
    """

    def __init__(self, directory: Path, *, replicas: int = 1, min_replicas: int = 0, down_after_ms: int = 1000) -> None:
        self._directory = directory
        self._replicas = replicas
        self._min_replicas = min_replicas
        self._down_after_ms = down_after_ms
        self.servers: list[Node] = []
        self.sentinels: list[Node] = []

    @property
    def url(self) -> str:
        """The URL by which a client asks the Sentinels for the present primary; that of a server alone."""
        if not self.sentinels:
            return self.servers[0].url
        hosts = ",".join(sentinel.address for sentinel in self.sentinels)
        secret = self.sentinels[0].password
        return f"redis+sentinel://:{self.servers[0].password}@{hosts}/{SERVICE}/0?sentinel_password={secret}"

    @property
    def nodes(self) -> Sequence[Node]:
        return (*self.servers, *self.sentinels)

    def start(self) -> None:
        """Returns when the first server is the primary, its replicas are in step, and the Sentinels know of all."""
        password, secret = secrets.token_hex(8), secrets.token_hex(8)
        options = {
            "masterauth": password,
            "repl-diskless-sync-delay": "0",
            "min-replicas-to-write": str(self._min_replicas),
        }
        for number in range(1 + self._replicas):
            following = {"replicaof": f"{HOST} {self.servers[0].port}"} if number else {}
            directory = self._directory / f"server-{number + 1}"
            self.servers.append(Node(directory, password=password, options=options | following, appendfsync="always"))
            self.servers[-1].start()
        # Sentinels look for replicas when they start, and then only every ten seconds. So replicas must follow before.
        until(lambda: self._follow(self.servers[0]), "every replica is in step", READY_TIMEOUT_S)
        options = {
            "sentinel monitor": f"{SERVICE} {HOST} {self.servers[0].port} {QUORUM}",
            "sentinel auth-pass": f"{SERVICE} {password}",
            "sentinel down-after-milliseconds": f"{SERVICE} {self._down_after_ms}",
            "sentinel failover-timeout": f"{SERVICE} {FAILOVER_TIMEOUT_MS}",
        }
        for number in range(SENTINELS if self._replicas else 0):
            directory = self._directory / f"sentinel-{number + 1}"
            self.sentinels.append(Node(directory, password=secret, options=options, is_sentinel=True))
            self.sentinels[-1].start()
        self._hasten_sentinels()
        until(lambda: all(map(self._knows_all, self.sentinels)), "Sentinels know all the others", READY_TIMEOUT_S)

    def stop(self) -> None:
        """Kills all processes: their data is not needed any more."""
        for node in self.nodes:
            node.kill()

    def primary(self) -> Node:
        """The server that most Sentinels name as primary. Waits until they agree. A server alone is its own."""
        return until(self._named, "Sentinels agree on a primary", CHANGE_TIMEOUT_S)

    def replaced(self, old: Node) -> None:
        """Waits until another server is the primary and knows it."""

        def is_replaced() -> bool:
            named = self._named()
            return named is not None and named is not old and named.info("role") == "master"

        until(is_replaced, f"{old.address} is replaced", CHANGE_TIMEOUT_S)

    def revive(self) -> None:
        """Starts the killed processes. Returns when every Sentinel answers and every replica is in step.

        An old primary is made a replica here, because the Sentinels take ten seconds for it.
        """
        for sentinel in self.sentinels:
            if not sentinel.is_running:
                sentinel.start()
        self._hasten_sentinels()
        primary = self.primary()
        for server in self.servers:
            if not server.is_running:
                server.start()
                if server is not primary:
                    server.order("REPLICAOF", HOST, primary.port)
        self.rejoined()

    def rejoined(self) -> None:
        """Waits until every running server except the primary is a replica of it, and in step."""
        until(self._in_step, "every replica is in step", CHANGE_TIMEOUT_S)

    def demand_replicas(self, count: int) -> None:
        """Sets min-replicas-to-write on every running server."""
        self._min_replicas = count
        for server in self.servers:
            if server.is_running:
                server.order("CONFIG", "SET", "min-replicas-to-write", count)

    def strike(self, primary: Node, sent: signal.Signals) -> None:
        """Sends the primary a signal when its replicas have every write that it has acknowledged.

        So a write that is missing afterwards was lost by the mesh, not by the replication.
        """
        # The primary now refuses writes, while it still sends earlier ones to its replicas.
        primary.order("CONFIG", "SET", "min-replicas-to-write", REFUSING)
        self.caught_up()
        # A primary that is frozen and woken takes writes again: the pause ends by itself.
        primary.order("CLIENT", "PAUSE", PAUSE_MS, "WRITE")
        primary.order("CONFIG", "SET", "min-replicas-to-write", self._min_replicas)
        primary.send(sent)

    def caught_up(self) -> None:
        """Waits until every replica that runs has what the primary had written when this was called."""
        primary = self.primary()
        written = primary.info("master_repl_offset")
        replicas = [server for server in self.servers if server is not primary and server.is_running]
        until(
            lambda: all((one.info("slave_repl_offset") or 0) >= written for one in replicas),
            "replicas have caught up",
            CHANGE_TIMEOUT_S,
        )

    def promote_stale(self, seconds: float) -> None:
        """Holds every replica back for so long, then kills the primary: the replica that takes its place lacks the
        writes of that time."""
        primary = self.primary()
        self.caught_up()
        replicas = [server for server in self.servers if server is not primary and server.is_running]
        for replica in replicas:
            replica.hold_back()
        time.sleep(seconds)
        primary.kill()
        self.replaced(primary)
        for replica in replicas:
            replica.let_go_on()

    def _hasten_sentinels(self) -> None:
        """A Sentinel that was started again has forgotten its periods."""
        for sentinel in self.sentinels:
            for name, period_ms in PERIODS_MS.items():
                sentinel.order("SENTINEL", "DEBUG", name, period_ms)

    def _in_step(self) -> bool:
        primary = self._named()
        return primary is not None and self._follow(primary)

    def _follow(self, primary: Node) -> bool:
        return all(
            server.info("master_port") == primary.port and server.info("master_link_status") == "up"
            for server in self.servers
            if server is not primary and server.is_running
        )

    def _knows_all(self, sentinel: Node) -> bool:
        state = self._state(sentinel)
        return (state.get("num-slaves"), state.get("num-other-sentinels")) == (self._replicas, SENTINELS - 1)

    def _named(self) -> Node | None:
        if not self.sentinels:
            return self.servers[0]
        said = [self._state(sentinel).get("port") for sentinel in self.sentinels]
        return next((server for server in self.servers if said.count(server.port) >= QUORUM), None)

    def _state(self, sentinel: Node) -> dict[str, Any]:
        return sentinel.said(lambda client: client.sentinel_master(SERVICE)) or {}
