"""A Redis Cluster on loopback, each primary with a replica: real processes, to be killed and frozen.

For chaos. All nodes have one password; calls block, as those of `deploy.chaos.replicated`.
"""

from __future__ import annotations

import secrets
import signal
from functools import partial
from pathlib import Path

from redis.exceptions import RedisError

from deploy.chaos.replicated import CHANGE_TIMEOUT_S, HOST, PAUSE_MS, READY_TIMEOUT_S, Node, node, until
from deploy.local.embedded import free_port
from shared.store.cluster import SLOTS

PRIMARIES = 3
IN_STEP = "every replica is in step"


class ClusteredRedis:
    """All nodes.

    node_timeout_ms  without an answer for so long a primary is replaced
    """

    def __init__(self, directory: Path, *, node_timeout_ms: int) -> None:
        self._directory = directory
        self._node_timeout_ms = node_timeout_ms
        self.nodes: list[Node] = []

    @property
    def url(self) -> str:
        hosts = ",".join(one.address for one in self.nodes[:PRIMARIES])
        return f"redis+cluster://:{self.nodes[0].password}@{hosts}"

    def start(self) -> None:
        """Returns when every slot is served and every replica is in step."""
        password = secrets.token_hex(8)
        ports = [free_port() for _ in range(4 * PRIMARIES)]
        for number, (port, bus) in enumerate(zip(ports[::2], ports[1::2], strict=True)):
            options = {
                "appendonly": "yes",
                "appendfsync": "always",
                "save": '""',
                "requirepass": password,
                "masterauth": password,
                "repl-diskless-sync-delay": "0",
                "cluster-enabled": "yes",
                "cluster-port": str(bus),
                "cluster-node-timeout": str(self._node_timeout_ms),
                "cluster-replica-validity-factor": "0",
                "cluster-require-full-coverage": "no",
            }
            self.nodes.append(node(self._directory / f"node-{number + 1}", port, password, options, []))
            self.nodes[-1].start()
        for one in self.nodes:
            until(one.answers, f"{one.address} answers", READY_TIMEOUT_S)
        self._join(ports[1])

    def stop(self) -> None:
        """Kills all processes: their data is not needed any more."""
        for one in self.nodes:
            one.kill()

    def primaries(self) -> list[Node]:
        """Those that serve slots."""
        return [one for one in self.nodes if one.is_running and one.info("role") == "master"]

    def strike(self, primary: Node, sent: signal.Signals) -> None:
        """Sends a primary a signal when its replica has every write that it has acknowledged."""
        # A primary that is frozen and woken takes writes again: the pause ends by itself.
        primary.order("CLIENT", "PAUSE", PAUSE_MS, "WRITE")
        until(lambda: _has_caught_up(primary), "the replica has caught up", CHANGE_TIMEOUT_S)
        if sent is signal.SIGKILL:
            primary.kill()
        else:
            primary.send(sent)

    def replaced(self, primary: Node) -> None:
        """Waits until another node serves its slots."""

        def replaced() -> bool:
            serving = [one for one in self.primaries() if one is not primary]
            return len(serving) == PRIMARIES

        until(replaced, f"{primary.address} is replaced", CHANGE_TIMEOUT_S)

    def revive(self) -> None:
        """Starts the killed nodes. Returns when every slot is served and every replica is in step."""
        for one in self.nodes:
            if not one.is_running:
                one.start()
        until(self._is_whole, IN_STEP, CHANGE_TIMEOUT_S)

    def _join(self, bus: int) -> None:
        first, *others = self.nodes
        width = -(-SLOTS // PRIMARIES)
        for number, one in enumerate(self.nodes[:PRIMARIES]):
            begin = number * width
            one.order("CLUSTER", "ADDSLOTSRANGE", begin, min(begin + width, SLOTS) - 1)
            one.order("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for one in others:
            one.order("CLUSTER", "MEET", HOST, first.port, bus)
        for of, replica in zip(self.nodes[:PRIMARIES], self.nodes[PRIMARIES:], strict=True):
            name = _said(of, "CLUSTER", "MYID")
            known = partial(_said, replica, "CLUSTER", "NODES")
            until(lambda: name in known(), "the nodes know each other", READY_TIMEOUT_S)  # noqa: B023 -- called at once
            replica.order("CLUSTER", "REPLICATE", name)
        until(self._is_whole, IN_STEP, READY_TIMEOUT_S)

    def _is_whole(self) -> bool:
        """As every node sees it."""
        replicas = [one for one in self.nodes if one.info("role") == "slave"]
        return (
            len(replicas) == PRIMARIES
            and all(one.info("master_link_status") == "up" for one in replicas)
            and all(_covers(one) for one in self.nodes)
        )


def _has_caught_up(primary: Node) -> bool:
    replica = primary.info("slave0")
    return bool(replica) and replica["offset"] == primary.info("master_repl_offset")


def _covers(one: Node) -> bool:
    state = _said(one, "CLUSTER", "INFO")
    return "cluster_state:ok" in state and f"cluster_slots_ok:{SLOTS}" in state


def _said(one: Node, *words: str) -> str:
    """A node's answer; "" while it does not answer."""
    try:
        with one.client() as client:
            # Past redis-py's own reading of such answers.
            client.response_callbacks.clear()
            return str(client.execute_command(*words))
    except (RedisError, OSError):
        return ""
