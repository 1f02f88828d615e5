"""A Redis Cluster on loopback: real processes, to be killed and frozen.

For chaos and for tests. All nodes have one password; calls block, as those of the nodes.
"""

from __future__ import annotations

import secrets
import signal
from pathlib import Path
from typing import Any

from deploy.chaos.node import CHANGE_TIMEOUT_S, HOST, Node, Started, until
from deploy.local.embedded import free_port
from shared.store.connections.cluster import SLOTS

PRIMARIES = 3
PAUSE_MS = {signal.SIGKILL: 60_000, signal.SIGSTOP: 2_000}
"""For so long a struck primary takes no writes. One that is woken takes some again: its pause ends by itself."""


class ClusteredRedis(Started):
    """Three primaries with the slots among them, and maybe a replica of each. What a node has acknowledged is on its
    disk, and nodes with slots serve though others are away.

    replicas         of each primary: 0 or 1
    node_timeout_ms  without an answer for so long a primary is replaced
    """

    def __init__(self, directory: Path, *, replicas: int = 0, node_timeout_ms: int = 1500) -> None:
        password = secrets.token_hex(16)
        options = {
            "masterauth": password,
            "repl-diskless-sync-delay": "0",
            "cluster-enabled": "yes",
            "cluster-node-timeout": str(node_timeout_ms),
            "cluster-replica-validity-factor": "0",
            "cluster-require-full-coverage": "no",
        }
        self._buses = [free_port(HOST) for _ in range(PRIMARIES * (1 + replicas))]
        self.nodes = [
            Node(
                directory / f"node-{number}",
                password=password,
                options=options | {"cluster-port": str(bus)},
                appendfsync="always",
            )
            for number, bus in enumerate(self._buses, start=1)
        ]

    @property
    def url(self) -> str:
        hosts = ",".join(one.address for one in self.nodes[:PRIMARIES])
        return f"redis+cluster://:{self.nodes[0].password}@{hosts}"

    def start(self) -> None:
        """Returns when every slot is served and every replica is in step."""
        for one in self.nodes:
            one.start()
        primaries, replicas = self.nodes[:PRIMARIES], self.nodes[PRIMARIES:]
        width = -(-SLOTS // PRIMARIES)
        for number, one in enumerate(primaries):
            begin = number * width
            one.order("CLUSTER", "ADDSLOTSRANGE", begin, min(begin + width, SLOTS) - 1)
            one.order("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for one in self.nodes[1:]:
            one.order("CLUSTER", "MEET", HOST, self.nodes[0].port, self._buses[0])
        names = [told(one, "MYID") for one in primaries]
        until(
            lambda: all(name in told(one, "NODES") for one in replicas for name in names),
            "replicas know the primaries",
            CHANGE_TIMEOUT_S,
        )
        for name, replica in zip(names, replicas, strict=False):
            replica.order("CLUSTER", "REPLICATE", name)
        self.revive()

    def stop(self) -> None:
        """Kills all processes: their data is not needed any more."""
        for one in self.nodes:
            one.kill()

    def primaries(self) -> list[Node]:
        """Those that serve slots."""
        return [one for one in self.nodes if one.is_running and one.info("role") == "master"]

    def strike(self, primary: Node, sent: signal.Signals = signal.SIGKILL) -> None:
        """Sends a primary a signal when its replica has every write that it has acknowledged."""
        primary.order("CLIENT", "PAUSE", PAUSE_MS[sent], "WRITE")
        self.caught_up(primary)
        primary.send(sent)

    def lose(self, primary: Node) -> None:
        """Kills a primary and its replica, which has every write that it has acknowledged: nobody takes its place."""
        replica = next(one for one in self.nodes if one.info("master_port") == primary.port)
        self.strike(primary)
        replica.kill()

    def caught_up(self, primary: Node) -> None:
        """Waits until the replica of a primary has all that the primary has."""

        def caught_up() -> bool:
            replica = primary.info("slave0")
            return bool(replica) and replica["offset"] == primary.info("master_repl_offset")

        until(caught_up, "the replica has caught up", CHANGE_TIMEOUT_S)

    def replaced(self, primary: Node) -> None:
        """Waits until every other node that runs names another in its place."""
        others = [one for one in self.nodes if one is not primary and one.is_running]

        def agrees(one: Node) -> bool:
            slots = told(one, "SLOTS")
            return bool(slots) and all(holder[1] != primary.port for _, _, holder, *_ in slots)

        until(lambda: all(map(agrees, others)), f"{primary.address} is replaced", CHANGE_TIMEOUT_S)

    def revive(self) -> None:
        """Starts the killed nodes. Returns when every slot is served and every replica is in step."""
        for one in self.nodes:
            if not one.is_running:
                one.start()
        until(self._is_whole, "every replica is in step", CHANGE_TIMEOUT_S)

    def _is_whole(self) -> bool:
        """Whether each primary has a replica that is in step, and every node sees all slots served."""
        replicas = [one for one in self.nodes if one.info("role") == "slave"]
        return (
            len(replicas) == len(self.nodes) - PRIMARIES
            and all(one.info("master_link_status") == "up" for one in replicas)
            and all(_covers(one) for one in self.nodes)
        )


def _covers(one: Node) -> bool:
    state = told(one, "INFO")
    return "cluster_state:ok" in state and f"cluster_slots_ok:{SLOTS}" in state


def told(one: Node, *words: str) -> Any:
    """What a node answers to CLUSTER; "" while it does not answer."""

    def ask(client: Any) -> Any:
        # Past redis-py's own reading of such answers.
        client.response_callbacks.clear()
        return client.execute_command("CLUSTER", *words)

    return one.said(ask) or ""
