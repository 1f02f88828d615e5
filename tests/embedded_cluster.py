"""A real Redis Cluster for the tests: what an operator and an accident do to it."""

from __future__ import annotations

from typing import Any

from redis import Redis

from deploy.chaos.clustered import ClusteredRedis
from deploy.chaos.node import HOST, Node
from shared.store.connections.cluster import slot_of

KEYS_MOVED = 10
"""In one command of a move: few, so that others come between."""
MOVE_TIMEOUT_MS = 60_000


class EmbeddedCluster(ClusteredRedis):
    """One whose slots can be moved, and whose replicas can be held back."""

    def holder(self, tag: str) -> Node:
        """The node that holds the keys with this tag, as the first node alive has it."""
        asked = next(node for node in self.nodes if node.is_running)
        for first, last, holder, *_ in ask(asked, "CLUSTER", "SLOTS"):
            if first <= slot_of(tag) <= last:
                return next(node for node in self.nodes if node.port == holder[1])
        raise AssertionError(f"nobody holds {tag}")

    def hold_back(self, primary: Node) -> Node:
        """Holds the replica of a primary back, when it has all so far, and returns it."""
        self.caught_up(primary)
        replica = next(node for node in self.nodes if node.info("master_port") == primary.port)
        replica.hold_back()
        return replica

    def move(self, tag: str, target: Node) -> None:
        """Moves the slot of a tag to another primary, key by key, as redis-cli does."""
        slot, source = slot_of(tag), self.holder(tag)
        self.begin_move(tag, target)
        while keys := ask(source, "CLUSTER", "GETKEYSINSLOT", slot, KEYS_MOVED):
            migrate(source, target, *keys)
        for node in (target, source, *self.primaries()):
            ask(node, "CLUSTER", "SETSLOT", slot, "NODE", ask(target, "CLUSTER", "MYID"))

    def begin_move(self, tag: str, target: Node) -> None:
        """From now on the keys of a tag may be at either node."""
        slot, source = slot_of(tag), self.holder(tag)
        ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", ask(source, "CLUSTER", "MYID"))
        ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", ask(target, "CLUSTER", "MYID"))


def ask(node: Node, *command: Any) -> Any:
    """What a node answers to a command, undecoded."""
    with Redis(host=HOST, port=node.port, password=node.password, protocol=2) as client:
        connection: Any = client.connection_pool.get_connection()
        connection.send_command(*command)
        return connection.read_response()


def migrate(source: Node, target: Node, *keys: str) -> None:
    """Moves keys to another node."""
    ask(source, "MIGRATE", HOST, target.port, "", 0, MOVE_TIMEOUT_MS, "AUTH", target.password, "KEYS", *keys)
