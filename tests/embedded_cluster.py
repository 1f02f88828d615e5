"""A real Redis Cluster for the tests: some nodes with the slots among them, and maybe a replica of each."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from redis import Redis

from deploy.local.embedded import free_port
from shared.store.cluster import SLOTS, slot_of
from tests.embedded_redis import EmbeddedRedis

FORM_TIMEOUT_S = 60.0
NODE_TIMEOUT_MS = 1_500
PAUSE_MS = 5_000
KEYS_MOVED = 10
"""In one command of a move: few, so that others come between."""
MOVE_TIMEOUT_MS = 5_000


class EmbeddedCluster:
    """A cluster that ends with the process that started it. A context manager: starts on entry, stops on exit. What a
    node has acknowledged it has on its disk, and nodes with slots serve though others are away.

    primaries  nodes with slots, in ranges of equal length
    replicas   of each of them
    """

    def __init__(self, data_dir: Path, *, primaries: int = 3, replicas: int = 0) -> None:
        password = secrets.token_urlsafe(24)
        options = (
            "cluster-enabled yes",
            f"cluster-node-timeout {NODE_TIMEOUT_MS}",
            "cluster-replica-validity-factor 0",
            "cluster-require-full-coverage no",
            "repl-diskless-sync-delay 0",
            f"masterauth {password}",
        )
        self.nodes = [
            EmbeddedRedis(
                data_dir / f"node-{number}",
                password=password,
                options=(*options, f"cluster-port {free_port()}"),
                appendfsync="always",
            )
            for number in range(primaries * (1 + replicas))
        ]
        self.primaries = self.nodes[:primaries]
        self._replicas = self.nodes[primaries:]

    @property
    def url(self) -> str:
        named = ",".join(f"{node.host}:{node.port}" for node in self.nodes[:3])
        return f"redis+cluster://:{self.nodes[0].password}@{named}"

    def __enter__(self) -> Self:
        return self.start()

    def start(self) -> Self:
        """Returns when the Cluster takes commands."""
        for node in self.nodes:
            node.data_dir.mkdir(parents=True, exist_ok=True)
            node.start()
        width = -(-SLOTS // len(self.primaries))
        for number, node in enumerate(self.primaries):
            first = number * width
            ask(node, "CLUSTER", "ADDSLOTSRANGE", first, min(first + width, SLOTS) - 1)
            ask(node, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            ask(node, "CLUSTER", "MEET", self.nodes[0].host, self.nodes[0].port, self._bus_port(self.nodes[0]))
        self.until(lambda: all(int(self._state(node)["cluster_known_nodes"]) == len(self.nodes) for node in self.nodes))
        for number, node in enumerate(self._replicas):
            of = ask(self.primaries[number % len(self.primaries)], "CLUSTER", "MYID")
            ask(node, "CLUSTER", "REPLICATE", of.decode())
        self.until(lambda: all(self._state(node)["cluster_state"] == "ok" for node in self.nodes))
        self.until(lambda: all(b"master_link_status:up" in ask(node, "INFO", "replication") for node in self._replicas))
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kills every node."""
        for node in self.nodes:
            node.kill()

    def holder(self, tag: str) -> EmbeddedRedis:
        """The node that holds the keys with this tag, as the first node alive has it."""
        asked = next(node for node in self.nodes if node.is_running)
        for first, last, holder, *_ in ask(asked, "CLUSTER", "SLOTS"):
            if first <= slot_of(tag) <= last:
                return next(node for node in self.nodes if node.port == holder[1])
        raise AssertionError(f"nobody holds {tag}")

    def strike(self, node: EmbeddedRedis) -> None:
        """Kills a primary when its replica has every write that it has acknowledged."""
        ask(node, "CLIENT", "PAUSE", PAUSE_MS, "WRITE")
        self.until(lambda: _offset(node, b"master_repl_offset") == _offset(node, b"slave0:.*offset"))
        node.kill()

    def hold_back(self, node: EmbeddedRedis) -> EmbeddedRedis:
        """Cuts the replica of a primary off from new writes, when it has all so far. It runs on, and may take over."""
        self.until(lambda: _offset(node, b"master_repl_offset") == _offset(node, b"slave0:.*offset"))
        replica = next(one for one in self.nodes if b"master_port:%d\r" % node.port in ask(one, "INFO", "replication"))
        ask(replica, "CONFIG", "SET", "masteruser", "nobody")
        ask(replica, "CLIENT", "KILL", "TYPE", "master")
        self.until(lambda: b"master_link_status:down" in ask(replica, "INFO", "replication"))
        return replica

    def replaced(self, node: EmbeddedRedis) -> None:
        """Waits until every node that runs names another holder in the place of this one."""
        self.until(lambda: all(node.port not in _holders(one) for one in self.nodes if one.is_running))

    def whole(self) -> None:
        """Waits until every node runs and finds that all slots are served, by primaries in step with their replicas."""
        for node in self.nodes:
            if not node.is_running:
                node.start()
        self.until(lambda: all(self._is_whole(node) for node in self.nodes))

    def move(self, tag: str, target: EmbeddedRedis) -> None:
        """Moves the slot of a tag to another primary, key by key, as redis-cli does."""
        slot, source = slot_of(tag), self.holder(tag)
        self.begin_move(tag, target)
        while keys := ask(source, "CLUSTER", "GETKEYSINSLOT", slot, KEYS_MOVED):
            migrate(source, target, *keys)
        for node in (target, source, *self.primaries):
            ask(node, "CLUSTER", "SETSLOT", slot, "NODE", ask(target, "CLUSTER", "MYID"))

    def begin_move(self, tag: str, target: EmbeddedRedis) -> None:
        """From now on the keys of a tag may be at either node."""
        slot, source = slot_of(tag), self.holder(tag)
        ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", ask(source, "CLUSTER", "MYID"))
        ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", ask(target, "CLUSTER", "MYID"))

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + FORM_TIMEOUT_S
        while not holds():
            assert time.monotonic() < end, "the cluster takes too long"
            time.sleep(0.02)

    def _is_whole(self, node: EmbeddedRedis) -> bool:
        state, about = self._state(node), ask(node, "INFO", "replication")
        is_covered = (state["cluster_state"], state["cluster_slots_ok"]) == ("ok", str(SLOTS))
        return is_covered and (b"role:master" in about or b"master_link_status:up" in about)

    @staticmethod
    def _bus_port(node: EmbeddedRedis) -> int:
        return int(ask(node, "CONFIG", "GET", "cluster-port")[1])

    @staticmethod
    def _state(node: EmbeddedRedis) -> dict[str, str]:
        return dict(line.split(":", 1) for line in ask(node, "CLUSTER", "INFO").decode().split())


def ask(node: EmbeddedRedis, *command: Any) -> Any:
    """What a node answers to a command, undecoded."""
    with Redis(host=node.host, port=node.port, password=node.password, protocol=2) as client:
        connection: Any = client.connection_pool.get_connection()
        connection.send_command(*command)
        return connection.read_response()


def migrate(source: EmbeddedRedis, target: EmbeddedRedis, *keys: str) -> None:
    """Moves keys to another node."""
    ask(source, "MIGRATE", target.host, target.port, "", 0, MOVE_TIMEOUT_MS, "AUTH", target.password, "KEYS", *keys)


def _holders(node: EmbeddedRedis) -> set[int]:
    ranges: list[Any] = ask(node, "CLUSTER", "SLOTS")
    return {int(holder[1]) for _, _, holder, *_ in ranges}


def _offset(node: EmbeddedRedis, name: bytes) -> int:
    """A number in what a primary says of its replication."""
    found = re.search(rb"^" + name + rb"[:=](\d+)", ask(node, "INFO", "replication"), re.MULTILINE)
    return int(found[1]) if found else 0
