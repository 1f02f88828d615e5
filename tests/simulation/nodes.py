"""A Redis Cluster in which every home has a node of its own: one for the mesh's own keys, and one for each shard."""

from __future__ import annotations

from collections.abc import Mapping

from shared.store.connections.homes import MESH_TAG, tag_of
from tests.simulation.connections import Server
from tests.simulation.store import Args, Reply, Store
from tests.simulation.world import World, later

SLOTS_OF_ALL = [0, (1 << 14) - 1, [b"", 1, b"all"]]
"""Who asks which node has which slots hears of one. By it the shards of a new mesh get the first numbers."""


class Node(Server):
    """The server of one home. The keys of all homes are in one store."""

    def __init__(self, store: Store, home: str) -> None:
        super().__init__(store, later)
        self._home = home

    def execute(self, command: Args) -> Reply:
        if command[0].upper() == b"CLUSTER":
            return [SLOTS_OF_ALL]
        reply = super().execute(command)
        if command[0].upper() == b"SCAN":
            return [reply[0], [key for key in reply[1] if tag_of(key.decode()) == self._home]]
        return reply


class WorldOfNodes(World):
    """A mesh on such a Cluster."""

    url = "redis+cluster://twin:1"

    def _servers(self) -> Mapping[str, Server]:
        return {home: Node(self.store, home) for home in (MESH_TAG, *map(str, self.keys.shards))}
